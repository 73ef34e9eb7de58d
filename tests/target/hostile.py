"""Hostile checkpoints as data, and what each error must say: `python -m tests.target.hostile` prints the errors.

Each case damages one good checkpoint, which loads and answers as long as nothing is done to it. A case
is a name, the kind of checkpoint, the damage, and a piece of the message.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import struct
import tempfile
from collections.abc import Mapping
from typing import NamedTuple

from jspec.errors import JspecError
from jspec.target import describe, loading
from tests.target import folders, gguf_file
from tests.target.damages import (
    CONFIG,
    FIRST,
    INDEX,
    PNG,
    SECOND,
    TOKENS,
    TOKENS_CONFIG,
    WEIGHTS,
    Damage,
    Trap,
    _put,
    added,
    config,
    cut,
    edit,
    endless,
    file,
    gguf_as_weights,
    gguf_start,
    huge_header,
    large_config,
    length,
    meta,
    model,
    not_finite,
    patch,
    pickled,
    raw_header,
    remove,
    renamed,
    replaced,
    settings,
    shard_twice,
    shifted,
    template,
    tensor,
    text,
    to_itself,
    u32,
    u64,
    where,
    whole,
    zipped,
)


class Hostile(NamedTuple):
    """One case. `kind` is that of `good`."""

    kind: str
    name: str
    damage: Damage
    told: str


def good(kind: str, place: pathlib.Path) -> pathlib.Path:
    """An undamaged checkpoint: `folder`, `shards`, `moe`, `nested` or `gguf`."""
    if kind == "gguf":
        return gguf_file.write(place / "tiny.gguf", gguf_file.weights())
    config = folders.CONFIGS[{"moe": "qwen3_moe", "nested": "gemma3"}.get(kind, "llama")]
    arrays = folders.tensors(config)
    if kind == "nested":
        config, arrays = folders.nested(config, arrays, old=False)
    return folders.write(place / "tiny", config, arrays, shards=2 if kind == "shards" else 1)


def use(path: pathlib.Path) -> None:
    """What a user does with a checkpoint: loads it, looks at it, and gives it a chat."""
    checkpoint = loading.load(path, dtype="float32")
    describe.describe(checkpoint)
    if checkpoint.tokenizer.has_template:
        checkpoint.tokenizer.render_chat([{"role": "user", "content": "hello"}])


# Where the entry of a matrix stands in the table: its name, then rank, two dimensions, type and offset.
ENTRY = b"blk.1.ffn_up.weight"
DEEP = "[" * 100_000
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLE = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = "

FOLDER: Mapping[str, tuple[Damage, str]] = {
    # The container
    "empty weights": (file(WEIGHTS, b""), "has 0 bytes"),
    "seven bytes": (file(WEIGHTS, b"\x10" + bytes(6)), "has 7 bytes"),
    "cut inside the header": (cut(WEIGHTS, 300), "header length"),
    "cut inside the last tensor": (cut(WEIGHTS, -1), "before `"),
    "cut behind the header": (cut(WEIGHTS, 6000), "ends at byte 6,000"),
    "header length 2**63": (length(2**63), "header length of 9,223,372,036,854,775,808"),
    "header length 0": (length(0), "header length of 0"),
    "header of 150 MB": (huge_header, "header length of 150,000,000"),
    "header is not JSON": (raw_header(b"{'a': 1}"), "is not JSON"),
    "header is a list": (raw_header(b"[1, 2]"), "holds `[1, 2]`"),
    "header is not UTF-8": (raw_header(b'{"\xff": 1}'), "is not UTF-8"),
    "header nested deeply": (raw_header(b'{"a":' + b"[" * 50_000), "is nested too deeply"),
    "header names a tensor twice": (raw_header(b'{"a": {}, "a": {}}'), "`'a'` twice"),
    "entry is null": (raw_header(b'{"a": null}'), "does not give dtype, shape and byte range of `a`"),
    "header without tensors": (raw_header(b"{}"), "bytes behind the header"),
    "overlapping tensors": (shifted("model.layers.0.mlp.up_proj.weight", -4), "an overlap between"),
    "gap between tensors": (shifted("model.layers.0.mlp.up_proj.weight", 4), "a gap between"),
    "negative byte range": (tensor(data_offsets=[-128, 0]), "byte range of `model.norm.weight`"),
    "byte range backwards": (tensor(data_offsets=[128, 0]), "ends before it begins"),
    "byte range of 2**62": (tensor(data_offsets=[0, 2**62]), "a range of 4,611,686,018,427,387,904 bytes"),
    "byte range of 10**400": (tensor(data_offsets=[0, 10**400]), "byte range of `model.norm.weight`"),
    "byte range of fractions": (tensor(data_offsets=[0.0, 128.0]), "byte range of `model.norm.weight`"),
    "byte range of three": (tensor(data_offsets=[0, 64, 128]), "byte range of `model.norm.weight`"),
    "byte range is true": (tensor(data_offsets=[False, True]), "byte range of `model.norm.weight`"),
    "unknown dtype": (tensor(dtype="Q9"), "`model.norm.weight` (Q9)"),
    "dtype is a number": (tensor(dtype=32), "does not give dtype"),
    "integers": (tensor(dtype="I32"), "`model.norm.weight` (I32)"),
    "shape of 2**62 by 2**62": (tensor(shape=[2**62, 2**62]), "(F32, 4611686018427387904x4611686018427387904)"),
    "shape is negative": (tensor(shape=[-32]), "does not give dtype, shape"),
    "shape with true": (tensor(shape=[32, True]), "does not give dtype, shape"),
    "shape with a fraction": (tensor(shape=[32.0]), "does not give dtype, shape"),
    "shape is a text": (tensor(shape="32"), "does not give dtype, shape"),
    "shape does not fit the bytes": (tensor(shape=[31]), "(F32, 31) a range of 128 bytes"),
    "shape of another model": (tensor(shape=[1, 32]), "`model.norm.weight` is [1, 32], not [32]"),
    "bytes behind the last tensor": (
        lambda folder: _put(folder / WEIGHTS, (folder / WEIGHTS).read_bytes() + b"more"),
        "goes on for 4 bytes",
    ),
    "a weight that is not a number": (not_finite, "is not a finite `float32`"),
    # Foreign files
    "picture as weights": (file(WEIGHTS, PNG), "header length"),
    "archive as weights": (zipped, "header length"),
    "GGUF as weights": (gguf_as_weights, "header length"),
    "pickle as weights": (file(WEIGHTS, pickle.dumps(Trap())), "header length"),
    "pickle only": (pickled, "can run code"),
    "no weights": (remove(WEIGHTS), "holds no weights"),
    "weights of another name": (renamed(WEIGHTS, "weights.safetensors"), "neither `model.safetensors` nor"),
    "weights are a folder": (replaced(WEIGHTS, pathlib.Path.mkdir), "is not an ordinary file"),
    "weights are a pipe": (replaced(WEIGHTS, os.mkfifo), "is not an ordinary file"),
    "weights are a link to themselves": (replaced(WEIGHTS, to_itself), "cannot be read"),
    "weights have no end": (replaced(WEIGHTS, endless), "is not an ordinary file"),
    # config.json
    "no configuration": (remove(CONFIG), "`config.json` cannot be read"),
    "empty configuration": (file(CONFIG, b""), "is not JSON"),
    "configuration is cut": (cut(CONFIG, 100), "is not JSON"),
    "configuration is a list": (file(CONFIG, "[]"), "holds `[]`"),
    "configuration is a text": (file(CONFIG, '"llama"'), "holds `'llama'`"),
    "configuration with a byte order mark": (file(CONFIG, b"\xef\xbb\xbf{}"), "is not JSON"),
    "configuration in UTF-16": (file(CONFIG, '{"model_type": "llama"}'.encode("utf-16")), "is not UTF-8"),
    "configuration nested deeply": (file(CONFIG, '{"a": ' + DEEP), "nested too deeply"),
    "configuration nested, and whole": (file(CONFIG, '{"a": ' + "[" * 100 + "]" * 100 + "}"), "nested too deeply"),
    "configuration with a key twice": (file(CONFIG, '{"vocab_size": 64, "vocab_size": 65}'), "`'vocab_size'` twice"),
    "configuration of a terabyte": (large_config, "has 1,099,511,627,776 bytes"),
    "configuration is a pipe": (replaced(CONFIG, os.mkfifo), "is not an ordinary file"),
    "configuration has no end": (replaced(CONFIG, endless), "is not an ordinary file"),
    "configuration is a link to itself": (replaced(CONFIG, to_itself), "cannot be read"),
    "number of 10,000 digits": (file(CONFIG, '{"vocab_size": ' + "9" * 10_000 + "}"), "is not JSON"),
    "number of 400 digits": (config(rms_norm_eps=10**400), "not finite"),
    "vocabulary of 10**30": (config(vocab_size=10**30), "`vocab_size` of the target"),
    "vocabulary of 2**31 - 1": (config(vocab_size=2**31 - 1), "is [64, 32], not [2147483647, 32]"),
    "rope base NaN": (config(rope_theta=float("nan")), "`rope_theta` as a number that is not finite"),
    "epsilon infinite": (config(rms_norm_eps=float("inf")), "`rms_norm_eps` as a number that is not finite"),
    "epsilon tiny": (config(rms_norm_eps=-1e-5), "`rms_norm_eps` as `-1e-05`"),
    "width as a text": (config(hidden_size="32"), "`hidden_size` as `'32'`"),
    "heads as a fraction": (config(num_attention_heads=4.0), "`num_attention_heads` as `4.0`"),
    "layers as true": (config(num_hidden_layers=True), "`num_hidden_layers` as `True`"),
    "layers as a list": (config(num_hidden_layers=[2]), "`num_hidden_layers` as `[2]`"),
    "no layers": (config(num_hidden_layers=0), "`num_hidden_layers` as `0`"),
    "negative layers": (config(num_hidden_layers=-2), "`num_hidden_layers` as `-2`"),
    "a billion layers": (config(num_hidden_layers=10**9), "`num_hidden_layers` as `1000000000`"),
    "more layers than tensors": (config(num_hidden_layers=9000), "`9000` layers"),
    "fewer layers than stored": (config(num_hidden_layers=1), "not part of the model: `model.layers.1."),
    "heads that do not divide the width": (config(num_attention_heads=5), "`5` query heads"),
    "no heads": (config(num_attention_heads=0), "`0` query heads"),
    "key heads that do not divide the heads": (config(num_key_value_heads=3), "`3` key/value heads"),
    "no key heads": (config(num_key_value_heads=0), "`kv_heads` of the target is `0`"),
    "odd head width": (config(head_dim=7), "head width is `7`"),
    "no positions": (config(max_position_embeddings=0), "`max_positions` of the target is `0`"),
    "no model type": (config(model_type=...), "lacks the key `model_type`"),
    "model type is a list": (config(model_type=["llama"]), "`model_type` as `['llama']`"),
    "unknown model type": (config(model_type="mamba"), "`mamba`"),
    "half a surrogate pair": (config(model_type="\ud800"), "describes a model of type"),
    "remote code": (
        config(model_type="own", auto_map={"AutoModelForCausalLM": "modeling_own.Own"}),
        "Code that comes with a checkpoint is never run",
    ),
    "a classifier": (config(architectures=["LlamaForSequenceClassification"]), "`LlamaForSequenceClassification`"),
    "architectures as a text": (config(architectures="LlamaForCausalLM"), "`architectures`"),
    "quantised weights": (config(quantization_config={"quant_method": "awq"}), "quantised by `awq`"),
    "quantised somehow": (config(quantization_config={}), "quantised by `unknown`"),
    "quantisation as a text": (config(quantization_config="int4"), "`quantization_config` as `'int4'`"),
    "unknown activation": (config(hidden_act="relu"), "`hidden_act` as `relu`"),
    "unknown rope": (config(rope_scaling={"rope_type": "spiral"}), "`spiral`"),
    "rope without its factor": (config(rope_scaling={"rope_type": "linear"}), "lacks the key `factor`"),
    "rope factor of 1e300": (config(rope_scaling={"rope_type": "linear", "factor": 1e300}), "`1e+300`"),
    "rope as a list": (config(rope_scaling=[1]), "`rope_scaling` as `[1]`"),
    "rope turns half of each head": (config(partial_rotary_factor=0.5), "only `0.5` of each head"),
    "end id beyond the vocabulary": (config(eos_token_id=64), "`eos_token_id` as `64`"),
    "end id of 10**30": (config(eos_token_id=[1, 10**30]), "from 0 to 63"),
    "end id as a text": (config(eos_token_id="</s>"), "`eos_token_id` as `</s>`"),
    "broken generation config": (file("generation_config.json", "{"), "`generation_config.json` is not JSON"),
    # Tokenizer
    "no tokenizer": (remove(TOKENS), "no `tokenizer.json`"),
    "only a SentencePiece file": (renamed(TOKENS, "tokenizer.model"), "only `tokenizer.model`"),
    "tokenizer is cut": (cut(TOKENS, 500), "`tokenizer.json` is not JSON"),
    "tokenizer is a list": (file(TOKENS, "[]"), "holds `[]`"),
    "tokenizer is a pipe": (replaced(TOKENS, os.mkfifo), "is not an ordinary file"),
    "tokenizer without a model": (settings(TOKENS, model=...), "has no vocabulary"),
    "unigram tokenizer": (model(type="Unigram"), "of the kind `Unigram`"),
    "vocabulary is empty": (model(vocab={}), "has no vocabulary"),
    "vocabulary is a list": (model(vocab=["a", "b"]), "`vocab` as `['a', 'b']`"),
    "vocabulary larger than the embedding": (model(vocab={"a": 0, "b": 64}), "the id `64` in its vocabulary"),
    "vocabulary with a negative id": (model(vocab={"a": 0, "b": -1}), "the id `-1`"),
    "vocabulary with fractions": (model(vocab={"a": 0.0}), "the id `0.0`"),
    "one id for two pieces": (model(vocab={"a": 0, "b": 0}), "one id to several pieces"),
    "half a surrogate pair in the vocabulary": (model(vocab={"\ud800": 0}), "is not a tokenizer"),
    "merges of unknown pieces": (model(merges=[["q", "qqq"]]), "is not a tokenizer"),
    "merges are numbers": (model(merges=[1, 2]), "is not a tokenizer"),
    "tokens are missing": (
        edit(TOKENS, lambda d: [d["model"]["vocab"].pop(f"<unused{i}>") for i in range(52, 56)]),
        "ids without gaps",
    ),
    "added token without an id": (added(id=None), "lacks the key `id`"),
    "added token with a negative id": (added(id=-5), "with id `-5`"),
    "added token with another's id": (added(id=62), "gives the id `62` to"),
    "added token without text": (added(content=""), "the added token ``"),
    "added tokens as an object": (settings(TOKENS, added_tokens={"a": 1}), "`added_tokens`"),
    "unknown decoder": (settings(TOKENS, decoder={"type": "CTC"}), "turns ids into text by `CTC`"),
    "unknown pre-tokenizer": (settings(TOKENS, pre_tokenizer={"type": "Own"}), "is not a tokenizer"),
    "pattern that is no pattern": (
        settings(
            TOKENS,
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
        ),
        "is not a tokenizer",
    ),
    "tokenizer settings are a list": (file(TOKENS_CONFIG, "[]"), "`tokenizer_config.json` holds `[]`"),
    "start token that is not there": (settings(TOKENS_CONFIG, add_bos_token=True, bos_token="<s>"), "`<s>`"),
    "end token behind every prompt": (settings(TOKENS_CONFIG, add_eos_token=True), "`add_eos_token`"),
    # Chat template
    "template is a number": (template(5), "`chat_template` as `5`"),
    "templates without a default": (template([{"name": "tools", "template": "x"}]), "one named `default`"),
    "template is no Jinja": (template("{% for m in messages %}"), "not valid Jinja"),
    "template of 50,000 brackets": (template("{{ " + "(" * 50_000), "not valid Jinja"),
    "template does not come to an end": (template(LOOP), "more than 250,000 steps"),
    "template calls itself": (template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "recursion"),
    "template calls itself twice": (
        template("{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"),
        "more than 250,000 steps",
    ),
    "template of a terabyte": (template("{{ 'x' * 10**12 }}"), "longer than 16,777,216"),
    "template doubles a text by ~": (template(DOUBLE + "n.x ~ n.x %}{% endfor %}"), "longer than"),
    "template doubles a text by +": (template(DOUBLE + "n.x + n.x %}{% endfor %}"), "longer than"),
    "template doubles a text by replacing": (
        template(DOUBLE + "n.x | replace('a', 'aa') %}{% endfor %}"),
        "longer than",
    ),
    "template doubles a block": (
        template(DOUBLE.removesuffix("= ") + "%}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}"),
        "longer than",
    ),
    "template prints without end": (
        template("{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}"),
        "longer than",
    ),
    "template of a wide format": (template("{{ '%9999999999d' % 1 }}"), "a width of millions"),
    "template of a wide field": (template("{{ 'x'.center(10**12) }}"), "a number is beyond"),
    "template of a huge number": (template("{{ 10 ** (10 ** 10) }}"), "more than 4,096 bits"),
    "template leaves the sandbox": (template("{{ ''.__class__.__mro__[1].__subclasses__() }}"), "is unsafe"),
    "template leaves by a function": (template("{{ raise_exception.__globals__['os'] }}"), "is unsafe"),
    "template reads a file": (template("{% include '/etc/hostname' %}"), "no loader"),
    "template file is a pipe": (replaced("chat_template.jinja", os.mkfifo), "is not an ordinary file"),
    "template file is not text": (file("chat_template.jinja", b"\xff\xfe\x00"), "`chat_template.jinja`"),
}

SHARDS: Mapping[str, tuple[Damage, str]] = {
    "index is cut": (cut(INDEX, 100), "is not JSON"),
    "index has no weight map": (settings(INDEX, weight_map=...), "has no `weight_map`"),
    "weight map is empty": (settings(INDEX, weight_map={}), "has no `weight_map`"),
    "weight map is a list": (settings(INDEX, weight_map=[FIRST]), "`weight_map`"),
    "index names itself": (where(norm=INDEX), f"the file `{INDEX}`"),
    "index names a number": (where(norm=1), "the file `1`"),
    "index names a list": (where(norm=[FIRST]), "the plain name"),
    "index names null": (where(norm=None), "the file `None`"),
    "index leaves the folder": (where(norm=f"../tiny/{FIRST}"), "the file `../tiny/"),
    "index names an absolute path": (where(norm=f"/tmp/{FIRST}"), "the file `/tmp/"),
    "index leaves by a backslash": (where(norm=f"..\\{FIRST}"), "the plain name"),
    "index names a zero byte": (where(norm="a\0.safetensors"), "the plain name"),
    "index names a pickle": (where(norm="pytorch_model.bin"), "the file `pytorch_model.bin`"),
    "index names an absent file": (where(norm="absent.safetensors"), "`absent.safetensors`"),
    "index names a tensor that is not there": (
        edit(INDEX, lambda d: d["weight_map"].update({"ghost": FIRST})),
        "`ghost` (`model-00001-of-00002.safetensors`)",
    ),
    "index names the wrong file": (where(norm=FIRST), "`model.norm.weight` (`model-00001"),
    "a shard is a folder": (replaced(SECOND, pathlib.Path.mkdir), f"not there: `{SECOND}`"),
    "a shard is a link to itself": (replaced(SECOND, to_itself), f"not there: `{SECOND}`"),
    "a shard is a pipe": (replaced(SECOND, os.mkfifo), f"not there: `{SECOND}`"),
    "a shard is missing": (remove(SECOND), f"not there: `{SECOND}`"),
    "a shard is cut": (cut(SECOND, -7), f"`{SECOND}` ends at byte"),
    "a tensor in two shards": (shard_twice, "does not say which counts"),
    "the index is missing": (remove(INDEX), "neither `model.safetensors` nor"),
    "the index is a pipe": (replaced(INDEX, os.mkfifo), "is not an ordinary file"),
}

MOE: Mapping[str, tuple[Damage, str]] = {
    "two billion experts": (config(num_experts=2**31 - 1), "`2147483647` experts"),
    "negative experts": (config(num_experts=-4), "`experts of the mixture` of the target is `-4`"),
    "more experts for a token than there are": (config(num_experts_per_tok=5), "`5` of `4` experts"),
    "a dense layer as a text": (config(mlp_only_layers=["1"]), "`mlp_only_layers`"),
    "experts every 0 layers": (config(decoder_sparse_step=0), "`decoder_sparse_step` as `0`"),
}

NESTED: Mapping[str, tuple[Damage, str]] = {
    "text part is a list": (config(text_config=[]), "`text_config` as `[]`"),
    "text part is empty": (config(text_config={}), "missing: `model.language_model.layers.3."),
    "text part of an unknown family": (text(model_type="own"), "`own`"),
    "text part is quantised": (text(quantization_config={"quant_method": "gptq"}), "quantised by `gptq`"),
    "text part without a window": (text(sliding_window=None), "`sliding_window` null"),
    "text part with too few kinds of layers": (text(layer_types=["full_attention"]), "`1` entries"),
}

GGUF: Mapping[str, tuple[Damage, str]] = {
    "empty": (whole(b""), "cannot be read"),
    "wrong magic": (patch(b"", 0, b"GGML"), "does not start with"),
    "picture": (whole(PNG), "does not start with"),
    "safetensors": (lambda path: folders.save(path, folders.tensors(folders.CONFIGS["llama"])), "does not start with"),
    "pickle": (whole(pickle.dumps(Trap())), "does not start with"),
    "version 9": (patch(b"GGUF", 0, u32(9)), "of version `9`"),
    "big-endian": (patch(b"GGUF", 0, struct.pack(">I", 3)), "of version `50331648`"),
    "cut inside the counts": (cut("", 20), "ends inside its header"),
    "cut inside the metadata": (cut("", 700), "ends inside its header"),
    "cut inside the last tensor": (cut("", -4), "before `"),
    "2**60 tensors": (patch(b"GGUF", 4, u64(2**60)), "`tiny.gguf`"),
    "2**60 keys": (patch(b"GGUF", 12, u64(2**60)), "`tiny.gguf`"),
    "text of 2**63 bytes": (gguf_start(0, 1, u64(2**63) + b"key"), "ends inside its header"),
    "list of 2**40 numbers": (gguf_start(0, 1, u64(1) + b"k" + u32(9) + u32(4) + u64(2**40)), "ends inside"),
    "list of 2**40 texts": (gguf_start(0, 1, u64(1) + b"k" + u32(9) + u32(8) + u64(2**40)), "ends inside"),
    "list of lists": (gguf_start(0, 1, u64(1) + b"k" + u32(9) + u32(9) + u64(1)), "values of type number `9`"),
    "value of an unknown type": (gguf_start(0, 1, u64(1) + b"k" + u32(77)), "type number `77`"),
    "key that is not UTF-8": (gguf_start(0, 1, u64(1) + b"\xff" + u32(4) + u32(0)), "not UTF-8"),
    "key twice": (gguf_start(0, 2, (u64(1) + b"k" + u32(4) + u32(0)) * 2), "the key `k` twice"),
    "no metadata": (gguf_start(0, 0), "lacks the key `general.architecture`"),
    "unknown architecture": (patch(b"general.architecture", 4, u64(5) + b"mamba"), "`mamba`"),
    "no context length": (meta(llama__context_length=None), "lacks the key `llama.context_length`"),
    "context length as a text": (meta(llama__context_length="long"), "`llama.context_length` as `long`"),
    "four billion layers": (meta(llama__block_count=4_000_000_000), "`4000000000` layers"),
    "no heads": (meta(llama__attention__head_count=0), "`0` query heads"),
    "epsilon NaN": (meta(llama__attention__layer_norm_rms_epsilon=float("nan")), "epsilon` as `nan`"),
    "unknown rope": (meta(llama__rope__scaling__type="yarn"), "rope scaling `yarn`"),
    "settings that are not read": (meta(llama__logit_scale=2.0), "`llama.logit_scale`"),
    "alignment that is no power of two": (meta(general__alignment=3), "the alignment `3`"),
    "alignment of 2**31": (meta(general__alignment=2**31), "before `"),
    "unknown tensor type": (patch(ENTRY, 4 + 16, u32(200)), "(type number `200`)"),
    "tensor type that is not read": (patch(ENTRY, 4 + 16, u32(24)), "(`I8`)"),
    "tensor of 2**31 dimensions": (patch(ENTRY, 0, u32(2**31)), "2147483648 dimensions"),
    "tensor with a dimension of 0": (patch(ENTRY, 4, u64(0)), "the shape [64, 0]"),
    "tensor of 2**62 values": (patch(ENTRY, 4, u64(2**62)), "before `blk.1.ffn_up.weight` ends"),
    "tensor that lies beyond the file": (patch(ENTRY, 4 + 20, u64(2**40)), "before `blk.1.ffn_up.weight` ends"),
    "tensor between two places": (patch(ENTRY, 4 + 20, u64(33)), "no multiple of 32"),
    "tensor over another": (patch(ENTRY, 4 + 20, u64(32)), "an overlap between"),
    "tensor of another name": (patch(b"blk.1.ffn_", 0, b"xx"), "missing: `blk.1.ffn_"),
    "other tokenizer": (meta(tokenizer__ggml__model="llama"), "of the kind `llama`"),
    "tokenizer that cuts otherwise": (meta(tokenizer__ggml__pre="other"), "`other`"),
    "no tokens": (meta(tokenizer__ggml__tokens=None), "has no list of tokens"),
    "one token": (meta(tokenizer__ggml__tokens=["a"]), "`1` tokens but `259` token types"),
    "a token twice": (meta(tokenizer__ggml__tokens=["a"] * 259), "the token `a` twice"),
    "merges of unknown tokens": (meta(tokenizer__ggml__merges=["qq zz"]), "merges"),
    "merge of one token": (meta(tokenizer__ggml__merges=["qq"]), "the merge `qq`"),
    "end id beyond the tokens": (meta(tokenizer__ggml__eos_token_id=259), "`eos_token_id` as `259`"),
    "template is no Jinja": (meta(tokenizer__chat_template="{{"), "not valid Jinja"),
    "template does not come to an end": (meta(tokenizer__chat_template=LOOP), "more than 250,000 steps"),
    "pipe": (replaced("", os.mkfifo), "not an ordinary file"),
    "folder": (replaced("", pathlib.Path.mkdir), "cannot be read"),
    "link to itself": (replaced("", to_itself), "cannot be read"),
}

KINDS = {"folder": FOLDER, "shards": SHARDS, "moe": MOE, "nested": NESTED, "gguf": GGUF}
CASES = [Hostile(kind, name, *case) for kind, cases in KINDS.items() for name, case in cases.items()]


def main() -> None:
    for case in CASES:
        with tempfile.TemporaryDirectory() as place:
            path = good(case.kind, pathlib.Path(place))
            case.damage(path)
            try:
                use(path)
                message = "NOT REFUSED"
            except JspecError as error:
                message = str(error).replace(place, "")
        print(f"{case.kind}: {case.name}\n  " + message.encode(errors="replace").decode().replace("\n", "\n  ") + "\n")
    print(f"{len(CASES)} hostile checkpoints")


if __name__ == "__main__":
    main()
