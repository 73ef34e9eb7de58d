"""The memory that a target needs and that is there."""

from __future__ import annotations

import math

from jspec.target import (
    memory,
)
from tests.target import folders
from tests.target.reading import LLAMA, refused, write


def test_what_does_not_fit_is_refused_by_name_and_before_anything_is_read(folder, no_reading):
    write(folder)
    need = sum(math.prod(shape) for shape in folders.shapes(LLAMA).values()) * 4
    refused(folder, "`tiny`", "`float32`", "0.00 GiB", "bfloat16", free=need - 1)
    assert "bfloat16, which" not in refused(folder, "`bfloat16`", dtype="bfloat16", free=need // 4)


def test_memory_that_is_there(tmp_path, monkeypatch):
    free = memory.available()
    assert free is not None and free > 1 << 26
    for name, text in (
        ("max", f"{1 << 30}\n"),
        ("current", f"{1 << 29}\n"),
        ("stat", f"anon 5\ninactive_file {1 << 20}\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(memory, "LIMITS", str(tmp_path))
    assert memory.available() == min(free, (1 << 29) + (1 << 20)) or free < 1 << 30
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._container() is None
    memory.check("x", 10**18, "float32", None)  # a device that does not tell
