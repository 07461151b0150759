"""A task of this worker has returned a delegation: the scheduler has it run again, as its next step."""

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
"""For the scheduler to know a step's inputs, which it may wait for some seconds."""


def hand_on(plugin: MissionControlWorker, key: Any, run: int | None, message: dict[str, Any]) -> dict[str, Any]:
    """Return what Dask is to do in place of keeping the delegation as a result. Runs in the task's thread.

    Args:
        run: Number of the run; ``None``: nobody wants its result.
        message: Of the task that has finished, as Dask makes it.
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
                    # As if it was a task that waits for the one that has failed.
                    raise clean_exception(**answer)[1]
            plugin.objects.hand_on(key, (own[0] for own in step.objects))
            plugin.rescheduled.pop(key, None)
            # Ahead of the message that the task is to run again: both take the same ordered stream.
            plugin.soon(
                lambda: plugin.say("delegate", **said, call=step.call, inputs=step.inputs, objects=step.objects)
            )
    except (OSError, TimeoutError) as error:
        # The scheduler cannot be reached; Dask waits for it, too.
        logger.warning("%s cannot hand its result on now, and runs again: %s", key, error)
    except Exception as error:
        outcome = error
    return ended_with(outcome, message)


def ended_with(error: Exception, message: dict[str, Any]) -> dict[str, Any]:
    """Return Dask's message of a task that raised an error, from that of the same task that finished."""
    kept = {name: message[name] for name in ("start", "stop", "thread")}
    return {**error_message(error), **kept, "op": "task-erred", "actual_exception": error}
