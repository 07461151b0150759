"""Broadcasts on a Dask cluster: receivers serve each other, and keep objects for the next iteration."""

from __future__ import annotations

import hashlib
import os
import signal
import time
import uuid

import numpy as np
from distributed import Client, Event, LocalCluster, wait

import mission_control
from mission_control import _native
from mission_control.records import records_since
from mission_control.workers import workers_of
from tests.conftest import data, resources, status, until

BYTES = 32 << 20


def produce(seed: int) -> mission_control.Reference:
    return mission_control.put([data(BYTES, seed)])


def consume(reference: mission_control.Reference, number: int, go: str) -> str:
    assert Event(go).wait(30)
    return hashlib.sha256(mission_control.fetch(reference)[0]).hexdigest()


def broadcast(client, workers, reference, seed: int) -> None:
    """Two tasks on each worker fetch the whole object, and get it right.

    None fetches before the scheduler has all of them: what no other task wants is not kept, so a task that ended before
    the next one came would rightly leave no copy.
    """
    go = uuid.uuid4().hex
    places = [worker for worker in workers for _ in range(2)]
    tasks = [client.submit(consume, reference, n, go, pure=False, workers=[w]) for n, w in enumerate(places)]
    known = {task.key for task in tasks}
    until(lambda: known <= {key for keys in client.processing().values() for key in keys}, "all tasks are known")
    Event(go, client=client).set()
    assert set(client.gather(tasks)) == {hashlib.sha256(data(BYTES, seed)).hexdigest()}


def transfer_of(client, job: str) -> dict:
    (found,) = [entry for entry in status(client)["jobs"] if entry["job"] == job]
    asked = [transfer for transfer in found["transfers"] if transfer["asked_bytes"]]
    return asked[0] if asked else {"pattern": "unknown", "peer_bytes": 0}


def moved(client) -> int:
    return sum(resource["sent_bytes"] for resource in resources(client).values())


def test_an_object_that_all_workers_fetch_moves_once_to_each_and_stays_until_it_is_freed(client):
    owner, *readers = list(workers_of(client))
    with mission_control.job("broadcast", transport="tcp"):
        reference = client.submit(produce, 1, workers=[owner], pure=False)
        wait(reference)
        before = moved(client)
        broadcast(client, readers, reference, 1)
        assert moved(client) - before == len(readers) * BYTES, "two tasks of a worker, one copy"
        until(lambda: transfer_of(client, "broadcast")["pattern"] == "broadcast", "it is seen as one")
        broadcast(client, readers, reference, 1)
        assert moved(client) - before == len(readers) * BYTES, "the next iteration finds it where it is"
        copies = {worker: resource["copies"] for worker, resource in resources(client).items()}
        assert copies == {owner: 0, **dict.fromkeys(readers, 1)}
        del reference
        until(
            lambda: not any(resource["copies"] for resource in resources(client).values()),
            "copies go with their object",
        )
    until(
        lambda: not any(resource["live_bytes"] for resource in resources(client).values()), "all memory is given back"
    )


def test_receivers_serve_one_another(client):
    owner, *readers = list(workers_of(client))
    with mission_control.job("served", transport="tcp"):
        reference = client.submit(produce, 2, workers=[owner], pure=False)
        wait(reference)
        broadcast(client, readers, reference, 2)
        until(lambda: transfer_of(client, "served")["peer_bytes"] > 0, "some of it came from another receiver")


def gather(references: list[mission_control.Reference], part: int) -> int:
    assert Event("go").wait(30)
    return sum(int(np.frombuffer(entry, np.uint8)[0]) for entry in mission_control.fetch(references, part=part))


def split(seed: int) -> mission_control.Reference:
    return mission_control.put([np.full(3 << 20, seed + part, np.uint8) for part in range(3)])


def test_a_shuffle_whose_graph_looks_like_a_broadcast_is_none(client):
    """Every task depends on all references, but fetches only its own parts: no other task wants them, so none is
    kept."""
    with mission_control.job("shuffle", transport="tcp"):
        references = client.map(split, range(3), pure=False)
        tasks = [client.submit(gather, references, part, pure=False) for part in range(3)]
        Event("go").set()
        assert client.gather(tasks) == [3, 6, 9]
        assert not any(resource["copies"] for resource in resources(client).values())


def test_a_broadcast_whose_owner_dies_goes_on_from_a_receiver():
    """A copy of the reference is on the worker that received the object; nothing is recomputed."""
    with (
        LocalCluster(n_workers=3, threads_per_worker=2, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        mission_control.job("outlives", transport="tcp", client=client),
    ):
        mission_control.install(client)
        owner, *readers = list(workers_of(client))
        reference = client.submit(produce, 3, workers=[owner], pure=False)
        wait(reference)
        broadcast(client, readers, reference, 3)
        until(lambda: transfer_of(client, "outlives")["pattern"] == "broadcast", "it is seen as one")
        until(lambda: sum(own["copies"] for own in resources(client).values()) == 2, "it is kept")
        client.amm.stop()  # may drop any of the copies of the reference at any time
        client.replicate([reference], 3)
        time.sleep(2 * _native.REPORT_EVERY_MS / 1000)
        (pid,) = client.run(os.getpid, workers=[owner]).values()
        os.kill(pid, signal.SIGKILL)
        until(lambda: owner not in status(client)["workers"], "it is gone")
        broadcast(client, readers, reference, 3)
        _, records = records_since(client, 0)
        assert not [record for record in records if record["kind"] == "recomputed"]

        def kept() -> bool:
            return sum(own["object_bytes"] for own in status(client)["workers"].values()) == BYTES

        until(kept, "one of them has the object now")
