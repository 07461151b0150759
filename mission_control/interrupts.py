"""Interrupts that are not lost: Python drops an exception that is raised during garbage collection."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_told = threading.Event()
_asked: Callable[[], bool] = _told.is_set
FROM_OUTSIDE = {signal.SIGINT, signal.SIGTERM}


def watch() -> None:
    """Install handlers: SIGINT and SIGTERM raise KeyboardInterrupt, and are recorded for :func:`check`.

    Both need a handler, because a shell starts background programs with SIGINT ignored.
    """
    signal.signal(signal.SIGINT, _raise)
    signal.signal(signal.SIGTERM, _raise)
    sys.unraisablehook = _report


def obey(asked: Callable[[], bool]) -> None:
    """Ignore signals, so that only the parent interrupts this process: a terminal sends signals to all its processes,
    but the work should end once, in order. Before this call signals must be blocked (:data:`FROM_OUTSIDE`)."""
    global _asked
    _asked = asked
    for number in FROM_OUTSIDE:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FROM_OUTSIDE)


def check() -> None:
    """
    Raises:
        KeyboardInterrupt: there was an interrupt, even if its exception was lost.
    """
    if _asked():
        raise KeyboardInterrupt


def _raise(number: int, frame: FrameType | None) -> None:
    _told.set()
    raise KeyboardInterrupt


def _report(lost: Any) -> None:
    """Report an exception that Python dropped, but an interrupt: it is recorded, and :func:`check` raises it again."""
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)
