"""What this backend guarantees of a compiled engine: its assumptions, tried out bit by bit.

That speculation changes no token rests on properties of the compiled verify program which no
compiler promises and most have (docs/exactness.md). Each is tried on the very program in use, with
the weights in use:

    rerun     the same inputs give the same bits
    content   a row's bits do not depend on what other rows and slots hold
    row       a token gives the same bits in any row of the block
    slot      a request gives the same bits in any slot
    batch     ... with another number of slots          (other programs: `doctor` only)
    width     ... with another number of rows
    capacity  ... with a larger cache

Exactness within one engine needs the first four. The others say which engines agree with
each other; where one is False, only equality between engines is not claimed.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.decoding import tree
from jspec.decoding.state import DecodeState
from jspec.drafters.base import Drafter
from jspec.engine import static
from jspec.engine.config import EngineConfig
from jspec.target import cache as kv
from jspec.target.cache import KVCache
from jspec.target.model import TargetParams

NEEDED = ("rerun", "content", "row", "slot")
BETWEEN = ("batch", "width", "capacity")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One property: whether it held, and what was compared."""

    holds: bool | None  # None: not tried
    reason: str


@dataclasses.dataclass(frozen=True)
class Probe:
    """All findings, by the names above."""

    findings: dict[str, Finding]

    @property
    def exact(self) -> bool:
        """True if this engine's text is independent of drafter, batch mates, slot and order."""
        return all(self.findings[name].holds for name in NEEDED)

    def document(self) -> dict[str, object]:
        """As JSON-able data: `{name: {"holds": .., "reason": ..}, "exact": ..}`."""
        found: dict[str, object] = {name: dataclasses.asdict(f) for name, f in self.findings.items()}
        return found | {"exact": self.exact}


class _Output:
    """Bits of one verify: logits and the written columns, per slot."""

    def __init__(self, logits: Array, cache: KVCache, starts: np.ndarray, rows: int) -> None:
        self.logits = np.asarray(logits).view(np.uint32)
        held = [bits(x) for x in (*cache.keys, *cache.values)]
        self.columns = [
            np.stack([x[slot, :, int(start) : int(start) + rows] for x in held]) for slot, start in enumerate(starts)
        ]  # per slot [2 L, G, N, hd]


def bits(x: Array) -> np.ndarray:
    """An array's raw bits on the host, as unsigned integers of its width."""
    host = np.asarray(x)
    return host.view({2: np.uint16, 4: np.uint32}[host.dtype.itemsize])


def _differing(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.count_nonzero(a != b))


def _texts(config: EngineConfig, salt: int) -> np.ndarray:
    """`[B, length + 2 N]` random ids: a prompt that ends inside a key block, and what follows."""
    rng = np.random.default_rng([config.rows, salt])
    return rng.integers(0, config.target.vocab_size, (config.slots, _length(config) + 2 * config.rows), np.int32)


def _length(config: EngineConfig) -> int:
    """A prompt that crosses a key block where there is room, and leaves room for two blocks."""
    room = config.max_length - 2 * config.rows
    return max(1, min(config.key_block + config.key_block // 2 + 3, room))


def _prefilled(config: EngineConfig, params: TargetParams, texts: np.ndarray) -> KVCache:
    cache = kv.init(config.target, config.slots, config.capacity, params.dtype)
    for slot in range(config.slots):
        for tokens, start, count in static.chunks(config, texts[slot, : _length(config) + 1]):
            _, _, cache = static.prefill(config, params, cache, jnp.int32(slot), tokens, start, count)
    return cache


@jax.jit
def _copy(cache: KVCache) -> KVCache:
    return jax.tree.map(jnp.copy, cache)


def _verify(
    config: EngineConfig, params: TargetParams, cache: KVCache, texts: np.ndarray, shift: int = 0
) -> tuple[_Output, KVCache]:
    """Verifies the `N` tokens from `length + shift` on, on a copy of the cache."""
    rows = config.rows
    at = _length(config) + shift
    lengths = np.full((config.slots,), at, np.int32)
    cache = _copy(cache).replace(length=jnp.asarray(lengths))
    block = tree.chain(
        jnp.asarray(texts[:, at]),
        jnp.asarray(texts[:, at + 1 : at + rows]),
        jnp.full((config.slots,), rows - 1, jnp.int32),
        rows,
    )
    logits, _, _, after = static.verify(config, params, cache, block)
    return _Output(logits, after, lengths, rows), after


def probe(config: EngineConfig, params: TargetParams, *, between: bool = False) -> Probe:
    """Tries the properties on the engine's own programs.

    Args:
      between: also compile engines with other slots, rows and capacity, and compare with them.
    """
    texts = _texts(config, 0)
    cache = _prefilled(config, params, texts)
    first, after = _verify(config, params, cache, texts)
    found = {
        "rerun": _rerun(config, params, cache, texts, first),
        "content": _content(config, params, texts, first),
        "row": _row(config, params, texts, first, after),
        "slot": _slot(config, params, texts, first),
    }
    for name in BETWEEN:
        found[name] = Finding(None, "not tried: run `jspec doctor`")
    if between:
        found |= _between(config, params, texts, first)
    return Probe(found)


def _rerun(config: EngineConfig, params: TargetParams, cache: KVCache, texts: np.ndarray, first: _Output) -> Finding:
    again, _ = _verify(config, params, cache, texts)
    count = _differing(first.logits, again.logits) + sum(map(_differing, first.columns, again.columns))
    return Finding(count == 0, f"verify twice on the same inputs: {count} numbers differ")


def _content(config: EngineConfig, params: TargetParams, texts: np.ndarray, first: _Output) -> Finding:
    """Replaces every other slot's text, then the later half of slot 0's own block."""
    others = _texts(config, 1)
    others[0] = texts[0]
    mates, _ = _verify(config, params, _prefilled(config, params, others), others)
    count = _differing(first.logits[0], mates.logits[0]) + _differing(first.columns[0], mates.columns[0])
    half = max(1, config.rows // 2)
    behind = texts.copy()
    behind[:, _length(config) + half :] = others[:, _length(config) + half :][:, ::-1]
    behind[0, _length(config) + half :] = (texts[0, _length(config) + half :] + 1) % config.target.vocab_size
    tail, _ = _verify(config, params, _prefilled(config, params, behind), behind)
    count += _differing(first.logits[0, :half], tail.logits[0, :half])
    count += _differing(first.columns[0][:, :, :half], tail.columns[0][:, :, :half])
    return Finding(
        count == 0, f"other slots' texts and later rows replaced: {count} numbers of slot 0's earlier rows differ"
    )


def _row(config: EngineConfig, params: TargetParams, texts: np.ndarray, first: _Output, after: KVCache) -> Finding:
    """Reads the same tokens from blocks that start 1 .. N-1 later, as acceptance would have it."""
    count = 0
    for shift in range(1, config.rows):
        moved, _ = _verify(config, params, after, texts, shift)
        keep = config.rows - shift
        count += _differing(first.logits[:, shift:], moved.logits[:, :keep])
        for a, b in zip(first.columns, moved.columns, strict=True):
            count += _differing(a[:, :, shift:], b[:, :, :keep])
    return Finding(count == 0, f"the same tokens from blocks started 1 to {config.rows - 1} later: {count} differ")


def _slot(config: EngineConfig, params: TargetParams, texts: np.ndarray, first: _Output) -> Finding:
    if config.slots == 1:
        return Finding(True, "one slot: nothing to move")
    moved_texts = np.roll(texts, 1, axis=0)
    moved, _ = _verify(config, params, _prefilled(config, params, moved_texts), moved_texts)
    count = _differing(np.roll(first.logits, 1, axis=0), moved.logits)
    for slot in range(config.slots):
        count += _differing(first.columns[slot - 1], moved.columns[slot])
    return Finding(count == 0, f"every text moved to the next slot: {count} numbers differ")


def _between(config: EngineConfig, params: TargetParams, texts: np.ndarray, first: _Output) -> dict[str, Finding]:
    slots = 1 if config.slots > 1 else 2
    rows = 1 if config.rows > 1 else 8
    others = {
        "batch": (dataclasses.replace(config, slots=slots), f"{slots} slots for {config.slots}"),
        "width": (dataclasses.replace(config, rows=rows), f"{rows} rows for {config.rows}"),
        "capacity": (
            dataclasses.replace(config, max_length=min(2 * config.max_length, config.target.max_positions)),
            "a larger cache",
        ),
    }
    found = {}
    for name, (other, what) in others.items():
        if other.capacity == config.capacity and name == "capacity":
            found[name] = Finding(None, "not tried: the cache is already the longest the target was made for")
            continue
        there = np.concatenate([texts, texts])[: other.slots]
        # The other engine's prompt has the length of this one's, so that the same columns are compared.
        count = _compare(config, other, params, there, first)
        found[name] = Finding(count == 0, f"{what}: {count} numbers differ")
    return found


def _compare(config: EngineConfig, other: EngineConfig, params: TargetParams, texts: np.ndarray, first: _Output) -> int:
    """Differing numbers of slot 0 between this engine's verify and another's, on the rows both have."""
    start = _length(config)
    cache = kv.init(other.target, other.slots, other.capacity, params.dtype)
    for slot in range(other.slots):
        for tokens, at, held in static.chunks(other, texts[slot, : start + 1]):
            _, _, cache = static.prefill(other, params, cache, jnp.int32(slot), tokens, at, held)
    rows = other.rows
    cache = cache.replace(length=jnp.full((other.slots,), start, jnp.int32))
    block = tree.chain(
        jnp.asarray(texts[:, start]),
        jnp.asarray(texts[:, start + 1 : start + rows]),
        jnp.full((other.slots,), rows - 1, jnp.int32),
        rows,
    )
    logits, _, _, after = static.verify(other, params, cache, block)
    output = _Output(logits, after, np.full((other.slots,), start), rows)
    keep = min(rows, config.rows)
    return _differing(first.logits[0, :keep], output.logits[0, :keep]) + _differing(
        first.columns[0][:, :, :keep], output.columns[0][:, :, :keep]
    )


def device_loop(
    config: EngineConfig, params: TargetParams, drafter: Drafter, weights: object, state: DecodeState
) -> Finding:
    """Whether `static.run` from `state` gives the tokens and cache bits of the stepped engine.

    `state` is used up. Compares the committed columns of every slot.
    """
    stepped = jax.tree.map(jnp.copy, state)
    emitted: list[list[int]] = [[] for _ in range(config.slots)]
    while bool(np.any(np.asarray(stepped.running))):
        stepped, info = static.step(config, drafter, params, weights, stepped)
        for slot, (tokens, count) in enumerate(zip(np.asarray(info.tokens), np.asarray(info.count), strict=True)):
            emitted[slot].extend(tokens[:count].tolist())
    looped, transcript = static.run(config, drafter, params, weights, state)
    different = 0
    for slot in range(config.slots):
        count = int(transcript.count[slot])
        different += np.asarray(transcript.tokens)[slot, :count].tolist() != emitted[slot]
        held = int(stepped.length[slot]) - 1
        for a, b in zip(
            (*stepped.cache.keys, *stepped.cache.values), (*looped.cache.keys, *looped.cache.values), strict=True
        ):
            different += _differing(bits(a)[slot, :, :held], bits(b)[slot, :, :held])
    return Finding(different == 0, f"loop on the device against stepping: {different} texts and numbers differ")
