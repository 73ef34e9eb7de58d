"""A signal as a question: runs ask whether they are to stop, and do so where nothing is lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def on_signal(*numbers: int) -> Iterator[Callable[[], bool]]:
    """Gives a `stop` that is true once one of these signals has come; SIGTERM and SIGINT if none is named."""
    came = threading.Event()
    numbers = numbers or (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: came.set()) for number in numbers}
    try:
        yield came.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
