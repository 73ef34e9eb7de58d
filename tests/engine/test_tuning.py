"""Choices of a GPU's compiler are kept, and told in the fingerprint (DT-5)."""

import shutil

import jax
import jax.numpy as jnp
import pytest

from jspec.engine import tuning
from tests import tiny


@pytest.fixture
def gpu(monkeypatch):
    """A process that takes itself for one on a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.fixture
def cache(tmp_path):
    """JAX's folder of compiled programs for one test, by name."""
    before = jax.config.values["jax_compilation_cache_dir"]

    def use(name):
        folder = None if name is None else str(tmp_path / name)
        jax.config.update("jax_compilation_cache_dir", folder)
        return tmp_path / name / "xla_gpu_per_fusion_autotune_cache_dir" if name else None

    yield use
    jax.config.update("jax_compilation_cache_dir", before)


def fingerprint():
    return tiny.engine(kernel="xla").fingerprint(jnp.bfloat16)


def test_one_folder_of_choices_is_one_fingerprint(gpu, cache):
    folder = cache("a")
    assert tuning.store() == folder
    first = fingerprint()
    (folder / "choice-of-another-program").write_text("tile 8")
    assert fingerprint() == first  # what was chosen before stays chosen
    cache("b")
    assert fingerprint() != first
    cache("a")
    assert fingerprint() == first
    shutil.rmtree(folder)
    assert fingerprint() != first  # choices that are gone are made again, perhaps otherwise


@pytest.mark.parametrize("how", ["no folder", "switched off", "other caches only", "a folder nobody can write"])
def test_choices_that_are_not_kept_equal_nobody_s(gpu, cache, monkeypatch, tmp_path, how):
    cache("a")
    kept = fingerprint()
    values = {"switched off": ("jax_enable_compilation_cache", False)}
    values["other caches only"] = ("jax_persistent_cache_enable_xla_caches", "none")
    if how == "no folder":
        cache(None)
    elif how == "a folder nobody can write":
        (tmp_path / "file").write_text("")
        cache("file/below")
    else:
        name, value = values[how]
        before = jax.config.values[name]
        jax.config.update(name, value)
    try:
        mine = fingerprint()
        assert mine == fingerprint() != kept
        tuning._own.cache_clear()  # as another process
        assert fingerprint() != mine
    finally:
        if how in values:
            jax.config.update(name, before)


def test_other_backends_choose_nothing_by_timing(cache):
    cache("a")
    first = fingerprint()
    cache("b")
    assert fingerprint() == first
