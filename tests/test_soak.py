"""Many small jobs on one cluster: it ends with the resources that it began with."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

import mission_control
from tests.conftest import held_by_scheduler, resources, status, until

WARM = 100
"""Number of warm-up jobs: pools of threads and memory fill with the first jobs, and stay."""
MORE = 8
"""Descriptors and threads of a worker that may come on top: Dask opens another connection, or starts another thread of
a pool, when two are needed at once, which on a busy machine happens later than the warm-up. What a job leaves behind
would be hundreds."""
RSS_SLACK = 24 << 20
"""Growth by caches of Python and Dask: even without jobs Dask's workers grow by some MiB in that time."""


def put(seed: int) -> mission_control.Reference:
    return mission_control.put([np.full(100_000, seed % 251, np.uint8), b"small"])


def fetch(references: list[mission_control.Reference], part: int) -> int:
    return sum(len(entry) for entry in mission_control.fetch(references, part=part))


def one(client: Client, number: int) -> None:
    transport = ("tcp", "auto", "tls", "auto")[number % 4]
    with mission_control.job(f"soak-{number}", client=client, transport=transport):
        references = client.map(put, range(number, number + 3), pure=False)
        parts = [client.submit(fetch, references, part, pure=False) for part in range(2)]
        assert client.gather(parts) == [300_000, 15]


def held(client: Client) -> dict[str, Any]:
    """Of each worker process: descriptors, threads, memory."""

    def of_process(dask_worker: Any) -> tuple[int, int, int]:
        import os

        import psutil

        gc.collect()
        own = psutil.Process()
        return len(os.listdir("/proc/self/fd")), own.num_threads(), own.memory_info().rss

    return client.run(of_process)


def quiet(client: Client) -> bool:
    """Nothing runs, nothing is kept, and kept connections and helpers have ended."""
    idle = all(
        resource["objects"] == 0
        and resource["live_bytes"] == 0
        and resource["kept_connections"] == 0
        and resource["serving_connections"] == 0
        for resource in resources(client).values()
    )
    return idle and not status(client)["jobs"]


@pytest.mark.parametrize("jobs", (250, pytest.param(1000, marks=pytest.mark.long)))
def test_many_small_jobs_leave_nothing_behind(jobs):
    cluster = LocalCluster(n_workers=3, threads_per_worker=2, dashboard_address=":0", memory_limit="2GiB")
    with cluster, Client(cluster) as client:
        mission_control.install(client)
        for number in range(WARM):
            one(client, number)
        until(lambda: quiet(client), "the warm-up is over", seconds=60)
        before = held(client)
        for number in range(WARM, WARM + jobs):
            one(client, number)
        until(lambda: quiet(client), "all is over", seconds=60)
        # Helpers without work end by themselves.
        more = until(lambda: hardly_more(before, held(client)), "descriptors and threads come back", seconds=60)
        assert all(grown <= RSS_SLACK for grown in more["grown"].values()), more
        assert not any(held_by_scheduler(client).values()), held_by_scheduler(client)


def hardly_more(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any] | None:
    pairs = {name: (entry, after[name]) for name, entry in before.items()}
    if any(now[0] > then[0] + MORE or now[1] > then[1] + MORE for then, now in pairs.values()):
        return None
    return {"grown": {name: now[2] - then[2] for name, (then, now) in pairs.items()}}
