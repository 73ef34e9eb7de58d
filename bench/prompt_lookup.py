"""transformers' prompt lookup on the same weights and prompts: the peer of `ngram`.

    pip install '.[reference]'
    python bench/prompt_lookup.py --data $DATA/eval --prompts 32 --output-len 64

Greedy, torch on CPU, one prompt at a time; plain decoding and `prompt_lookup_num_tokens` 3 and 7 take
turns prompt by prompt. Acceptance is counted as forward passes: tokens per pass, prompt pass included.
The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import gguf
import torch
from parity_transformers import torch_model  # beside this file

from jspec.target import gguf as jspec_gguf
from jspec.target import loading

SETS = ("math500", "gsm8k", "humaneval", "mbpp", "mt_bench")


def main() -> None:
    """Measures and prints one row a set and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    checkpoint = loading.load(dtype="float32")
    model = torch_model(gguf.GGUFReader(jspec_gguf.find_embedded())).to(getattr(torch, args.dtype))
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    model.register_forward_hook(count)
    rows = []
    for name in SETS:
        lines = [json.loads(line)["turns"][0] for line in (args.data / f"{name}.jsonl").open()][: args.prompts]
        totals = {lookup: [0, 0.0, 0] for lookup in (0, 3, 7)}  # tokens, seconds, passes
        for text in lines:
            ids = torch.tensor([checkpoint.tokenizer.render_chat([{"role": "user", "content": text}])])
            for lookup, total in totals.items():
                extra = {"prompt_lookup_num_tokens": lookup} if lookup else {}
                passes = 0
                begin = time.perf_counter()
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=args.output_len,
                    eos_token_id=list(checkpoint.end_ids),
                    pad_token_id=checkpoint.end_ids[0],
                    **extra,
                )
                total[1] += time.perf_counter() - begin
                total[0] += out.shape[1] - ids.shape[1]
                total[2] += passes
        base = totals[0][0] / totals[0][1]
        for lookup, (tokens, seconds, calls) in totals.items():
            rows.append(
                {
                    "dataset": name,
                    "run": f"transformers_lookup_{lookup}" if lookup else "transformers",
                    "dtype": args.dtype,
                    "prompts": len(lines),
                    "output_throughput_tps": round(tokens / seconds, 2),
                    "speedup": round(tokens / seconds / base, 3),
                    "tokens_per_pass": round(tokens / calls, 3),
                }
            )
            print(rows[-1], flush=True)
    print(json.dumps({"torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
