"""Published drafters: each format read as its own description says, and every tensor of it used.

Tests 1 and 2 of drafters.md 13. Pitfalls of drafters.md 12 that are planted here: 2, 10, 12, 16, 18, 23, 25, 29.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.base import Rows
from jspec.drafters.block.drafter import BlockDrafter
from jspec.drafters.formats import body, convert, layout, vocabulary
from jspec.errors import JspecError
from jspec.target.features import Features
from tests.drafters import published, published_reference
from tests.drafters.published import read
from tests.drafters.published_drafts import LENGTH, compare, drafted, lent, plain, states_of, tapped

EVERY = published.variants()


@pytest.mark.parametrize(("name", "variant"), EVERY)
def test_every_format_drafts_as_its_description_says(tmp_path, name, variant):
    found = compare(tmp_path, name, variant)
    c = found.saved.config
    assert c.taps == published.TAPS and c.mask_id == 63 and c.target_layers == 6
    assert found.saved.target == published.target().fingerprint
    assert set(c.layers * [c.width]) == {32}


@pytest.mark.parametrize(("name", "variant"), [("speculators", "dspark reduced"), ("zlab", "with scales")])
def test_the_compiled_drafter_drafts_the_same(tmp_path, name, variant):
    found = compare(tmp_path, name, variant)
    saved, target, states = found.saved, published.target(), states_of()
    tokens, _, sure = drafted(saved, target, states, 7)
    chosen = BlockDrafter(config=saved.config, proposals=saved.config.longest, mode="greedy", key_block=16)
    weights = lent(saved, target)
    rows = Rows(
        slot=jnp.int32(0),
        tokens=jnp.zeros((1, LENGTH), jnp.int32),
        features=Features(values=jnp.asarray(tapped(saved, states))[None], taps=chosen.taps),
        start=jnp.zeros((1,), jnp.int32),
        count=jnp.full((1,), LENGTH, jnp.int32),
    )

    @jax.jit
    def run():
        state = chosen.observe(weights, chosen.init(weights, 1, 32), rows)
        return chosen.propose(weights, state, jnp.array([7]), jnp.array([LENGTH]), None)

    made = run()
    np.testing.assert_array_equal(made.tokens[0], tokens)
    if saved.params.confidence is not None:
        np.testing.assert_allclose(made.confidence[0], plain.sigmoid(sure), atol=1e-5)


def plant_slots(m):
    m.setattr(
        body,
        "BlockConfig",
        lambda from_anchor, block, **k: layout.BlockConfig(
            from_anchor=not from_anchor, block=block + (1 if from_anchor else -1), **k
        ),
    )


def plant_taps(by):
    def plant(m):
        old = body.read
        m.setattr(body, "read", lambda *a, taps, **k: old(*a, taps=tuple(t + by for t in taps), **k))

    return plant


def plant_first_ids(m):
    old = vocabulary.read
    m.setattr(vocabulary, "read", lambda *a: (np.arange(len(old(*a)[0])), []))


def plant_params(change):
    def plant(m):
        old = layout.params
        m.setattr(layout, "params", lambda *a: change(old(*a)))

    return plant


def in_layers(**changes):
    return plant_params(
        lambda p: p.replace(layers=tuple(x.replace(**{k: f(x) for k, f in changes.items()}) for x in p.layers))
    )


def halves(x):
    return jnp.concatenate(jnp.split(x, 2)[::-1])


def setting(**changes):
    def plant(m):
        old = body.BlockConfig
        m.setattr(body, "BlockConfig", lambda **k: old(**(k | {n: f(k[n]) for n, f in changes.items()})))

    return plant


# What is planted in the reader, and a variant in which it must show.
PLANTS = {
    "slot conventions exchanged (12.2)": ("deepspec", "dflash", plant_slots),
    "blocks taken for hidden states (12.10)": ("deepspec", "dflash", plant_taps(-1)),
    "hidden states less one, twice (12.10)": ("speculators", "dflash", plant_taps(-1)),
    "the first ids taken for the map (LD-3, 12.25)": ("specforge", "dspark reduced", plant_first_ids),
    "rope base by default (12.16)": ("zlab", "flat", setting(rope=lambda r: dataclasses.replace(r, theta=1e4))),
    "mask by default (12.23)": ("zlab", "flat", setting(mask_id=lambda _: 0)),
    "windows ignored": ("zlab", "with scales", setting(windowed=lambda _: (), window=lambda _: 0)),
    "causal rows ignored (12.18)": ("specforge", "dspark causal", setting(causal=lambda _: ())),
    "causal rows by mistake (12.18)": ("speculators", "dflash without the key", setting(causal=lambda _: (0, 1))),
    "scale of logits ignored": ("zlab", "with scales", setting(logit_scale=lambda _: 1.0)),
    "cap of logits ignored": ("zlab", "with scales", setting(logit_cap=lambda _: None)),
    "norm's epsilon ignored": ("zlab", "with scales", setting(norm_eps=lambda _: 0.1)),
    "keys and values exchanged": ("zlab", "flat", in_layers(kv=lambda x: halves(x.kv))),
    "gate and up exchanged": ("zlab", "flat", in_layers(gate_up=lambda x: halves(x.gate_up))),
    "DFlare's own keys for the context (12.29)": ("angelslim", "dflare", in_layers(kv_context=lambda x: x.kv)),
    "norms exchanged": ("zlab", "flat", in_layers(attn_norm=lambda x: x.ff_norm, ff_norm=lambda x: x.attn_norm)),
    "taps in another order": ("zlab", "flat", plant_params(lambda p: p.replace(fuse=jnp.roll(p.fuse, 32, axis=1)))),
    "mix in another order": ("angelspec", "dflare", plant_params(lambda p: p.replace(mix=jnp.roll(p.mix, 1, axis=1)))),
    "Markov tables exchanged": (
        "deepspec",
        "dspark",
        plant_params(
            lambda p: p.replace(markov=p.markov.replace(previous=p.markov.following, following=p.markov.previous))
        ),
    ),
    "Markov gate transposed": (
        "deepspec",
        "dspark gated",
        plant_params(lambda p: p.replace(markov=p.markov.replace(mix=jnp.roll(p.markov.mix, 5, axis=1)))),
    ),
    "chunks of the state exchanged": (
        "deepspec",
        "dspark rnn",
        plant_params(lambda p: p.replace(markov=p.markov.replace(mix=jnp.roll(p.markov.mix, 5, axis=0)))),
    ),
    "confidence without its bias": (
        "deepspec",
        "dspark",
        plant_params(lambda p: p.replace(confidence=p.confidence.replace(bias=jnp.float32(0)))),
    ),
}


@pytest.mark.parametrize("fault", PLANTS)
def test_a_misreading_would_be_seen(tmp_path, monkeypatch, fault):
    name, variant, plant = PLANTS[fault]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        compare(tmp_path, name, variant)


def test_taps_out_of_order_are_put_in_order(tmp_path):
    # speculators lists hidden states in the order of the fusion's columns, which need not ascend.
    def turn(key, ids):
        def damage(config, tensors):
            place = config if key in config else config["dflash_config"]
            place[key] = ids

        return damage

    found = compare(tmp_path / "a", "speculators", "dflash", turn("aux_hidden_state_layer_ids", [5, 2, 3]))
    assert found.saved.config.taps == (1, 2, 4)
    compare(tmp_path / "b", "angelslim", "dflare", turn("target_layer_ids", [4, 1, 2]))


@pytest.mark.parametrize(
    ("name", "variant", "key", "ids"),
    [
        ("deepspec", "dspark", "target_layer_ids", [-1, 2, 4]),  # 12.12, LD-13
        ("speculators", "dflash", "aux_hidden_state_layer_ids", [0, 3, 5]),
    ],
)
def test_the_embedding_is_tapped_where_a_format_names_it(tmp_path, name, variant, key, ids):
    found = compare(tmp_path, name, variant, lambda c, t: c.update({key: ids}))
    assert found.saved.config.taps == (-1, 2, 4)


# --- Every tensor is used -------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "variant"), EVERY)
def test_every_tensor_counts_once(tmp_path, name, variant):
    """One more in any tensor changes the weights, or is refused as no copy of the target; each tensor another way."""
    base, _, tensors = read(tmp_path / "base", name, variant)

    def flat(found):
        ids = np.zeros(0) if found.saved.ids is None else found.saved.ids
        return [*map(np.asarray, jax.tree.leaves(found.saved.params)), ids]

    before, seen = flat(base), set()
    for number, tensor in enumerate(tensors):

        def damage(config, held, tensor=tensor):
            one = held[tensor].reshape(-1).copy()
            one[0] = not one[0] if one.dtype == np.bool_ else one[0] + 1
            held[tensor] = one.reshape(held[tensor].shape)

        try:
            after = flat(read(tmp_path / str(number), name, variant, damage)[0])
        except JspecError as error:
            assert tensor in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d"), error
            continue
        changed = [
            (i, tuple(np.argwhere(a != b)[0]))
            for i, (a, b) in enumerate(zip(before, after, strict=True))
            if (a != b).any()
        ]
        assert len(changed) == 1, (tensor, changed)
        assert changed[0] not in seen
        seen.add(changed[0])


@pytest.mark.parametrize(("name", "variant"), EVERY)
def test_tensors_that_are_missing_renamed_or_of_another_shape_are_named(tmp_path, name, variant):
    config, tensors = published.made(name, variant)
    free = ("embed_tokens.weight", "lm_head.weight", "t2d")  # copies of the target's may be left out
    kinds = {n.replace("layers.1.", "layers.0."): n for n in tensors}  # one layer stands for all
    for number, tensor in enumerate(n for n in kinds.values() if n not in free):
        for way in ("missing", "renamed", "shape", "dtype"):
            held = dict(tensors)
            value = held.pop(tensor)
            if way == "renamed":
                held[tensor + ".old"] = value
            if way == "shape":
                held[tensor] = value[..., :-1]
            if way == "dtype":
                held[tensor] = np.zeros(value.shape, np.int16)
            folder = published.put(tmp_path / f"{number}{way}", config, held)
            with pytest.raises(JspecError) as told:
                convert.read(folder, published.target())
            text = str(told.value)
            common = published_reference.OLD.get(tensor, tensor).removeprefix("logit_head.")
            assert f"`{tensor}`" in text or f"`{common}`" in text, (way, text)
            assert "Allowed:" in text and "To do:" in text


# --- The listings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(p.stem for p in published.DATA.glob("*.json")))
def test_listings_name_their_sources_and_agree_with_published_shapes(name):
    held = published.listing(name)
    assert held["format"] == name and held["sources"]
    for entry in held["sources"]:
        assert set(entry) == {"repository", "commit", "path"} and len(entry["commit"]) == 40
    given = held.get("published")
    if given is None:
        return
    values = {"N": 5, "T": 5, "r": 256, "Vd": 1, "V": 1, "D": 1, "F": 1, "H": 1, "G": 1, "hd": 1} | given["sizes"]
    computed = published.shapes(name, given["variant"], values)
    for tensor_name, shape in given["shapes"].items():
        assert computed[tensor_name][1] == tuple(shape), tensor_name


def test_five_layers_have_58_tensors():
    held = published.listing("zlab")
    config = held["variants"]["flat"]["config"]
    assert len(published.shapes("zlab", "flat", published.letters(config))) == held["tensors_of_five_layers"] == 58
