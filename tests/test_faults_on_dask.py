"""Workers that die and a scheduler that stalls, under load."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from distributed import Client, LocalCluster, wait
from distributed.worker_state_machine import UpdateDataEvent

import mission_control
from tests.conftest import resources, status, until

PARTS, BYTES = 8, 200_000


def produce(index: int) -> mission_control.Reference:
    return mission_control.put([np.full(BYTES, (index * PARTS + part) % 251, np.uint8) for part in range(PARTS)])


def consume(references: list[mission_control.Reference], part: int, gate: str) -> list[int]:
    while not os.path.exists(gate):  # the test decides when the shuffle begins
        time.sleep(0.02)
    return [
        int(np.frombuffer(entry, np.uint8).sum()) // BYTES for entry in mission_control.fetch(references, part=part)
    ]


@pytest.fixture
def own_cluster():
    workers = {"n_workers": 3, "threads_per_worker": 1, "memory_limit": "2GiB"}
    with LocalCluster(**workers, dashboard_address=":0") as cluster, Client(cluster) as client:
        mission_control.install(client)
        yield client


def test_a_killed_worker_is_recomputed_though_replicas_of_its_references_survive(own_cluster, tmp_path):
    client, gate = own_cluster, tmp_path / "gate"
    with mission_control.job("survives"):
        references = client.map(produce, range(9), pure=False)
        wait(references)
        # Dask's active memory manager is on by default, and may drop any of the copies at any time.
        client.replicate(references, n=3)
        futures = [client.submit(consume, references, part, str(gate), pure=False) for part in range(PARTS)]
        until(lambda: sum(map(len, client.processing().values())) >= 3, "consumers run on every worker")
        pids = client.run(os.getpid)
        victim = next(worker for worker, resource in resources(client).items() if resource["objects"])
        os.kill(pids[victim], signal.SIGKILL)
        gate.touch()
        got = client.gather(futures)
    assert got == [[(index * PARTS + part) % 251 for index in range(9)] for part in range(PARTS)]
    (job,) = [entry for entry in status(client)["jobs"] if entry["job"] == "survives"]
    assert job["recomputed"] >= 1


def test_a_copy_that_came_too_late_does_not_stand_for_the_recomputed_result(own_cluster, tmp_path):
    """A copy of a result may still be on its way when its key is recomputed: it carries lost objects."""
    client, gate = own_cluster, tmp_path / "gate"
    gate.touch()
    reference = client.submit(produce, 1, pure=False)
    late, pids = reference.result(), client.run(os.getpid)
    os.kill(pids[late.worker], signal.SIGKILL)
    until(
        lambda: {*client.who_has(reference).get(reference.key, ())} - {late.worker}, "another worker has recomputed it"
    )
    (holder,) = client.who_has(reference)[reference.key]
    other = next(pid for pid in pids if pid not in (late.worker, holder))

    def arrive(key: str, late: mission_control.Reference, dask_worker) -> None:
        dask_worker.handle_stimulus(UpdateDataEvent(data={key: late}, stimulus_id="late"))
        dask_worker.batched_stream.send({"op": "add-keys", "keys": [key], "stimulus_id": "late"})

    client.amm.stop()  # may drop any of the copies at any time
    client.run(arrive, reference.key, late, workers=[other])
    until(lambda: other in client.who_has(reference)[reference.key], "the scheduler takes it for a copy")
    got = client.submit(consume, [reference], 0, str(gate), workers=[other], pure=False).result(timeout=30)
    assert got == [PARTS]


def test_transfers_go_on_while_the_scheduler_stalls(own_cluster, tmp_path):
    client, gate = own_cluster, tmp_path / "gate"

    def stamp(references: list[mission_control.Reference], part: int, gate: str, folder: str) -> None:
        consume(references, part, gate)
        (Path(folder) / f"done-{part}").touch()

    def stall(dask_scheduler) -> None:
        time.sleep(10)  # blocks the scheduler's only thread

    references = client.map(produce, range(9), pure=False)
    wait(references)
    futures = [client.submit(stamp, references, part, str(gate), str(tmp_path), pure=False) for part in range(3)]
    until(lambda: sum(map(len, client.processing().values())) >= 3, "receivers run on every worker")
    time.sleep(0.5)
    began = time.monotonic()
    client.loop.add_callback(client._run_on_scheduler, stall)
    time.sleep(1)
    gate.touch()
    until(lambda: len(list(tmp_path.glob("done-*"))) == 3, "all transfers end while the scheduler stalls", seconds=8)
    assert time.monotonic() - began < 10, "the scheduler was back too early for the test to say anything"
    client.gather(futures)
