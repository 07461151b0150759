"""`mission bench retirement`: until another worker has the objects of one that retires, beside a fetch of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from mission_control import fetch, job, put
from mission_control.environment import describe
from mission_control.objects import Reference
from mission_control.records import records_since
from mission_control.workers import workers_of
from mission_control.worlds.local import local_cluster

FETCH, RETIRE = "a task fetches all of it", "the worker retires, and the other one has it"
PARTS = 4
SETTLE_S = 0.05


def fill(nbytes: int, seed: int) -> Reference:
    """Puts an object of some parts that are not alike."""
    import numpy as np

    part = np.random.default_rng(seed).integers(0, 256, nbytes // PARTS, np.uint8)
    return put([part.data] * PARTS)


def count(references: list[Reference]) -> int:
    """Fetches all; gives the bytes."""
    return sum(map(len, fetch(references)))


def measure(
    size: int = 1 << 30, objects: int = 64, rounds: int = 3, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measures both, in turn, over tcp between two workers of one host.

    Args:
        size: of all objects, in bytes.
        objects: how many.

    Returns:
        ``rows``: what, seconds (median), spread, recomputed (tasks that ran again); ``ratios``: of medians.
    """
    from distributed import Client, wait

    import mission_control

    samples: dict[str, list[float]] = {FETCH: [], RETIRE: []}
    recomputed = 0
    for number in range(rounds):
        # A cluster of its own: Dask does not start a worker again that retired.
        with (
            local_cluster(n_workers=2, threads_per_worker=2, dashboard_address=None, memory_limit="8GiB") as cluster,
            Client(cluster) as client,
        ):
            mission_control.install(client)
            say(f"round {number + 1} of {rounds}: {objects} objects")
            one, other = workers_of(client)
            with job(f"retirement-{number}", transport="tcp", client=client):
                made = client.map(partial(fill, size // objects), range(objects), workers=[one], pure=False)
                wait(made)
                began = time.perf_counter()
                got = client.submit(count, made, workers=[other], pure=False).result()
                samples[FETCH].append(time.perf_counter() - began)
                assert got == size // objects // PARTS * PARTS * objects
                time.sleep(SETTLE_S)
                say(f"round {number + 1} of {rounds}: retires")
                began = time.perf_counter()
                client.retire_workers([one])
                samples[RETIRE].append(time.perf_counter() - began)
                assert client.submit(count, made, pure=False).result() == got
                _, records = records_since(client, 0)
                recomputed += sum(record["kind"] == "recomputed" for record in records)
                del made
    rows: list[dict[str, Any]] = [
        {"what": what, "seconds": statistics.median(taken), "spread": [min(taken), max(taken)]}
        for what, taken in samples.items()
    ]
    ratio = rows[1]["seconds"] / rows[0]["seconds"]
    return {
        "rows": rows,
        "recomputed": recomputed,
        "ratios": {f"{RETIRE} / {FETCH}": ratio},
        "environment": describe(),
    }
