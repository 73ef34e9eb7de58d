"""What is told of a checkpoint."""

from __future__ import annotations

from jspec.target import (
    describe,
    hf,
)
from tests.target.reading import GEMMA, MOE, write


def test_describe(folder):
    write(folder, GEMMA, generation={"eos_token_id": [61, 62]}, config={"strange_setting": 1})
    told = "\n".join(describe.describe(hf.load(folder)))
    for part in (
        "tiny: gemma3_text",
        "layers 0-1: the last 37 tokens",
        "layers 2: all earlier tokens",
        "rope linear, base 1e+06, factor 8",
        "norm on q and k",
        "embedding times 5.65685",
        "the embedding (tied)",
        "62 '<|end|>'",
        "enable_thinking",
        "strange_setting",
        "float32: `dtype` of config.json",
    ):
        assert part in told, told
    told = "\n".join(describe.describe(hf.load(write(folder.parent / "moe", MOE))))
    assert "layers 0, 2: 2 of 4 for each token, width 24, shares summing to 1" in told
