"""Interrupts that are not lost: Python drops an exception that is raised during garbage collection."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    if happened():
        raise KeyboardInterrupt


def _raise(number: int, frame: FrameType | None) -> None:
    _told.set()
    # What a client and a cluster lose while they end would be logged, with tracebacks.
    logging.disable(logging.ERROR)
    raise KeyboardInterrupt


def _report(lost: Any) -> None:
    """Report an exception that Python dropped, but an interrupt: it is recorded, and :func:`check` raises it again."""
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)
