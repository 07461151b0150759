"""Workers of `mission://` request the results of each job in separate messages."""

from __future__ import annotations

import os
import signal
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, Event, LocalCluster, get_worker, wait
from distributed.collections import HeapSet
from distributed.worker_state_machine import WorkerState

import mission_control
from mission_control.dask.seams.lanes import InFlight, Lane
from mission_control.workers import workers_of
from tests.conftest import two_named_jobs, until

NUMBERS, COUNT = 1 << 17, 24
"""One mebibyte each: larger than the smallest frames that use the data plane."""


@pytest.fixture
def client():
    # Dask validates its state after each step, and closes a worker whose state is inconsistent.
    options = {"threads_per_worker": 2, "processes": False, "dashboard_address": ":0", "protocol": "mission://"}
    with (
        dask.config.set({"distributed.worker.transfer.message-bytes-limit": "4MiB"}),
        LocalCluster(n_workers=3, host="127.0.0.1", validate=True, **options) as cluster,
        Client(cluster) as client,
    ):
        mission_control.install(client)
        yield client


def make(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 40, NUMBERS)


def total(arrays: list[np.ndarray]) -> int:
    return int(sum(array.sum() for array in arrays))


def messages(dask_worker: Any) -> list[tuple[str, str, list[Any]]]:
    """Peer, job and keys of requested messages."""
    entries = [entry for entry in dask_worker.state.log if entry[0] == "gather-dependencies"]
    return [(str(entry[1]), entry[1].job, sorted(entry[2])) for entry in entries]


def gather(client: Client, names: list[str]) -> None:
    """Let one task of each job gather from all workers at the same time; compare the results."""
    workers = list(workers_of(client))
    results, arrays = {}, {}
    for number, name in enumerate(names):
        with mission_control.job(name, client=client, priority=number + 1):
            seeds = range(number * COUNT, (number + 1) * COUNT)
            arrays[name] = [
                client.submit(make, seed, key=f"{name}-{seed}", workers=[workers[seed % 2]]) for seed in seeds
            ]
            wait(arrays[name])
    for name in names:
        with mission_control.job(name, client=client):
            results[name] = client.submit(total, arrays[name], key=f"total-{name}", workers=[workers[2]])
    for number, name in enumerate(names):
        seeds = range(number * COUNT, (number + 1) * COUNT)
        assert results[name].result(timeout=60) == total([make(seed) for seed in seeds])


def test_no_message_has_results_of_two_jobs_and_several_are_under_way(client):
    with two_named_jobs(client):
        client.run(watched)
        gather(client, ["a", "b", "c"])
        for state in client.run(
            lambda dask_worker: (type(dask_worker.state.in_flight_workers), len(dask_worker.state.in_flight_workers))
        ).values():
            assert state == (InFlight, 0)
    found = [own for all_ in client.run(messages).values() for own in all_]
    assert sum(len(keys) for _, _, keys in found) == 3 * COUNT
    for _, job, keys in found:
        assert {key.split("-")[0] for key in keys} == {job}
    assert {job for _, job, _ in found} == {"a", "b", "c"}
    most = max(client.run(lambda dask_worker: dask_worker.most_of_a_peer).values())
    assert 3 <= most <= 6, "each job has messages of the same peer under way"


def watched(dask_worker: Any) -> None:
    """Record the largest number of concurrent messages of one peer."""
    state = dask_worker.state
    dask_worker.most_of_a_peer = 0
    begins = state.in_flight_workers.native.begins

    class Native:
        def __getattr__(self, name: str) -> Any:
            return getattr(own, name)

        def begins(self, peer: str, job: str, number: int, nbytes: int) -> None:
            begins(peer, job, number, nbytes)
            others = sum(own == peer for own, _, _ in state.in_flight_workers)
            dask_worker.most_of_a_peer = max(dask_worker.most_of_a_peer, others + 1)

    own = state.in_flight_workers.native
    state.in_flight_workers.native = Native()


def test_a_job_at_eight_gets_most_of_a_slow_sender():
    options = {"threads_per_worker": 2, "host": "127.0.0.1", "dashboard_address": ":0", "protocol": "mission://"}
    with (
        # Two messages have more frames than a host has slots, so both jobs have waiting chunks.
        dask.config.set({"distributed.worker.transfer.message-bytes-limit": "16MiB"}),
        dask.config.set({"mission-control.send-limit": "160Mbit/s"}),
        LocalCluster(n_workers=2, memory_limit="3GiB", **options) as cluster,
        Client(cluster) as client,
    ):
        mission_control.install(client)
        one, two = workers_of(client)
        gate = Event("gate", client=client)
        arrays, results = {}, {}
        for name, priority in (("slow", 1.0), ("fast", 8.0)):
            with mission_control.job(name, client=client, priority=priority, transport="tcp"):
                arrays[name] = client.map(make, range(150), workers=[one], pure=False)
        wait([*arrays["slow"], *arrays["fast"]])
        # All become ready at the same moment, however long their submission takes.
        opened = client.submit(gate.wait, 60, workers=[one], pure=False)
        for name, priority in (("slow", 1.0), ("fast", 8.0)):
            with mission_control.job(name, client=client, priority=priority, transport="tcp"):
                results[name] = [
                    client.submit(noted_total, name, [own], opened, workers=[two], pure=False) for own in arrays[name]
                ]
        gate.set()
        for own in results.values():
            assert client.gather(own) == [total([make(seed)]) for seed in range(150)]
        (ends,) = client.run(lambda dask_worker: dask_worker.ends, workers=[two]).values()
        # In the order of their ends, which no pause changes.
        last = max(place for place, name in enumerate(ends) if name == "fast")
        slow = ends[:last].count("slow")
        # With equal shares it would be nearly all. Each time a pause between messages is longer than a message takes,
        # the other job has the sender to itself. With six busy others: 50 to 66 at 50 MB/s, 18 to 35 at 20 MB/s.
        assert slow < 90, f"{slow} of 150, when all 150 of the other were done; 19 were due"


def noted_total(name: str, arrays: list[np.ndarray], opened: bool) -> int:
    vars(get_worker()).setdefault("ends", []).append(name)
    return total(arrays)


def test_uninstall_gives_the_worker_back_as_it_was(client):
    gather(client, ["a", "b"])
    mission_control.uninstall(client)

    def kinds(dask_worker: Any) -> tuple[Any, ...]:
        state = dask_worker.state
        return type(state), type(state.in_flight_workers), {type(own) for own in state.data_needed.values()} - {HeapSet}

    assert list(client.run(kinds).values()) == [(WorkerState, dict, set())] * 3
    gather(client, ["c", "d"])


def test_a_peer_that_is_gone_ends_all_its_lanes():
    with (
        LocalCluster(
            n_workers=3, threads_per_worker=2, host="127.0.0.1", dashboard_address=":0", protocol="mission://"
        ) as cluster,
        Client(cluster) as client,
    ):
        mission_control.install(client)
        names = ["a", "b", "c", "d"]
        workers = list(workers_of(client))
        arrays, results = {}, {}
        for name in names:
            with mission_control.job(name, client=client):
                arrays[name] = client.map(make, range(40), workers=[workers[0]], allow_other_workers=True, pure=False)
                wait(arrays[name])
                results[name] = client.submit(total, arrays[name], workers=[workers[1]], pure=False)
        (pid,) = client.run(os.getpid, workers=[workers[0]]).values()
        os.kill(pid, signal.SIGKILL)
        for name in names:
            assert results[name].result(timeout=120) == total([make(seed) for seed in range(40)])
        until(
            lambda: not any(client.run(lambda dask_worker: len(dask_worker.state.in_flight_workers)).values()),
            "no message is under way",
        )


def test_a_lane_is_its_peers_address():
    one, other = Lane.to("mission://127.0.0.1:1", "a"), Lane.to("mission://127.0.0.1:1", "b")
    assert one == other == "mission://127.0.0.1:1" and len({one, other, str(one)}) == 1
