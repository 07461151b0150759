"""200 workers connect, and one of them gathers from all others: flows stay bounded, and none times out (`make long`).

    python -m tests.many_workers [--workers 200]

The workers share a process, but each has its own listener, connections, and data plane.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from typing import Any

import dask
import numpy as np
from distributed import Client, LocalCluster, wait

import mission_control
from mission_control import _native
from mission_control.workers import workers_of
from tests.conftest import status, until

NBYTES = 1 << 20
ROUNDS = 3
WITHIN_S = 600.0


def make(number: int, repetition: int) -> np.ndarray:
    return np.full(NBYTES, (number + repetition) % 251, dtype=np.uint8)


def total(arrays: list[np.ndarray]) -> list[int]:
    return [int(array.sum()) for array in arrays]


def gather(client: Client, workers: list[str], repetition: int) -> float:
    """Return the seconds until the first worker has the results of all."""
    values = [client.submit(make, n, repetition, workers=[own], pure=False) for n, own in enumerate(workers)]
    wait(values, timeout=WITHIN_S)
    began = time.monotonic()
    totals = client.submit(total, values, workers=workers[:1], pure=False).result(timeout=WITHIN_S)
    assert totals == [NBYTES * ((n + repetition) % 251) for n in range(len(workers))]
    return time.monotonic() - began


def gathers(client: Client) -> list[dict[str, Any]]:
    jobs = (job for job in status(client)["jobs"] if job["job"] == "gather")
    return [own for job in jobs for own in job["transfers"] if (own["from"], own["to"]) == ("make", "gather")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=200)
    count = parser.parse_args().workers
    logging.getLogger("distributed").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {
        "distributed.worker.profile.enabled": False,
        "distributed.admin.tick.interval": "10s",
        "distributed.admin.system-monitor.interval": "10s",
    }
    began = time.monotonic()
    options = {"n_workers": count, "threads_per_worker": 1, "memory_limit": "2GiB", "dashboard_address": ":0"}
    with (
        dask.config.set(quiet),
        LocalCluster(processes=False, protocol="mission://", **options) as cluster,
        Client(cluster) as client,
    ):
        print(f"{count} workers after {time.monotonic() - began:.1f} s", flush=True)
        began = time.monotonic()
        mission_control.install(client)
        until(lambda: len(status(client)["workers"]) == count, "all have a data plane", WITHIN_S)
        print(f"all with a data plane after {time.monotonic() - began:.1f} s", flush=True)
        workers = list(workers_of(client))
        assert len(workers) == count
        with mission_control.job("gather", transport="tcp", client=client):
            for repetition in range(ROUNDS):
                print(f"gathered {count} MiB in {gather(client, workers, repetition):.1f} s", flush=True)
            wanted = ROUNDS * (count - 1) * NBYTES
            until(lambda: sum(own["asked_bytes"] for own in gathers(client)) >= wanted, "all is reported", WITHIN_S)
            (own,) = gathers(client)
            print(f"at most {own['flows_peak']} flows; asked again: {own['refetches']}; {own['transport']}")
            assert own["flows_peak"] <= _native.FLOWS_PER_HOST and not own["refetches"]
    return 0


if __name__ == "__main__":
    sys.exit(main())
