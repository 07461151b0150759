"""Statistics of a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mission_control.traces.swim import QUANTITIES, TraceJob

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
HOUR_S = 3600


def quantiles(values: Sequence[float]) -> dict[str, Any]:
    """Compute quantiles by name; each is a value that occurs. Empty if there are no values."""
    ordered = sorted(values)
    count = len(ordered)
    return {name: ordered[max(0, math.ceil(part * count) - 1)] for name, part in QUANTILES.items()} if count else {}


def per_hour(jobs: Sequence[TraceJob]) -> list[int]:
    """Count the jobs that were submitted in each hour since the first one."""
    first = jobs[0].submit_s
    counts = [0] * (int((jobs[-1].submit_s - first) // HOUR_S) + 1)
    for job in jobs:
        counts[int((job.submit_s - first) // HOUR_S)] += 1
    return counts


def describe(jobs: Sequence[TraceJob]) -> dict[str, Any]:
    """Describe a trace, as `mission trace info --json` prints it.

    Args:
        jobs: at least one, in the order of submission.

    Returns:
        ``jobs``; ``hours`` from the first to the last; ``jobs_per_hour``: for each hour; ``map_only``: jobs without a
        shuffle; and for ``input_bytes``, ``shuffle_bytes`` and ``output_bytes`` the quantiles and the ``total``.
    """
    found: dict[str, Any] = {
        "jobs": len(jobs),
        "hours": (jobs[-1].submit_s - jobs[0].submit_s) / HOUR_S,
        "jobs_per_hour": per_hour(jobs),
        "map_only": sum(not job.shuffle_bytes for job in jobs),
    }
    for quantity in QUANTITIES:
        values = [getattr(job, quantity) for job in jobs]
        found[quantity] = {**quantiles(values), "total": sum(values)}
    return found
