"""A worker gets a task again, with other inputs than those that it knows.

Dask's tasks never change their inputs, so its worker only adds inputs. A task that delegates has other inputs with each
step; without this a task that the worker still knows would wait for all its earlier inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Any

from distributed import Worker
from distributed.worker_state_machine import FreeKeysEvent

from mission_control.dask.seams.seam import Parts, Seam

GIVEN = ("ready", "constrained", "waiting", "executing", "long-running")
"""States of a task in which Dask's worker ignores a new assignment."""


COMPUTE = Seam(
    "Worker.stream_handlers",
    "compute-task",
    "makes a step of a task forget the inputs of earlier steps",
    when="once a task has delegated",
)


def watch(worker: Worker, parts: Parts) -> None:
    """Handle each task that a worker gets, before Dask does. Only where tasks delegate."""
    part = parts.part("steps", "a task that delegates may wait for inputs of its earlier steps")

    def with_these_inputs(handler: Callable[..., Any], *, key: Any, nbytes: dict[Any, int], **given: Any) -> None:
        if key in worker.state.tasks:
            forget_inputs(worker, key, nbytes)
        handler(key=key, nbytes=nbytes, **given)

    part.replace(COMPUTE, worker.stream_handlers, with_these_inputs)


def forget_inputs(worker: Worker, key: Any, inputs: Container[Any]) -> None:
    """Make a task that does not run any more depend only on these."""
    task = worker.state.tasks[key]
    if task.state in GIVEN:
        return
    unneeded = []
    for own in [own for own in task.dependencies if own.key not in inputs]:
        task.dependencies.discard(own)
        task.waiting_for_data.discard(own)
        own.dependents.discard(task)
        own.waiters.discard(task)
        # The scheduler frees results that are here, but it does not know of those that were on their way.
        if not own.waiters and own.state in ("fetch", "flight", "missing"):
            unneeded.append(own.key)
    if unneeded:
        worker.handle_stimulus(FreeKeysEvent(keys=unneeded, stimulus_id=f"mission-control-changed-{time.time()}"))
