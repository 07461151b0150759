"""Modes of one piece of work, measured in turn: what disturbs a machine disturbs all of them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from distributed import Client

from mission_control import interrupts


class Sample(NamedTuple):
    """One run of a mode."""

    wall_s: float
    cpu_s: float


def compared(
    what: str, modes: Mapping[str, Callable[[], Sample]], rounds: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Run each mode once in each round; the first round warms up.

    Returns:
        For each mode ``what``, ``mode``, medians ``wall_s`` and ``cpu_s``, and ``spread``: least and most ``wall_s``.
    """
    samples: dict[str, list[Sample]] = {mode: [] for mode in modes}
    for number in range(rounds + 1):
        say(f"{what}: {f'round {number} of {rounds}' if number else 'warm-up'}")
        for mode, call in modes.items():
            interrupts.check()
            sample = call()
            if number:
                samples[mode].append(sample)
    return [
        {
            "what": what,
            "mode": mode,
            "wall_s": statistics.median(own.wall_s for own in taken),
            "cpu_s": statistics.median(own.cpu_s for own in taken),
            "spread": [min(own.wall_s for own in taken), max(own.wall_s for own in taken)],
        }
        for mode, taken in samples.items()
    ]


def for_threads(threads: Sequence[int], measure: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Measure with workers of these numbers of threads, one after the other.

    Args:
        measure: Takes a number of threads; returns ``rows``, ``ratios`` by name, and more.

    Returns:
        The same, of all: rows have their ``threads``, and names of ratios begin with them. What is by name in another
        entry is under that name of each. One number of threads leaves the names as they are.
    """
    found = {count: measure(count) for count in threads}
    first = next(iter(found.values()))

    def named(entry: str) -> dict[str, Any]:
        if len(found) == 1:
            return first[entry]
        return {f"{count} threads, {name}": own for count, of in found.items() for name, own in of[entry].items()}

    by_name = {entry: named(entry) for entry, own in first.items() if isinstance(own, dict) and entry != "environment"}
    rows = [{"threads": count, **row} for count, own in found.items() for row in own["rows"]]
    return {**first, **by_name, "rows": rows, "threads": list(found)}


def cpu_of_workers(client: Client) -> float:
    """Seconds of CPU time that the workers have used."""
    return sum(client.run(lambda: sum(os.times()[:2])).values())
