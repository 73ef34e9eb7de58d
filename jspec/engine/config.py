"""`EngineConfig`: the shapes that a compiled engine fixes, and with them its bits."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math

import jax
import jax.numpy as jnp

from jspec.engine import tuning
from jspec.errors import JspecError
from jspec.target import products
from jspec.target.config import TargetConfig
from jspec.target.products import Products
from pallas_kernels.tree_attention import api as kernels
from pallas_kernels.tree_attention.shapes import Shape

LONGEST_BLOCK = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """A static engine: everything that the compiled programs depend on, besides the drafter.

    Inside one engine the text is a function of prompt, sampling settings and seed alone. Two
    engines that differ in any field may differ in the last bits.
    """

    target: TargetConfig
    slots: int = 1  # B, requests decoded together
    rows: int = 8  # N, rows of a block: the last committed token and up to N - 1 proposals
    max_length: int = 1024  # prompt and output together, in tokens
    chunk: int = 64  # C, prompt tokens a prefill call reads
    key_block: int = 128  # columns of one key block
    taps: tuple[int, ...] = ()  # blocks whose residual any drafter reads, -1 for the embedding
    kernel: str = kernels.AUTO  # what computes attention: see `attention`

    def __post_init__(self) -> None:
        for name, low, high in (
            ("slots", 1, 4096),
            ("rows", 1, LONGEST_BLOCK),
            ("max_length", 2, self.target.max_positions),
            ("chunk", 1, 4096),
            ("key_block", 1, 4096),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise JspecError(
                    f"`{name}` of the engine is `{value!r}`.",
                    f"a whole number from {low} to {high}.",
                    f"choose `{name}` in that range"
                    + (": the target was made for no longer text." if name == "max_length" else "."),
                )
        if self.kernel not in kernels.NAMES:
            raise JspecError(
                f"`kernel` of the engine is `{self.kernel!r}`.",
                f"one of {', '.join(f'`{name}`' for name in kernels.NAMES)}.",
                "choose one of these; `auto` takes the first that runs here and says why.",
            )
        bad = [t for t in self.taps if not -1 <= t < self.target.layers]
        if bad or list(self.taps) != sorted(set(self.taps)):
            raise JspecError(
                f"`taps` of the engine is `{self.taps}`.",
                f"ascending, different 0-based blocks from 0 to {self.target.layers - 1}, and -1 for the embedding.",
                "correct the drafter's list of tapped layers.",
            )

    @property
    def capacity(self) -> int:
        """S, columns of the cache: room for a whole block behind the last token, on whole key
        blocks and whole chunks, since an update that does not fit would be shifted silently."""
        unit = math.lcm(self.key_block, self.chunk)
        return -(-(self.max_length + self.rows - 1) // unit) * unit

    def shape(self, dtype: jnp.dtype) -> Shape:
        """What the engine asks of attention: the larger of its two programs, verify and prefill."""
        t = self.target
        return Shape(
            slots=self.slots,
            rows=max(self.rows, self.chunk),
            heads=t.heads,
            groups=t.kv_heads,
            width=t.head_width,
            capacity=self.capacity,
            key_block=self.key_block,
            dtype=str(jnp.dtype(dtype)),
            window=t.window if t.windowed else None,
            cap=t.score_cap,
        )

    def attention(self, dtype: jnp.dtype) -> kernels.Choice:
        """The implementation of attention in every program of this engine, and why not another.

        `auto` takes the first that runs on the default backend and computes the engine's shape. A
        name never falls back; it is taken also where it cannot run, so that one can compile for it.

        Raises:
          JspecError: the kernel named cannot compute the engine's shape.
        """
        try:
            return kernels.choose(self.kernel, self.shape(dtype))
        except kernels.Unsupported as e:
            raise JspecError(
                f"the engine asks for the kernel `{self.kernel}`, which refuses its shape ({e}).",
                "a shape that the kernel computes; a kernel named outright never falls back.",
                "change what the reason names, or choose `auto` or `xla`.",
            ) from None

    def check_runs(self, dtype: jnp.dtype) -> kernels.Choice:
        """The same choice, refused where its programs cannot run."""
        choice, here = self.attention(dtype), jax.default_backend()
        if not kernels.runs_on(choice.name, here):
            raise JspecError(
                f"the engine asks for the kernel `{choice.name}`, and JAX runs on `{here}`.",
                f"`{choice.name}` runs on {' or '.join(kernels.PLATFORMS[choice.name] or ())} only.",
                "choose `auto` or `xla`, or run where that device is.",
            )
        return choice

    def fingerprint(self, dtype: jnp.dtype, form: Products | None = None) -> str:
        """SHA-256 hex digest of all that decides the engine's bits.

        That is its fields, the kernel in use, the weights' dtype and how their products are laid out
        (`TargetParams.products`), backend and JAX; on a GPU also its kind and what its compiler chose by timing.
        """
        form = products.default(dtype) if form is None else form
        facts = dataclasses.asdict(self) | {
            "kernel": self.attention(dtype).name,
            "dtype": str(jnp.dtype(dtype)),
            "products": [form.least, form.left],
            "backend": jax.default_backend(),
            "jax": jax.__version__,
        }
        if facts["backend"] == "gpu":
            facts |= {"device": jax.devices()[0].device_kind, "tuning": tuning.mark()}
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
