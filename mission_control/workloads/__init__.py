"""Workloads: what a scenario computes. A new one is one file here and one line in :data:`WORKLOADS`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mission_control.workloads.frames import Frames
from mission_control.workloads.kmeans import KMeans
from mission_control.workloads.mix import Mix, Shuffle
from mission_control.workloads.sort import Sort
from mission_control.workloads.wordcount import WordCount

if TYPE_CHECKING:
    from distributed import Client

    from mission_control.scenario import Workload


class Job(Protocol):
    """One job of a workload. ``say`` is told what is being done, for people to see."""

    def prepare(self, client: Client, say: Callable[[str], None]) -> None:
        """Makes the input; not timed."""

    def run(self, client: Client, say: Callable[[str], None]) -> None:
        """Does the work; timed, inside the job's :func:`mission_control.job`."""

    def check(self, client: Client, say: Callable[[str], None]) -> dict[str, bool]:
        """Whether the result is right: name of each check, and whether it holds; not timed."""


WORKLOADS: dict[str, Callable[[Workload, int, Path, int], Any]] = {
    "sort": Sort,
    "kmeans": KMeans,
    "shuffle": Shuffle,
    "mix": Mix,
    "frames": Frames,
    "wordcount": WordCount,
}
"""By kind; made from the scenario's workload, the number of the job, a folder for its data, and the number of
workers."""
