"""Errors of ours, made by tests in the middle of Dask's own methods."""

from __future__ import annotations

from typing import Any

from mission_control import _native
from mission_control.dask import results
from mission_control.dask.seams import messages, shuffles


class Failing:
    """Stands before an object of ours. The next call of one method fails, as if core had panicked."""

    def __init__(self, inner: Any, method: str, panic: bool):
        self._inner, self._method, self._panic, self.raised = inner, method, panic, False

    def __getattr__(self, name: str) -> Any:
        if name != self._method or self.raised:
            return getattr(self._inner, name)

        def fail(*args: Any, **kwargs: Any) -> Any:
            if self.raised:
                return getattr(self._inner, name)(*args, **kwargs)
            self.raised = True
            error = _native.PanicException if self._panic else RuntimeError
            raise error(f"an error in {name}, made by a test")

        return fail

    def __bool__(self) -> bool:
        return True


def put_all_in(dask_scheduler: Any) -> None:
    """Put in again what an error has switched off on the scheduler."""
    plugin = dask_scheduler.plugins["mission-control"]
    plugin.parts.undo()
    plugin.parts.off.clear()
    plugin.queue = plugin.sends_jobs = None
    plugin.counts_objects = ()
    plugin._inherit_jobs(dask_scheduler)
    shuffles.carry_shuffles(plugin, dask_scheduler)
    if plugin.books:
        plugin._send_jobs()


def break_scheduler(method: str, panic: bool, dask_scheduler: Any) -> None:
    put_all_in(dask_scheduler)
    plugin = dask_scheduler.plugins["mission-control"]
    plugin.controller = Failing(plugin.controller, method, panic)
    # It is only asked where a job has ever demanded encryption.
    plugin.encrypts = method == "engine_refuses"


def mend_scheduler(dask_scheduler: Any) -> bool:
    """Return whether the error was raised."""
    plugin = dask_scheduler.plugins["mission-control"]
    failing = plugin.controller
    plugin.controller = failing._inner
    return failing.raised


def break_worker(part: str | None, attribute: str, method: str, panic: bool, dask_worker: Any) -> None:
    plugin = dask_worker.plugins["mission-control"]
    plugin.leave_to_dask()
    plugin.parts.undo()
    plugin.parts.off.clear()
    results.unwatch(dask_worker)
    results.PARTS.off.clear()
    results.watch(dask_worker, plugin)
    messages.name_transfers(dask_worker, plugin.parts)
    plugin.contend(True)
    if part == "in flight":
        owner = dask_worker.state.in_flight_workers
    else:
        owner = plugin if part is None else getattr(plugin, part)
    setattr(owner, attribute, Failing(getattr(owner, attribute), method, panic))
    plugin.broken = owner, attribute


def was_raised(dask_worker: Any) -> bool:
    owner, attribute = dask_worker.plugins["mission-control"].broken
    return bool(getattr(owner, attribute).raised)


def mend_worker(dask_worker: Any) -> bool:
    owner, attribute = dask_worker.plugins["mission-control"].broken
    failing = getattr(owner, attribute)
    setattr(owner, attribute, failing._inner)
    return failing.raised
