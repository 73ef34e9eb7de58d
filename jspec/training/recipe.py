"""`Recipe`: a run of training as a TOML file, and the run itself: texts, features, loop, the drafter's folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jspec.drafters import files
from jspec.drafters.block import weights as block
from jspec.drafters.block.config import BlockConfig, spread
from jspec.drafters.block.weights import BlockParams
from jspec.errors import JspecError
from jspec.target.checkpoint import Checkpoint
from jspec.training import decoded, evaluate, loop, packing, plot, texts
from jspec.training.features import Cached, Online
from jspec.training.objective import Objective
from jspec.training.optimizer import Optimizer
from jspec.training.packing import Shape, Stream
from jspec.training.texts import Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Which texts, and how they reach the loop."""

    held_out: int = 64  # texts that are judged by and never learned from
    seed: int = 0  # of which texts are held out, of batches and first weights
    features: str = "cached"  # or `online`
    budget: float = 20.0  # GB that cached features may take
    decoded: int = 0  # held-out prompts that are decoded at each evaluation, for true acceptance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run. A section that is left out takes its defaults."""

    drafter: Mapping[str, Any]  # settings of `BlockConfig`; what the target decides may be left out
    data: Data
    shape: Shape
    objective: Objective
    optimizer: Mapping[str, Any]  # of `Optimizer`; `epochs` may stand for `steps`
    run: loop.Run


def read(path: Path) -> Recipe:
    """Reads a recipe: the tables `drafter`, `data`, `batch`, `objective`, `optimizer` and `run`.

    Raises:
      JspecError: no TOML file, or a table or key that is unknown or of another type.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise JspecError(f"`{path}` cannot be read ({error}).", "a recipe in TOML.", "correct it.") from None
    known = ("drafter", "data", "batch", "objective", "optimizer", "run")
    if wrong := [name for name, table in tables.items() if name not in known or not isinstance(table, dict)]:
        raise JspecError(f"`{path}` holds `{wrong[0]}`.", f"the tables {', '.join(known)}.", "correct it.")
    fields = {f.name for f in dataclasses.fields(BlockConfig)}
    drafter = tables.get("drafter", {})
    _check_keys(path, "drafter", drafter, fields)
    steps = {f.name for f in dataclasses.fields(Optimizer)} | {"epochs"}
    optimizer = tables.get("optimizer", {})
    _check_keys(path, "optimizer", optimizer, steps)
    if ("steps" in optimizer) == ("epochs" in optimizer):
        raise JspecError(f"the optimizer in `{path}` has no or two lengths.", "`steps` or `epochs`.", "give one.")

    def made(cls: Any, name: str) -> Any:
        table = tables.get(name, {})
        _check_keys(path, name, table, {f.name for f in dataclasses.fields(cls)})
        return cls(**table)

    data = made(Data, "data")
    whole = all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (data.held_out, data.seed, data.decoded)
    )
    if not whole or data.features not in ("cached", "online") or not isinstance(data.budget, int | float):
        raise JspecError(
            f"`data` in `{path}` is `{dataclasses.asdict(data)}`.",
            "whole `held_out`, `seed` and `decoded`, `features` of cached or online, `budget` in GB.",
            "correct it.",
        )
    return Recipe(
        drafter=drafter,
        data=data,
        shape=made(Shape, "batch"),
        objective=made(Objective, "objective"),
        optimizer=optimizer,
        run=made(loop.Run, "run"),
    )


def _check_keys(path: Path, name: str, table: Mapping[str, Any], known: set[str]) -> None:
    if wrong := sorted(set(table) - known):
        raise JspecError(
            f"`{name}` in `{path}` has the key `{wrong[0]}`.", ", ".join(sorted(known)) + ".", "correct it."
        )


def config(recipe: Recipe, target: Checkpoint, learned: Sequence[Text]) -> tuple[BlockConfig, np.ndarray | None]:
    """The drafter's configuration, and the tokens of its vocabulary: those that the target writes most often."""
    t = target.config
    given: dict[str, Any] = dict(recipe.drafter)
    counts = np.zeros(t.vocab_size, np.int64)
    used = np.zeros(t.vocab_size, bool)
    for text in learned:
        used[text.tokens] = True
        counts += np.bincount(text.tokens[text.loss_mask], minlength=t.vocab_size)
    taps = given.get("taps", 3)
    given["taps"] = spread(t.layers, taps) if isinstance(taps, int) else tuple(taps)
    if "mask_id" not in given:
        free = [i for i in sorted(target.tokenizer.special.values()) if not used[i] and i not in target.end_ids]
        if not free:
            raise JspecError(
                "every special token of the target occurs in the texts.",
                "one that occurs in none, for the rows that are to be drafted (known-failures DR-3).",
                "name a token that no text holds as `mask_id` of the drafter.",
            )
        given["mask_id"] = free[-1]
    elif used[given["mask_id"]]:
        raise JspecError(
            f"the mask token `{given['mask_id']}` occurs in the texts.",
            "a token that no text holds.",
            "choose another.",
        )
    defaults: dict[str, Any] = {
        "target_layers": t.layers,
        "vocab_size": t.vocab_size,
        "width": t.width,
        "layers": 1,
        "heads": t.heads,
        "kv_heads": t.kv_heads,
        "head_width": t.head_width,
        "ff_width": t.ff_width,
        "norm_eps": t.norm_eps,
        "rope": t.rope,
        "embed_scale": t.embed_scale,
        "logit_cap": t.logit_cap,
    }
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    made = BlockConfig(**(defaults | given))
    if made.draft_vocab is None:
        return made, None
    ids = np.sort(np.argsort(-counts, kind="stable")[: made.draft_vocab]).astype(np.int32)
    return made, ids


def split(found: Sequence[Text], held_out: int, seed: int) -> tuple[list[Text], list[Text]]:
    """Texts to learn from, and texts to be judged by."""
    if held_out >= len(found):
        raise JspecError(
            f"{held_out} of {len(found)} texts are to be held out.", "fewer than there are.", "lower `held_out`."
        )
    apart = set(np.random.default_rng([seed, 2]).permutation(len(found))[:held_out].tolist())
    learned = [text for i, text in enumerate(found) if i not in apart]
    return learned, [text for i, text in enumerate(found) if i in apart]


def run(
    recipe: Recipe,
    target: Checkpoint,
    folders: Sequence[Path],
    out: Path,
    *,
    tell: Callable[[str], None] = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
    devices: Sequence[jax.Device] | None = None,
) -> Path | None:
    """Trains a drafter, or goes on with the run in `out`.

    Args:
      folders: of texts by this target (`training/texts.py`).
      out: takes `features`, `run` (saves, metrics) and, when all steps are done, `drafter`.
      tell: takes lines for people.

    Returns:
      the drafter's folder; None if it was stopped before its end.
    """
    found = packing.cut([text for folder in folders for text in _texts(folder, target)], recipe.shape.length)
    learned, held = split(found, recipe.data.held_out, recipe.data.seed)
    tell(f"{len(learned)} texts with {texts.count(learned)} tokens to learn, {len(held)} held out")
    made, ids = config(recipe, target, learned)
    params = jax.jit(lambda key: block.init(key, made))(jax.random.key(recipe.data.seed))
    lent = block.lend(made, params, ids, target.params, target.config)
    tell(f"{made.family}: {block.count(params):,} weights, mask token {made.mask_id}, taps {list(made.taps)}")

    def look(name: str, part: Sequence[Text]) -> Online | Cached | None:
        online = Online(target, made.taps, part, length=recipe.shape.length)
        if recipe.data.features == "online":
            return online
        cached = Cached(online, out / "features" / name, budget=int(recipe.data.budget * 1e9))
        whole = cached.fill(lambda done, tokens: tell(f"features of {done} {name} texts, {tokens} tokens"), stop)
        return cached if whole else None

    looks = [look(name, part) for name, part in (("learned", learned), ("held_out", held)) if part]
    if None in looks:
        return None
    first, *others = [one for one in looks if one is not None]
    stream = Stream(learned, first, recipe.shape, recipe.data.seed)
    settings = dict(recipe.optimizer)
    if "epochs" in settings:
        settings["steps"] = max(1, round(settings.pop("epochs") * stream.epoch / recipe.run.accumulate))
    optimizer = Optimizer(**settings)
    judged = others[0] if others else None

    def evaluated(params: BlockParams, step: int) -> Mapping[str, Any]:
        return {} if judged is None else _judge(made, lent.replace(params=params), ids, held, judged, recipe, target)

    state = loop.train(
        made,
        lent,
        stream,
        recipe.objective,
        optimizer,
        recipe.run,
        out / "run",
        evaluate=evaluated,
        progress=lambda entry: tell(json.dumps(entry)),
        stop=stop,
        devices=devices,
    )
    plot.draw(loop.read_metrics(out / "run"), out / "run" / "metrics.png")
    if int(state.step) < optimizer.steps:
        return None
    record = {
        "texts": len(learned),
        "answer_tokens": texts.count(learned),
        "recipe": json.loads(json.dumps(dataclasses.asdict(recipe))),
        "steps": optimizer.steps,
        "evaluations": [e for e in loop.read_metrics(out / "run") if "evaluation" in e][-1:],
    }
    final = state.params if state.average is None else state.average
    saved = files.Saved(config=made, params=final, ids=ids, target=target.fingerprint, record=record)
    files.save(out / "drafter", saved)
    return out / "drafter"


def _judge(
    made: BlockConfig,
    weights: block.BlockWeights,
    ids: np.ndarray | None,
    held: Sequence[Text],
    look: Online | Cached,
    recipe: Recipe,
    target: Checkpoint,
) -> dict[str, Any]:
    """Simulated acceptance, of all texts and of those without loops; true acceptance of the first of them."""
    rows = evaluate.right(made, weights, held, look, recipe.shape, recipe.run.dtype)
    figures: dict[str, Any] = {}
    free = evaluate.loop_free(held, rows)
    for proposals in sorted({min(3, made.longest), min(7, made.longest)}):
        walk = evaluate.walk(held, rows, proposals)
        figures[f"length_k{proposals}"] = round(walk.length, 4)
        figures[f"rates_k{proposals}"] = [round(rate, 4) for rate in walk.rates]
        figures[f"loop_free_length_k{proposals}"] = round(evaluate.walk(*free, proposals).length, 4)
    if few := held[: recipe.data.decoded]:
        longest = min(7, made.longest)
        true = decoded.walk(made, weights.params, ids, target, few, longest, recipe.shape.length + 1)
        figures[f"decoded_length_k{longest}"] = round(true.length, 4)
        figures[f"decoded_simulated_length_k{longest}"] = round(evaluate.walk(few, rows[: len(few)], longest).length, 4)
    return figures | {"loop_free_texts": len(free[0])}


def _texts(folder: Path, target: Checkpoint) -> list[Text]:
    found = list(texts.load_all(folder))
    with contextlib.suppress(StopIteration):
        _, about = texts.load(next(iter(sorted(folder.glob("*.npz")))))
        if about.get("target") != target.fingerprint:
            raise JspecError(
                f"the texts in `{folder}` were written by the target `{str(about.get('target'))[:12]}`, and "
                f"`{target.name}` is `{target.fingerprint[:12]}`.",
                "texts of the target that the drafter is for: with others it learns what will not be said.",
                "load that target, or let this one write texts.",
            )
    return found
