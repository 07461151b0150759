"""Modes of one piece of work, measured in turn: what disturbs a machine disturbs all of them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from distributed import Client


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


def cpu_of_workers(client: Client) -> float:
    """Seconds of CPU time that the workers have used."""
    return sum(client.run(lambda: sum(os.times()[:2])).values())
