"""`mission bench delegates`: chains of delegated calls beside chains of submitted tasks; k-means without a driver."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from distributed import Client

import mission_control
from mission_control.bench.interleaved import Sample, compared, cpu_of_workers
from mission_control.environment import describe
from mission_control.workloads.kmeans import KMeans, KMeansSettings
from mission_control.worlds.local import local_cluster

WORKERS = 4
POINTS, CENTRES, DIMENSIONS = 400_000, 20, 8
"""Of the k-means: iterations of some tens of milliseconds, so that what starts them shows."""


def measure(steps: int, rounds: int, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure all modes in turn; the first round warms up.

    Returns:
        ``rows``: what, mode, wall_s, cpu_s (scheduler, client and workers), spread of wall_s; ``ratios``: of medians.
    """
    modes: Mapping[str, Mapping[str, Mode]] = {
        f"a chain of {steps}": {
            "submitted, each after the last result": chain(waiting),
            "submitted at once": chain(at_once),
            "delegated": chain(delegated),
        },
        f"k-means of {POINTS} points": {"driven by the client": kmeans("client"), "delegated": kmeans("tasks")},
    }
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    with (
        local_cluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        mission_control.install(client)
        for what, calls in modes.items():
            runs = {mode: partial(sample, client, call, steps) for mode, call in calls.items()}
            found = compared(what, runs, rounds, say)
            rows += found
            medians = {row["mode"]: row["wall_s"] for row in found}
            ours = medians.pop("delegated")
            ratios |= {f"{what}: delegated / {mode}": ours / other for mode, other in medians.items()}
    return {"rows": rows, "ratios": ratios, "rounds": rounds, "environment": describe()}


Mode = Callable[[Client, int], tuple[Callable[[], object], Callable[[], None]]]
"""Prepares; gives what is measured, and what sees that its result is right."""


def sample(client: Client, mode: Mode, steps: int) -> Sample:
    """CPU time is that of the workers, and of this process: client and scheduler."""
    run, check = mode(client, steps)
    before, began = cpu_of_workers(client) + sum(os.times()[:2]), time.perf_counter()
    run()
    wall = time.perf_counter() - began
    cpu = cpu_of_workers(client) + sum(os.times()[:2]) - before
    check()
    return Sample(wall, cpu)


# --- what is compared -----------------------------------------------------------------------------------------------


def add(number: int, total: int) -> int:
    return total + number


def count_down(number: int, total: int) -> Any:
    return mission_control.delegate(count_down, number - 1, add(number, total)) if number else total


def chain(sum_up: Callable[[Client, int], int]) -> Mode:
    def prepare(client: Client, steps: int) -> tuple[Callable[[], object], Callable[[], None]]:
        totals: list[int] = []

        def check() -> None:
            if totals != [steps * (steps + 1) // 2]:
                raise RuntimeError(f"a chain of {steps} came to {totals}")

        return lambda: totals.append(sum_up(client, steps)), check

    return prepare


def waiting(client: Client, steps: int) -> int:
    total = 0
    for number in range(steps, 0, -1):
        total = client.submit(add, number, total, pure=False).result()
    return total


def at_once(client: Client, steps: int) -> int:
    total: Any = 0
    for number in range(steps, 0, -1):
        total = client.submit(add, number, total, pure=False)
    return total.result()


def delegated(client: Client, steps: int) -> int:
    return client.submit(count_down, steps, 0, pure=False).result()


def kmeans(driver: str) -> Mode:
    def prepare(client: Client, _: int) -> tuple[Callable[[], object], Callable[[], None]]:
        given: dict[str, Any] = {"points": POINTS, "k": CENTRES, "dimensions": DIMENSIONS, "driver": driver}
        job = KMeans(KMeansSettings(**given), 0, Path(), WORKERS)
        job.prepare(client, lambda _: None)

        def check() -> None:
            wrong = [name for name, holds in job.check(client, lambda _: None).items() if not holds]
            if wrong:
                raise RuntimeError(f"k-means by {driver} is wrong: {wrong}")

        return lambda: job.run(client, lambda _: None), check

    return prepare
