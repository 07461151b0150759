"""A retiring worker hands its objects over: nothing is recomputed, and all content stays."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from distributed import Client, LocalCluster, wait

import mission_control
from mission_control import fetch, put
from mission_control.records import records_since
from tests.conftest import status, until

PARTS, BYTES, MAPS = 4, 200_000, 12


@pytest.fixture
def client() -> Iterator[Client]:
    cluster = LocalCluster(n_workers=4, threads_per_worker=2, dashboard_address=":0", memory_limit="2GiB")
    with cluster, Client(cluster) as client:
        mission_control.install(client)
        yield client


def content(seed: int, part: int) -> bytes:
    return random.Random(f"{seed}/{part}").randbytes(BYTES)


def make(seed: int, copies: int = 1) -> mission_control.Reference:
    return put([content(seed, part) for part in range(PARTS)], copies=copies)


def digest(references: list[mission_control.Reference], part: int) -> list[str]:
    return [hashlib.sha256(own).hexdigest() for own in fetch(references, part=part)]


def expected(part: int) -> list[str]:
    return [hashlib.sha256(content(seed, part)).hexdigest() for seed in range(MAPS)]


def records(client: Client, kind: str) -> list[dict[str, Any]]:
    return [own for own in records_since(client, 0)[1] if own["kind"] == kind]


def bytes_at(client: Client) -> dict[str, int]:
    return {address: worker["object_bytes"] for address, worker in status(client)["workers"].items()}


def check(client: Client, maps: list[Any]) -> None:
    reduces = [client.submit(digest, maps, part, pure=False) for part in range(PARTS)]
    assert client.gather(reduces) == [expected(part) for part in range(PARTS)]


def test_workers_that_retire_between_map_and_reduce(client):
    maps = client.map(make, range(MAPS), pure=False)
    wait(maps)
    leaving = sorted(bytes_at(client), key=bytes_at(client).get)[-2:]
    held = sum(bytes_at(client)[worker] for worker in leaving)
    assert held > 0
    client.retire_workers(leaving)
    check(client, maps)
    assert not records(client, "recomputed") and not records(client, "not-handed-over")
    assert sum(own["bytes"] for own in records(client, "handed-over")) >= held
    # Moved objects can move again.
    client.retire_workers([max(bytes_at(client), key=bytes_at(client).get)])
    check(client, maps)
    assert not records(client, "recomputed")
    del maps
    until(lambda: status(client)["objects"] == 0, "all of it is freed")
    until(lambda: not any(bytes_at(client).values()), "wherever it lay")


def test_a_cluster_that_scales_down_by_itself(client):
    maps = client.map(make, range(MAPS), pure=False)
    wait(maps)
    client.cluster.adapt(minimum=1, maximum=4, interval="200ms", wait_count=2)
    until(lambda: len(status(client)["workers"]) <= 2, "idle workers are retired", 60)
    client.cluster.adapt(minimum=1, maximum=1)
    check(client, maps)
    assert not records(client, "recomputed")


def test_a_fetch_goes_on_while_its_source_retires(client):
    maps = client.map(make, range(MAPS), pure=False)
    wait(maps)
    leaves = max(bytes_at(client), key=bytes_at(client).get)
    ends = time.monotonic() + 6

    def fetch_on(references: list[mission_control.Reference], until: float) -> int:
        rounds = 0
        while time.monotonic() < until:
            for part in range(PARTS):
                assert digest(references, part) == expected(part)
            rounds += 1
        return rounds

    others = [worker for worker in bytes_at(client) if worker != leaves]
    readers = [client.submit(fetch_on, maps, ends, workers=[worker], pure=False) for worker in others]
    time.sleep(1)
    client.retire_workers([leaves])
    assert all(rounds > 1 for rounds in client.gather(readers))
    assert not records(client, "recomputed")


def test_a_worker_that_dies_while_it_retires(client):
    maps = client.map(make, range(MAPS), pure=False)
    wait(maps)
    leaves = max(bytes_at(client), key=bytes_at(client).get)
    (pid,) = client.run(os.getpid, workers=[leaves]).values()
    retired = threading.Thread(target=lambda: client.retire_workers([leaves]), daemon=True)
    retired.start()
    os.kill(pid, signal.SIGKILL)
    retired.join(60)
    assert not retired.is_alive()
    check(client, maps)


def test_what_shall_lie_with_several_outlives_one(client):
    maps = client.map(make, range(MAPS), copies=2, pure=False)
    wait(maps)
    until(lambda: sum(bytes_at(client).values()) == 2 * MAPS * PARTS * BYTES, "two workers have each")
    victim = max(bytes_at(client), key=bytes_at(client).get)
    (pid,) = client.run(os.getpid, workers=[victim]).values()
    # Results that nobody else has are computed again by Dask, objects or not. Its memory manager drops copies.
    client.amm.stop()
    client.replicate(maps, 4)
    os.kill(pid, signal.SIGKILL)
    until(lambda: victim not in status(client)["workers"], "it is gone")
    check(client, maps)
    assert not records(client, "recomputed")
    with pytest.raises(ValueError, match="give 1 or more"):
        client.submit(make, 0, copies=0).result()


def test_scale_down_takes_who_holds_least_and_tasks_run_where_their_objects_are(client):
    workers = sorted(bytes_at(client))
    big = client.submit(lambda: put([b"x" * 50_000_000]), workers=workers[:1], pure=False)
    small = [client.submit(lambda: put([b"y"]), workers=[worker], pure=False) for worker in workers[1:]]
    wait([big, *small])
    for left in (3, 2, 1):
        closed = client.sync(client.scheduler.workers_to_close, n=4 - left, attribute="address")
        assert workers[0] not in closed and len(closed) == 4 - left

    def where(_: Any, __: Any) -> str:
        from distributed import get_worker

        return get_worker().address

    # All workers are on one host, so all distances are equal. Both references have the same size.
    assert client.submit(where, big, small[0]).result() in workers
