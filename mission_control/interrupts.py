"""Interrupts that are not lost: Python drops an exception that is raised during garbage collection."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_told = threading.Event()
_asked: Callable[[], bool] = _told.is_set
_is_lost = False
"""Python dropped the exception of the last interrupt, and nobody raised it again yet."""
FROM_OUTSIDE = {signal.SIGINT, signal.SIGTERM}
AGAIN_AFTER_S = 0.05
"""From a lost exception to the next one: the garbage that was collected meanwhile is gone by then."""


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


@contextmanager
def kept_from_workers() -> Iterator[None]:
    """Start Dask workers that leave signals to this process, which ends its clusters in order.

    A terminal, and whoever signals a group, interrupts all processes. Workers would print tracebacks, and nannies would
    start them again. Signals are blocked in what begins here, until a worker has the handlers of :func:`dask_setup`.
    """
    from multiprocessing import resource_tracker

    import dask

    # Whoever starts it unblocks signals in its thread.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FROM_OUTSIDE)
    preloads = [*dask.config.get("distributed.worker.preload", ()), __name__]
    try:
        with dask.config.set({"distributed.worker.preload": preloads}):
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def dask_setup(worker: Any) -> None:
    """Dask calls this in a worker that has this module as a preload.

    A handler, because programs that tasks start would inherit that a signal is ignored or blocked.
    """
    for number in FROM_OUTSIDE:
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FROM_OUTSIDE)


def happened() -> bool:
    """Return whether there was an interrupt, even if its exception was lost."""
    return _asked()


def check() -> None:
    """
    Raises:
        KeyboardInterrupt: there was an interrupt, even if its exception was lost.
    """
    global _is_lost
    if happened():
        _is_lost = False
        raise KeyboardInterrupt


def _raise(number: int, frame: FrameType | None) -> None:
    _told.set()
    # What a client and a cluster lose while they end would be logged, with tracebacks.
    logging.disable(logging.ERROR)
    raise KeyboardInterrupt


def _report(lost: Any) -> None:
    """Report an exception that Python dropped; an interrupt is raised once more instead."""
    global _is_lost
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)
    elif threading.current_thread() is threading.main_thread():
        _is_lost = True
        # Not `threading.Thread`: the garbage may have been collected while this thread held a lock of that module.
        _thread.start_new_thread(_raise_again, ())


def _raise_again() -> None:
    global _is_lost
    time.sleep(AGAIN_AFTER_S)
    if _is_lost:
        _is_lost = False
        # A signal, because it also ends a system call in which the main thread waits.
        os.kill(os.getpid(), signal.SIGINT)
