"""Incast overhead (equation 5 of paper 000): what a long minimum RTO costs a job."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from mission_control.experiments.compare import interval, values_of
from mission_control.experiments.points import Planned
from mission_control.experiments.result import Overhead, Point

SHORT_MS = 1
"""Minimum RTO that the paper compares with."""
SECONDS = "job_seconds"
MEASURE = "incast_overhead"


def incast_overhead(default_s: float, short_s: float) -> float:
    """Equation 5.

    Args:
        default_s: completion time of a job with the default minimum RTO.
        short_s: completion time with a minimum RTO of 1 ms, in the same unit.

    Returns:
        How much longer the first is, as a fraction of the second; 0 if the minimum RTO does not matter.

    Raises:
        ValueError: ``short_s`` is not above 0.
    """
    if short_s <= 0:
        raise ValueError(f"a job that takes {short_s} s: its completion time must be above 0")
    return (default_s - short_s) / short_s


def overheads(work: Sequence[Planned], points: Sequence[Point]) -> list[Overhead]:
    """Compute the overhead of each variant that differs from another, with a minimum RTO of 1 ms, in nothing else.

    Args:
        work: the planned points, which have the variants' settings.
        points: the measured points; those that do not count are left out.
    """
    here: dict[Any, dict[str, Planned]] = {}
    for one in work:
        here.setdefault(one.bare.place, {}).setdefault(one.variant.name, one)
    found = []
    for place, variants in here.items():
        measured = {(point.variant, point.repetition): point for point in points if point.place == place}
        for name, one in variants.items():
            short = next((other for other in variants.values() if is_short_of(other, one)), None)
            if short is None:
                continue
            long_s = values_of(measured, name, SECONDS)
            short_s = values_of(measured, short.variant.name, SECONDS)
            both = [at for at in long_s if at in short_s]
            if both:
                labels = one.bare.model_dump(include={"study", "world", "at"})
                medians = {
                    "job_seconds": statistics.median(long_s[at] for at in both),
                    "job_seconds_1ms": statistics.median(short_s[at] for at in both),
                }
                summary = interval([incast_overhead(long_s[at], short_s[at]) for at in both])
                labels |= {"variant": name, "to": short.variant.name, "measure": MEASURE, "unit": ""}
                found.append(Overhead(**labels, **medians, **summary))
    return found


def is_short_of(other: Planned, one: Planned) -> bool:
    """Whether ``other`` is the same with a minimum RTO of 1 ms."""
    if other.scenario.stack.rto_min != SHORT_MS or one.scenario.stack.rto_min == SHORT_MS:
        return False
    rto_min = {"rto_min": one.scenario.stack.rto_min}
    return other.scenario.model_copy(update={"stack": other.scenario.stack.model_copy(update=rto_min)}) == one.scenario
