"""What compilers say is read right: their words are quoted, the figures made up."""

import os
import sys

from bench import compiler_reports as reports

SCHEDULE = """\
= control target key start
LH: loop header
LB: loop body
PF: predicated region fallthrough
= control target key end

     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: f32[8,128], index: 0, kind: input, shape index: {}]  }
   0x1   :  { %10 = vsyncpa [#allocation3], 0 }
   0x2 LB: > { %p1 = scmp.le.s32.totalorder 1, %s2  ;;  %s5 = sphi 0, %s6 /* a comment over two
lines */ }
   0x3   : > { %12 = sbr.rel (%p1) target = $region4 }
   0x4   : > { %v1 = vld [vmem:[%s3] sm:$0xff] } /* Start region 3 */
   0x5 PF: > { %s6 = sadd.s32 1, %s5 } /* End region 3 */
   0x6 PF:  { %13 = vsyncpa [#allocation3], 1 }
"""
ASSEMBLED = """\
ptxas info    : Compiling entry function 'anonymous_mosaic_gpu_kernel' for 'sm_90a'
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 1 bytes smem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 90 registers, used 1 barriers
"""


def test_bundles_in_the_loop_and_around_it():
    found = reports.bundles(SCHEDULE)
    assert found == reports.Bundles(step=4, around=3)
    assert found.of(10) == 43


def test_a_schedule_is_read_once(tmp_path):
    (tmp_path / "17-tree_attention.1-71-schedule-analysis_final_bundles.txt").write_text("Schedule analysis:")
    (tmp_path / "17-tree_attention.1-72-final_bundles.txt").write_text(SCHEDULE)
    (tmp_path / "17-copy.3-40-final_bundles.txt").write_text(SCHEDULE * 2)
    assert reports.read_bundles(tmp_path, "tree_attention").step == 4
    assert not list(tmp_path.iterdir())  # the next kernel's would be taken for this one's


def test_vmem_of_the_largest_kernel():
    said = '"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4096"}]'
    hlo = f'custom_call_target="tpu_custom_call", backend_config={{{said}}}'
    assert reports.vmem(hlo + "\n" + hlo.replace("4096", "344064")) == 344064
    assert reports.vmem(hlo.replace("tpu_custom_call", "other")) == 0


def test_registers_and_spills_of_the_worst_kernel():
    assert reports.assembled(ASSEMBLED) == {"registers": 168, "spilled": 16, "serialized": 1}


def test_what_the_process_prints_is_caught_at_the_bottom(capfd):
    with reports.said() as told:
        os.write(1, b"from C++ ")
        print("from Python", file=sys.stderr, flush=True)
        assert not told
    assert "from C++" in told[0]
    os.write(1, b"behind")
    assert capfd.readouterr().out == "behind"
