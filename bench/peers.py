"""Plain decoding of the same weights by jspec, transformers and llama.cpp, in alternation.

    pip install '.[reference]' llama-cpp-python
    python bench/peers.py
    python bench/peers.py --repeats 9 --skip llama.cpp

One prompt at a time, greedy. Every contender answers the same prompts in turn; its rate is `--tokens` tokens over
the difference between answers of one more and of one, so prefill does not count. transformers runs in
float32 and bfloat16, plain and with its own prompt lookup; llama.cpp on the embedded Q4_1 file and on a
Q8_0 file made of it. Medians over repeats with a bootstrap 95 % interval; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jspec import api
from jspec.measure import hardware
from jspec.startup import configure_cache
from jspec.target import gguf as jspec_gguf
from jspec.target import loading

TEXTS = (
    "Why is the sky blue? Explain it to a child.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A shop sells pens at 3 dollars and books at 12. What do 4 pens and 2 books cost together?",
)

Answer = Callable[[list[int], int], list[int]]  # prompt ids and output tokens to output ids


def ours() -> dict[str, Answer]:
    out: dict[str, Answer] = {}
    for dtype in ("bfloat16", "float32"):
        target = loading.load(dtype=dtype)
        for name, rows, drafter in (("plain N=1", 1, None), ("plain N=8", 8, None), ("ngram_k7", 8, "ngram_k7")):
            config = api.engine(target, rows=rows, max_length=512)

            def run(ids: list[int], n: int, target: Any = target, config: Any = config, drafter: Any = drafter) -> Any:
                settings = {"max_tokens": n, "temperature": 0.0, "ignore_eos": True}
                return list(api.generate(target, ids, drafter=drafter, config=config, **settings)[0].ids)

            out[f"jspec {dtype} {name}"] = run
    return out


def transformers() -> dict[str, Answer]:
    import torch
    from parity_transformers import torch_model  # beside this file

    out: dict[str, Answer] = {}
    for dtype in ("float32", "bfloat16"):
        model = torch_model(gguf.GGUFReader(jspec_gguf.find_embedded())).to(getattr(torch, dtype))
        for name, extra in (("plain", {}), ("prompt lookup 7", {"prompt_lookup_num_tokens": 7})):

            def run(ids: list[int], n: int, model: Any = model, extra: dict[str, int] = extra) -> list[int]:
                given = torch.tensor([ids])
                made = model.generate(
                    given,
                    attention_mask=torch.ones_like(given),
                    do_sample=False,
                    min_new_tokens=n,
                    max_new_tokens=n,
                    pad_token_id=0,
                    **extra,
                )
                return [int(t) for t in made[0, len(ids) :]]

            out[f"transformers {dtype} {name}"] = run
    return out


def llama_cpp(folder: Path) -> dict[str, Answer]:
    import llama_cpp

    source = str(jspec_gguf.find_embedded())
    eight = str(folder / "q8_0.gguf")
    wanted = llama_cpp.llama_model_quantize_default_params()
    wanted.ftype, wanted.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True
    llama_cpp.llama_model_quantize(source.encode(), eight.encode(), wanted)
    out: dict[str, Answer] = {}
    for name, path in (("Q4_1", source), ("Q8_0", eight)):
        model = llama_cpp.Llama(path, n_ctx=512, n_threads=hardware.cores(), verbose=False)

        def run(ids: list[int], n: int, model: Any = model) -> list[int]:
            model.reset()
            made: list[int] = []
            for token in model.generate(ids, temp=0.0, repeat_penalty=1.0):
                made.append(int(token))
                if len(made) == n:
                    return made
            return made

        out[f"llama.cpp {name} plain"] = run
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=len(TEXTS))
    parser.add_argument("--skip", nargs="*", default=[], choices=("transformers", "llama.cpp"))
    args = parser.parse_args()
    configure_cache()
    tokenizer = loading.load().tokenizer
    prompts = [tokenizer.render_chat([{"role": "user", "content": text}]) for text in TEXTS[: args.prompts]]
    with tempfile.TemporaryDirectory() as folder:
        field = ours()
        if "transformers" not in args.skip:
            field |= transformers()
        if "llama.cpp" not in args.skip:
            field |= llama_cpp(Path(folder))
        for answer in field.values():
            for ids in prompts:
                answer(ids, args.tokens + 1)
        rates: dict[str, list[float]] = {name: [] for name in field}
        for _ in range(args.repeats):
            for name, answer in field.items():
                seconds = 0.0
                for ids in prompts:
                    spent = []
                    for n in (1, args.tokens + 1):
                        begin = time.perf_counter()
                        answer(ids, n)
                        spent.append(time.perf_counter() - begin)
                    seconds += spent[1] - spent[0]
                rates[name].append(args.tokens * len(prompts) / seconds)
    rng = np.random.default_rng(0)
    rows = []
    for name, found in rates.items():
        drawn = np.median(rng.choice(found, (2000, len(found))), axis=1)
        low, high = np.percentile(drawn, [2.5, 97.5])
        rows.append({"run": name, "tok_s": float(np.median(found)), "low": float(low), "high": float(high)})
        print(f"{name:40} {np.median(found):7.1f} tok/s  [{low:.1f}, {high:.1f}]")
    print(json.dumps({"versions": hardware.versions(), "rows": rows, "all": rates}))


if __name__ == "__main__":
    main()
