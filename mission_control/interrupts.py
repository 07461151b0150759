"""Interrupts that cannot get lost: Python drops an exception that is raised while it collects garbage."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

_told = threading.Event()
_asked: Callable[[], bool] = _told.is_set
FROM_OUTSIDE = {signal.SIGINT, signal.SIGTERM}


def watch() -> None:
    """From now on an interrupt, or being told to end, raises KeyboardInterrupt, and :func:`check` knows of it.

    Said for both: a shell that starts a program in the background has had the interrupt ignored.
    """
    signal.signal(signal.SIGINT, _raise)
    signal.signal(signal.SIGTERM, _raise)


def obey(asked: Callable[[], bool]) -> None:
    """From now on who began this process says when it is interrupted: a terminal tells all that run in it, and what is
    under way shall end once, in good order. Until now signals were to be blocked (:data:`FROM_OUTSIDE`)."""
    global _asked
    _asked = asked
    for number in FROM_OUTSIDE:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FROM_OUTSIDE)


def check() -> None:
    """
    Raises:
        KeyboardInterrupt: there was one, whatever became of it.
    """
    if _asked():
        raise KeyboardInterrupt


def _raise(number: int, frame: FrameType | None) -> None:
    _told.set()
    raise KeyboardInterrupt
