"""What the target shows of texts: tapped residuals, its last hidden state, and the sum behind its law.

Computed as they are needed, or once and kept on disk: a token takes `2 (T + 1) D + 4` bytes, 7 kB for SmolLM2-135M
with five taps, and reading that back is far cheaper than running the target again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.decoding import tree
from jspec.errors import JspecError
from jspec.target import attention, cache, model
from jspec.target.checkpoint import Checkpoint
from jspec.target.config import TargetConfig
from jspec.training.texts import Text

BFLOAT16 = jnp.dtype(jnp.bfloat16)
STEP = 64  # tokens between the lengths of rows that are compiled


@dataclasses.dataclass(frozen=True, eq=False)
class Seen:
    """What the target shows of one text of `n` tokens."""

    taps: np.ndarray  # [n, T * D] bfloat16
    hidden: np.ndarray  # [n, D] bfloat16, after the final norm
    lse: np.ndarray  # [n] float32, log of the sum of the exponentials of the logits of `hidden`


# Texts, by their numbers in a list that both sides know, to what the target shows of each.
Look = Callable[[Sequence[int]], list[Seen]]


class Online:
    """Runs the target over texts, `rows` at a time, in rows of at most `length` tokens."""

    def __init__(
        self, target: Checkpoint, taps: Sequence[int], texts: Sequence[Text], *, rows: int = 4, length: int = 512
    ) -> None:
        self.target, self.texts, self.rows, self.length = target, texts, rows, length
        self.taps = tuple(taps)
        longest = max((len(text.tokens) for text in texts), default=0)
        if longest > length:
            raise JspecError(
                f"a text has {longest} tokens.",
                f"at most {length}, the length of a row.",
                "raise the length, or cut the texts (`packing.cut`).",
            )

    @property
    def about(self) -> dict[str, object]:
        """What the features depend on: a cache of others is refused."""
        digest = hashlib.sha256()
        for text in self.texts:
            digest.update(np.asarray([len(text.tokens), *text.tokens], np.int32).tobytes())
        return {
            "target": self.target.fingerprint,
            "dtype": str(self.target.params.dtype),
            "taps": list(self.taps),
            "width": self.target.config.width,
            "texts": digest.hexdigest(),
        }

    def __call__(self, numbers: Sequence[int]) -> list[Seen]:
        """Looks at the texts of these numbers."""
        out: dict[int, Seen] = {}
        # Texts of like length together, in rows no longer than the longest needs: most of a long row is padding.
        ordered = sorted(set(numbers), key=lambda i: len(self.texts[i].tokens))
        for start in range(0, len(ordered), self.rows):
            part = ordered[start : start + self.rows]
            longest = len(self.texts[part[-1]].tokens)
            tokens = np.zeros((self.rows, min(-(-longest // STEP) * STEP, self.length)), np.int32)
            for row, i in zip(tokens, part, strict=False):
                row[: len(self.texts[i].tokens)] = self.texts[i].tokens
            found = _look(self.target.config, self.taps, self.target.params, tokens)
            taps, hidden, lse = (np.asarray(x) for x in found)
            for r, i in enumerate(part):
                # Copies: a slice would keep the whole batch alive for as long as one text is used.
                out[i] = Seen(*(x[r, : len(self.texts[i].tokens)].copy() for x in (taps, hidden, lse)))
        return [out[i] for i in numbers]


@partial(jax.jit, static_argnums=(0, 1))
def _look(
    config: TargetConfig, taps: tuple[int, ...], params: model.TargetParams, tokens: Array
) -> tuple[Array, Array, Array]:
    rows, length = tokens.shape
    block = min(128, length)
    capacity = -(-length // block) * block
    kv = cache.init(config, rows, capacity, params.dtype)
    bits = jnp.broadcast_to(tree.chain_bits(length), (rows, *tree.chain_bits(length).shape))
    at = attention.columns(jnp.int32(0), jnp.zeros((rows,), jnp.int32), bits, capacity, block)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    hidden, tapped, _, _ = model.forward(params, config, kv, tokens, positions, at, taps=taps)
    hidden = hidden.astype(BFLOAT16)
    # A row at a time: the logits of all are the largest array there would be.
    lse = jax.lax.map(lambda h: jax.nn.logsumexp(model.logits(params, h.astype(jnp.float32)), axis=-1), hidden)
    return tapped.astype(BFLOAT16), hidden, lse


class Cached:
    """Keeps what `source` shows of its texts in a folder, in shards, and reads it from there.

    Every shard is written whole, so filling may be killed and called again.

    Args:
      budget: bytes that the folder may take.

    Raises:
      JspecError: the features do not fit the budget or the disk, or the folder holds features of other
        texts, taps or another target.
    """

    def __init__(self, source: Online, folder: Path, *, budget: int, shard: int = 64) -> None:
        self.source, self.folder, self.shard = source, folder, shard
        self.lengths = [len(text.tokens) for text in source.texts]
        self._open: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        width = source.target.config.width
        self.taps_width = len(source.taps) * width
        self.bytes = sum(self.lengths) * (2 * (self.taps_width + width) + 4)
        about = source.about | {"shard": shard}
        path = folder / "about.json"
        if path.exists():
            found = json.loads(path.read_text())
            if differing := sorted(key for key in about if found.get(key) != about[key]):
                raise JspecError(
                    f"`{folder}` holds features of another {', '.join(differing)}.",
                    "features of these very texts, taps and target.",
                    "name another folder, or remove this one to have it filled again.",
                )
        if self.bytes > budget:
            raise JspecError(
                f"the features take {self.bytes / 1e9:.1f} GB.",
                f"at most {budget / 1e9:.1f} GB, the budget.",
                "raise the budget, tap fewer layers, use fewer texts, or compute features online.",
            )
        folder.mkdir(parents=True, exist_ok=True)
        missing = self.bytes - sum(file.stat().st_size for file in folder.glob("*.npy"))
        if missing > (free := shutil.disk_usage(folder).free):
            raise JspecError(
                f"`{folder}` has room for {free / 1e9:.1f} GB.",
                f"the {missing / 1e9:.1f} GB that the features still take.",
                "make room, name a folder on a larger disk, or compute features online.",
            )
        _write(path, lambda file: file.write(json.dumps(about, sort_keys=True).encode()))

    def fill(
        self,
        progress: Callable[[int, int], None] = lambda done, tokens: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Computes what is missing, and says whether all of it stands.

        Args:
          progress: is told the texts and tokens that stand after each shard.
          stop: asked before each shard; once it is true nothing more is computed.
        """
        for start in range(0, len(self.lengths), self.shard):
            numbers = range(start, min(start + self.shard, len(self.lengths)))
            rows, lse = self._paths(start // self.shard)
            if not (rows.exists() and lse.exists()):
                if stop():
                    return False
                seen = self.source(numbers)
                values = np.concatenate([np.concatenate([s.taps, s.hidden], axis=1) for s in seen])
                sums = np.concatenate([s.lse for s in seen])
                # NumPy's files know no bfloat16.
                _write(rows, partial(np.save, arr=values.view(np.uint16)))
                _write(lse, partial(np.save, arr=sums))
            progress(numbers.stop, sum(self.lengths[: numbers.stop]))
        return True

    def __call__(self, numbers: Sequence[int]) -> list[Seen]:
        """What was filled in for the texts of these numbers."""
        return [self._read(number) for number in numbers]

    def _read(self, number: int) -> Seen:
        shard = number // self.shard
        if shard not in self._open:
            try:
                rows, lse = (np.load(path, mmap_mode="r") for path in self._paths(shard))
                wanted = sum(self.lengths[shard * self.shard : (shard + 1) * self.shard])
                if len(rows) != wanted or len(lse) != wanted:
                    raise ValueError(f"{len(rows)} rows where {wanted} are wanted")
            except (OSError, ValueError, EOFError) as error:
                raise JspecError(
                    f"shard {shard} of the features in `{self.folder}` cannot be read ({error}).",
                    "what `fill` wrote.",
                    "remove the shard's files and let them be filled again.",
                ) from None
            self._open[shard] = rows, lse
        rows, lse = self._open[shard]
        start = sum(self.lengths[shard * self.shard : number])
        part = slice(start, start + self.lengths[number])
        values = rows[part].view(BFLOAT16)
        return Seen(values[:, : self.taps_width], values[:, self.taps_width :], np.asarray(lse[part]))

    def _paths(self, shard: int) -> tuple[Path, Path]:
        return self.folder / f"{shard:05d}.rows.npy", self.folder / f"{shard:05d}.lse.npy"


def _write(path: Path, put: Callable[..., object]) -> None:
    """Writes a file, all of it or nothing."""
    partial_path = path.with_name(path.name + ".partial")
    with open(partial_path, "wb") as file:
        put(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial_path, path)
