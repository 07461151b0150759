"""A task of this worker has returned a delegation: the scheduler runs the task again, as its next step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from distributed import Reschedule
from distributed.core import clean_exception, error_message
from distributed.utils import sync

from mission_control.delegates import Step, name_of

if TYPE_CHECKING:
    from mission_control.dask.worker import MissionControlWorker

logger = logging.getLogger(__name__)

ANSWER_WITHIN_S = 60
"""Timeout of the request in which the scheduler waits until it knows a step's inputs, which may take some seconds."""


def hand_on(plugin: MissionControlWorker, key: Any, run: int | None, message: dict[str, Any]) -> dict[str, Any]:
    """Return Dask's message that replaces the delegation as the task's result. Runs in the task's thread.

    Args:
        run: Number of the run; ``None``: nobody wants its result.
        message: Dask's message of the finished task.
    """
    worker, delegation = plugin.worker, message["result"]
    outcome: Exception = Reschedule()
    try:
        step = Step.of(delegation)
        if run is not None:
            said = {"key": key, "run": run}
            if step.inputs:
                answer = sync(
                    worker.loop,
                    worker.scheduler.mission_control_await,
                    **said,
                    inputs=step.inputs,
                    callback_timeout=ANSWER_WITHIN_S,
                )
                if "why" in answer:
                    raise RuntimeError(f"{key} delegates to {name_of(delegation.function)}, but {answer['why']}")
                if "exception" in answer:
                    # It fails like any task that depends on the failed one.
                    raise clean_exception(**answer)[1]
            plugin.objects.hand_on(key, (own[0] for own in step.objects))
            plugin.rescheduled.pop(key, None)
            # Sent before the message that the task should run again: both take the same ordered stream.
            plugin.soon(
                lambda: plugin.say("delegate", **said, call=step.call, inputs=step.inputs, objects=step.objects)
            )
    except (OSError, TimeoutError) as error:
        # The scheduler cannot be reached; Dask waits, too.
        logger.warning("%s cannot hand its result on now, and runs again: %s", key, error)
    except Exception as error:
        outcome = error
    return ended_with(outcome, message)


def ended_with(error: Exception, message: dict[str, Any]) -> dict[str, Any]:
    """Return Dask's message of a task that raised an error, from that of the same task that finished."""
    kept = {name: message[name] for name in ("start", "stop", "thread")}
    return {**error_message(error), **kept, "op": "task-erred", "actual_exception": error}
