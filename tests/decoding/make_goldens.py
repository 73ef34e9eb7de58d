"""Writes goldens.npz: what transformers makes of the logits of 30 requests. Needs torch and transformers.

    PYTHONPATH=. python tests/decoding/make_goldens.py

Each case is a prompt, an output of eight tokens, nine rows of logits (row j follows the first j output tokens)
and settings; the golden is transformers' log-probabilities of every row, by its own processors and
warpers in its own order. It has no presence and frequency penalties: those are compared by hand.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

CASES, ROWS, V, END = 30, 9, 50, 49
HERE = Path(__file__).parent


def cases() -> list[dict]:
    rng = np.random.default_rng(11)
    out = []
    for number in range(CASES):
        out.append(
            {
                "prompt": rng.integers(0, V, rng.integers(1, 7)),
                "output": rng.integers(0, V, ROWS - 1),
                "logits": (rng.standard_normal((ROWS, V)) * 3).astype(np.float32),
                "repetition_penalty": float(rng.choice([1.0, 1.1, 1.7, 0.8])),
                "min_tokens": int(rng.choice([0, 0, 3, 6])),
                "temperature": float(rng.choice([1.0, 0.6, 1.8])),
                "top_k": int(rng.choice([0, 0, 5, 20])),
                "top_p": float(rng.choice([1.0, 0.9, 0.5])),
                "min_p": float(rng.choice([0.0, 0.0, 0.1])),
                # Ends and biased tokens differ, since transformers masks ends before it biases some versions.
                "bias": {
                    int(t): float(v) for t, v in zip(rng.choice(V - 1, 3, False), rng.normal(0, 3, 3), strict=True)
                }
                if number % 2
                else {},
            }
        )
    return out


def main() -> None:
    import torch
    import transformers
    from transformers.generation import logits_process as hf

    golden = np.zeros((CASES, ROWS, V), np.float32)
    for number, case in enumerate(cases()):
        chain = hf.LogitsProcessorList()
        if case["bias"]:
            chain.append(hf.SequenceBiasLogitsProcessor({(t,): v for t, v in case["bias"].items()}))
        if case["repetition_penalty"] != 1:
            chain.append(hf.RepetitionPenaltyLogitsProcessor(case["repetition_penalty"]))
        if case["min_tokens"]:
            least = hf.MinNewTokensLengthLogitsProcessor(len(case["prompt"]), case["min_tokens"], torch.tensor([END]))
            chain.append(least)
        if case["temperature"] != 1:
            chain.append(hf.TemperatureLogitsWarper(case["temperature"]))
        if case["top_k"]:
            chain.append(hf.TopKLogitsWarper(case["top_k"]))
        if case["top_p"] < 1:
            chain.append(hf.TopPLogitsWarper(case["top_p"]))
        if case["min_p"]:
            chain.append(hf.MinPLogitsWarper(case["min_p"]))
        for row in range(ROWS):
            ids = torch.tensor([[*case["prompt"], *case["output"][:row]]])
            scores = chain(ids, torch.tensor(case["logits"][None, row]))
            golden[number, row] = torch.log_softmax(scores, dim=-1)[0].numpy()
    np.savez_compressed(HERE / "goldens.npz", law=golden, made_by=f"transformers {transformers.__version__}")
    print(f"wrote {CASES} cases, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
