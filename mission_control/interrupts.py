"""Interrupts that cannot get lost: Python drops an exception that is raised while it collects garbage."""

from __future__ import annotations

import signal
import threading
from types import FrameType

_asked = threading.Event()


def watch() -> None:
    """From now on an interrupt, or being told to end, raises KeyboardInterrupt, and :func:`check` knows of it.

    Said for both: a shell that starts a program in the background has had the interrupt ignored.
    """
    signal.signal(signal.SIGINT, _raise)
    signal.signal(signal.SIGTERM, _raise)


def check() -> None:
    """
    Raises:
        KeyboardInterrupt: there was one, whatever became of it.
    """
    if _asked.is_set():
        raise KeyboardInterrupt


def _raise(number: int, frame: FrameType | None) -> None:
    _asked.set()
    raise KeyboardInterrupt
