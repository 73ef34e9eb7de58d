"""Every hostile checkpoint ends in an error of three parts, in bounded time and memory."""

from __future__ import annotations

import pathlib
import signal
import tracemalloc
from collections.abc import Iterator

import pytest

from jspec.errors import JspecError
from jspec.target import loading
from tests.target import hostile

SECONDS = 30
BYTES = 200 << 20  # what Python and NumPy may hold at once; the checkpoints have 200 KB


@pytest.fixture
def bounded() -> Iterator[None]:
    """Ends a test that hangs, and fails one that takes much memory."""

    def late(*_: object) -> None:
        raise TimeoutError(f"no end after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", hostile.KINDS)
def test_undamaged_checkpoints_are_taken(tmp_path: pathlib.Path, kind: str) -> None:
    """So the refusals below come from the damage."""
    hostile.use(hostile.good(kind, tmp_path))


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("case", hostile.CASES, ids=lambda case: f"{case.kind}: {case.name}")
def test_hostile_checkpoints_are_refused(tmp_path: pathlib.Path, case: hostile.Hostile) -> None:
    path = hostile.good(case.kind, tmp_path)
    case.damage(path)
    with pytest.raises(JspecError) as error:
        hostile.use(path)
    refused = error.value
    assert case.told in str(refused)
    assert refused.given and refused.allowed and refused.action and str(refused).count("\n") == 2
    assert len(str(refused)) < 20_000  # names of tensors, a hundred of each fault at most


@pytest.mark.parametrize("source", ["{% for m in messages %}", hostile.LOOP])
def test_a_broken_template_leaves_plain_prompts(tmp_path: pathlib.Path, source: str) -> None:
    path = hostile.good("folder", tmp_path)
    hostile.template(source)(path)
    assert loading.load(path).tokenizer.encode("hello")


def test_there_are_many() -> None:
    assert len(hostile.CASES) >= 60
    assert all(case.told for case in hostile.CASES)
