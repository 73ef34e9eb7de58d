"""How products are laid out: the same numbers in every form, a choice that follows the timings."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.target import products
from jspec.target.products import Products


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("form", [Products(), Products(least=4), Products(left=4), Products(least=2, left=64)], ids=str)
def test_every_form_is_the_product(dtype, rows, form):
    # Whole numbers: every order of summation is exact.
    rng = np.random.default_rng(rows)
    x, w = (jnp.asarray(rng.integers(-4, 5, shape), dtype) for shape in ((rows, 24), (16, 24)))
    made = jax.jit(products.multiply, static_argnums=2)(x, w, form)
    assert made.dtype == jnp.float32
    np.testing.assert_array_equal(made, np.asarray(x, np.float32) @ np.asarray(w, np.float32).T)


def test_weights_on_the_left_stay_there():
    """Without the barriers the compiler folds the transposes in, and the form is the plain one again."""
    x, w = jnp.ones((8, 24)), jnp.ones((16, 24))
    text = jax.jit(products.multiply, static_argnums=2).lower(x, w, Products(left=8)).compile().as_text()
    assert "f32[16,8]" in text and "dot(" in text


@pytest.mark.parametrize(
    ("plain", "left", "wanted"),
    [
        # ms at 1, 2, 4, 16, 64 rows; with the weights on the left at 4, 16, 64.
        ((20, 34, 37, 60, 106), (22, 34, 89), (1, 64)),
        ((156, 21, 21, 25, 58), (75, 80, 110), (2, 0)),
        ((100, 80, 40, 40, 40), (30, 39, 20), (4, 4)),  # 39 is not clearly less than 40
        ((20, 19, 19, 19, 19), (18, 18, 18), (1, 0)),
    ],
)
def test_the_clearly_faster_form_is_chosen(plain, left, wanted):
    times = dict(zip((1, 2, 4, 16, 64), plain, strict=True)), dict(zip((4, 16, 64), left, strict=True))
    form = products.measure(lambda rows, form: times[form.left > 0][rows])
    assert (form.least, form.left) == wanted


def test_small_models_and_accelerators_are_not_measured(tmp_path, monkeypatch):
    store = tmp_path / "products.json"
    assert products.choose([jnp.ones((4, 4), jnp.bfloat16)], store, "here") == products.default(jnp.bfloat16)
    assert not store.exists()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(products, "ENOUGH", 0)
    assert products.choose([jnp.ones((4, 4), jnp.bfloat16)], store, "here") == Products()


def test_a_choice_is_kept_and_never_trusted_blindly(tmp_path, monkeypatch):
    monkeypatch.setattr(products, "ENOUGH", 0)
    calls = []
    monkeypatch.setattr(products, "_seconds", lambda *given: calls.append(given) or 1.0)
    weights, store = [jnp.ones((4, 4))], tmp_path / "below" / "products.json"
    first = products.choose(weights, store, "here")
    assert first == Products() and calls and first.reason == "measured at load"
    calls.clear()
    again = products.choose(weights, store, "here")
    assert again == first and not calls and "earlier" in again.reason
    products.choose(weights, store, "another machine")
    assert calls and len(json.loads(store.read_text())) == 2
    for damage in ("", "[]", '{"here, float32 (4, 4)": 3}', '{"here, float32 (4, 4)": {"least": 99, "left": 0}}'):
        calls.clear()
        store.write_text(damage)
        assert products.choose(weights, store, "here") == first and calls


def test_where_nothing_can_be_kept_the_default_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(products, "ENOUGH", 0)
    monkeypatch.setattr(products, "_seconds", lambda *_: 1.0)
    (tmp_path / "file").write_text("")
    for store in (tmp_path / "file" / "products.json", Path("~nobody-of-this-name/products.json")):
        made = products.choose([jnp.ones((4, 4), jnp.bfloat16)], store, "here")
        assert made == products.default(jnp.bfloat16) and "cannot be written" in made.reason
