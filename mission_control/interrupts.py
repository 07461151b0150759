"""Interrupts that cannot get lost: Python drops an exception that is raised while it collects garbage."""

from __future__ import annotations

import signal
import threading
from multiprocessing.synchronize import Event
from types import FrameType

_asked: threading.Event | Event = threading.Event()


def watch() -> None:
    """From now on an interrupt, or being told to end, raises KeyboardInterrupt, and :func:`check` knows of it.

    Said for both: a shell that starts a program in the background has had the interrupt ignored.
    """
    signal.signal(signal.SIGINT, _raise)
    signal.signal(signal.SIGTERM, _raise)


def obey(asked: Event) -> None:
    """From now on who began this process says when it is interrupted: a terminal tells all that run in it, and what is
    under way shall end once, in good order."""
    global _asked
    _asked = asked
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


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
