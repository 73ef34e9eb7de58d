"""One operation, several implementations, and the rule by which one is chosen.

    attend: q [R, N, H, hd], cache [B, G, S, hd] twice, Rows -> [R, N, H * hd]

The block's keys and values are already in the cache. Every implementation reads keys from the cache
only, in key blocks of fixed size at absolute columns, in ascending order (docs/exactness.md); a
column before `start` is seen by all rows, one of the block by its descendants, one behind by none.

Each implementation is a module of this folder with `refuses(shape)`, the reason why it cannot compute
a shape or None, and `attend`. A module is imported when it is first asked: Pallas costs start-up time.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import flax.struct
import jax
from jax import Array

from pallas_kernels.tree_attention.shapes import Shape

AUTO = "auto"
# Where each one runs, in the order in which `auto` tries them; `reference` is only taken when asked for.
PLATFORMS = {"tpu": ("tpu",), "gpu": ("gpu", "cuda"), "xla": None, "reference": None}
ORDER = ("tpu", "gpu", "xla")
NAMES = (AUTO, *PLATFORMS)


class Rows(flax.struct.PyTreeNode):
    """Where the rows of a call stand, and what they may read."""

    slot: Array  # [] int32: row block r reads slot `slot + r`
    start: Array  # [R] int32: column of row 0
    ancestors: Array  # [R, N, W] uint32: bit u of row j set iff row j reads row u
    positions: Array | None = None  # [R, N] int32, of the rows; needed with a window
    window: int | None = flax.struct.field(pytree_node=False, default=None)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation taken, and why each one before it was not."""

    name: str
    reasons: tuple[str, ...] = ()


class Unsupported(ValueError):
    """An implementation named outright cannot compute the shape; the message says why."""


def runs_on(name: str, platform: str) -> bool:
    """Whether an implementation's program can run on a platform (`cpu`, `gpu`, `tpu`)."""
    platforms = PLATFORMS[name]
    return platforms is None or platform in platforms


def choose(asked: str, shape: Shape, platform: str | None = None) -> Choice:
    """The implementation for a shape on a platform; the default backend's if left out.

    `auto` takes the first of `ORDER` that runs there and computes the shape, and gives a reason for
    each one it passed. A name is taken as it is, also for a platform that is not at hand (one may
    compile for it), or refused: it never falls back.

    Raises:
      Unsupported: the implementation named cannot compute the shape.
    """
    platform = platform or jax.default_backend()
    if asked != AUTO:
        why = module(asked).refuses(shape)
        if why is not None:
            raise Unsupported(f"{asked}: {why}")
        return Choice(asked)
    reasons: list[str] = []
    for name in ORDER:
        why = f"runs on no {platform}" if not runs_on(name, platform) else module(name).refuses(shape)
        if why is None:
            return Choice(name, tuple(reasons))
        reasons.append(f"{name}: {why}")
    raise AssertionError("xla computes every shape")


def attend(
    name: str,
    q: Array,
    keys: Array,
    values: Array,
    rows: Rows,
    *,
    key_block: int,
    scale: float | None = None,
    cap: float | None = None,
    **options: Any,
) -> Array:
    """Attends with one implementation.

    Args:
      name: of `PLATFORMS`.
      q: `[R, N, H, hd]` float32.
      keys, values: `[B, G, S, hd]` float32 or bfloat16; products round their operands to that dtype
        and add up in float32.
      key_block: columns per key block; divides S.
      scale: of the scores, `hd ** -0.5` if left out.
      cap: scores are bent into -cap .. cap.
      options: of that implementation (`interpret`).

    Returns:
      `[R, N, H * hd]` float32.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return module(name).attend(q, keys, values, rows, key_block=key_block, scale=scale, cap=cap, **options)


def module(name: str) -> Any:
    """The implementation of a name."""
    return importlib.import_module(f"pallas_kernels.tree_attention.{name}")
