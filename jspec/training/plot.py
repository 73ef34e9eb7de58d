"""The curves of a run as a picture: loss, share of right drafts by place, tokens a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw(entries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the entries of `metrics.jsonl`; nothing is written where there are none.

    Args:
      path: a PNG file, or what else matplotlib tells from its ending.
    """
    steps = [entry for entry in entries if "loss" in entry]
    judged = [entry for entry in entries if entry.get("evaluation")]
    if not steps:
        return
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, right, length = figure.subplots(1, 3)
    at = [entry["step"] for entry in steps]
    loss.plot(at, [entry["loss"] for entry in steps], label="loss")
    loss.plot(at, [entry["entropy"] for entry in steps], label="cross entropy a token")
    for place in range(len(steps[0]["right"])):
        right.plot(at, [entry["right"][place] for entry in steps], label=f"draft {place + 1}")
    names = sorted({name for entry in judged for name in entry["evaluation"] if "length" in name})
    for name in names:
        found = [(e["step"], e["evaluation"][name]) for e in judged if name in e["evaluation"]]
        length.plot(*zip(*found, strict=True), marker=".", label=name.replace("_", " "))
    titles = {loss: "learning", right: "share of right drafts, right ones before", length: "tokens a round, held out"}
    for axes, title in titles.items():
        axes.set(title=title, xlabel="step")
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(path)
