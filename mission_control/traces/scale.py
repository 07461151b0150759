"""Scale a trace to a smaller cluster: a window of it, faster, with fewer bytes; and measure the distortion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mission_control.errors import BadInput
from mission_control.traces.describe import HOUR_S, quantiles
from mission_control.traces.swim import QUANTITIES, TraceJob

SMALL = 1024
"""Bytes from which a shuffle is not small: a smaller one is a single packet, and does not test the sharing of a
network."""


@dataclass(frozen=True)
class ScaledJob:
    """A job to replay."""

    name: str
    submit_s: float
    """Seconds since the replay began."""
    input_bytes: int
    shuffle_bytes: int
    output_bytes: int
    before: TraceJob
    """The job as in the trace."""

    @property
    def bytes(self) -> dict[str, int]:
        """The fields as in results."""
        return {"input": self.input_bytes, "shuffle": self.shuffle_bytes, "output": self.output_bytes}


def window(jobs: Sequence[TraceJob], start_h: float, hours: float) -> list[TraceJob]:
    """Return the jobs of a window of hours.

    Raises:
        BadInput: there are none.
    """
    begin, end = start_h * HOUR_S, (start_h + hours) * HOUR_S
    found = [job for job in jobs if begin <= job.submit_s < end]
    if not found:
        last = jobs[-1].submit_s / HOUR_S
        raise BadInput(
            f"the trace has no jobs in the {hours:g} h from hour {start_h:g} on: its last is at {last:.2f} h"
        )
    return found


def scaled(jobs: Sequence[TraceJob], factor: float, speed: float, most: int, start_h: float = 0.0) -> list[ScaledJob]:
    """Return the scaled jobs to replay.

    Args:
        factor: factor of all bytes.
        speed: seconds of the trace in one second of the replay.
        most: largest bytes; input, shuffle and output of a job are each cut to this.
        start_h: hour of the trace at which the replay begins.
    """
    found = []
    for number, job in enumerate(jobs, 1):
        sizes = {quantity: min(most, round(getattr(job, quantity) * factor)) for quantity in QUANTITIES}
        at = (job.submit_s - start_h * HOUR_S) / speed
        # Names in a trace may occur twice; names of a cluster's jobs may not.
        found.append(ScaledJob(f"{number:04}-{job.name}", at, **sizes, before=job))
    return found


def distortion(jobs: Sequence[ScaledJob], factor: float, most: int) -> dict[str, Any]:
    """Describe the effects of scaling on a trace.

    Returns:
        ``factor`` of the bytes; ``jobs``; ``shuffling``: jobs that shuffle something in the trace; of these,
        ``shuffle_zero``: jobs with an empty shuffle, ``shuffle_small``: jobs with less than 1 KiB, but not 0; ``cut``:
        jobs that would have had more than ``most`` bytes, and ``cut_bytes``: the removed bytes; quantiles ``before``
        and ``after`` of input, shuffle and output bytes.
    """
    shuffling = [job for job in jobs if job.before.shuffle_bytes]
    over = [[max(0, round(getattr(job.before, quantity) * factor) - most) for quantity in QUANTITIES] for job in jobs]
    return {
        "factor": factor,
        "jobs": len(jobs),
        "shuffling": len(shuffling),
        "shuffle_zero": sum(not job.shuffle_bytes for job in shuffling),
        "shuffle_small": sum(0 < job.shuffle_bytes < SMALL for job in shuffling),
        "cut": sum(any(own) for own in over),
        "cut_bytes": sum(map(sum, over)),
        "most": most,
        "before": {name: quantiles([getattr(job.before, name) for job in jobs]) for name in QUANTITIES},
        "after": {name: quantiles([getattr(job, name) for job in jobs]) for name in QUANTITIES},
    }
