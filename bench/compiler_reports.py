"""What a compiler tells about a kernel: bundles and VMEM on TPU, registers and spills on GPU.

A bundle is one very long instruction, what a TPU core issues in a cycle at best. libtpu writes them to
disk if `LIBTPU_INIT_ARGS` asks before it is loaded (`dump_to`); each compilation leaves some 600 files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|\d+)\s+(?:[A-Z]{2}(?:\s[A-Z]{2})*\s*)?:( >)?")
_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_VMEM = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Bundles:
    """Bundles of a kernel's program.

    Args:
      step: of a grid step, those of its first and last ones included: the most that a step issues.
      around: before and behind the loop over the grid, once a call.
    """

    step: int
    around: int

    def of(self, steps: int) -> int:
        """Bundles of a call of so many grid steps, at most; cycles, if nothing has to be waited for."""
        return self.around + self.step * steps


def dump_to(folder: str) -> None:
    """Makes libtpu write its schedules there. Before it is loaded only."""
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"


def read_bundles(folder: Path, kernel: str) -> Bundles:
    """The final schedule of the one kernel of that name that was compiled into a folder, which is emptied."""
    (path,) = folder.glob(f"*-{kernel}.*-final_bundles.txt")
    found = bundles(path.read_text())
    for file in folder.iterdir():
        file.unlink()
    return found


def bundles(text: str) -> Bundles:
    """Counts the bundles of a schedule; those of the loop over the grid are marked with an arrow."""
    lines = [match for match in map(_BUNDLE.match, text.splitlines()) if match]
    inside = sum(match[1] is not None for match in lines)
    return Bundles(step=inside, around=len(lines) - inside)


def vmem(hlo: str) -> int:
    """Bytes of VMEM that the compiler gave to the largest kernel of an optimised program; not XLA's own fusions."""
    kernels = "\n".join(line for line in hlo.splitlines() if "tpu_custom_call" in line)
    return max(map(int, _VMEM.findall(kernels)), default=0)


def hbm_bytes(compiled: Any) -> int:
    """Bytes that a program reads and writes, as its compiler counts them; our kernels tell it theirs."""
    return int((compiled.cost_analysis() or {}).get("bytes accessed", 0))


def assembled(said: str) -> dict[str, int]:
    """Registers of a thread and spilled bytes, from what ptxas said of one kernel; of several, the most."""
    spills = [int(n) for pair in _SPILLED.findall(said) for n in pair]
    found = {"registers": max(map(int, _USED.findall(said)), default=0), "spilled": max(spills, default=0)}
    return found | {"serialized": said.count("serialized")}


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """What the process prints meanwhile, its compilers in C++ included, as one text."""
    told: list[str] = []
    held = [os.dup(n) for n in (1, 2)]
    with tempfile.TemporaryFile() as file:
        try:
            for n in (1, 2):
                os.dup2(file.fileno(), n)
            yield told
        finally:
            for n, old in zip((1, 2), held, strict=True):
                os.dup2(old, n)
                os.close(old)
            file.seek(0)
            told.append(file.read().decode(errors="replace"))
