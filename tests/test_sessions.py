"""One session for each host, on a real cluster: its speaker dies, or is stopped."""

from __future__ import annotations

import os
import signal
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

import mission_control
from tests.conftest import status, until

PARTS, BYTES = 6, 300_000


def produce(index: int) -> mission_control.Reference:
    return mission_control.put([np.full(BYTES, (index * PARTS + part) % 251, np.uint8) for part in range(PARTS)])


def consume(references: list[mission_control.Reference], part: int) -> list[int]:
    parts = [np.frombuffer(entry, np.uint8) for entry in mission_control.fetch(references, part=part)]
    return [int(own[0]) if own.min() == own.max() and len(own) == BYTES else -1 for own in parts]


@pytest.fixture
def host():
    workers = {"n_workers": 4, "threads_per_worker": 1, "memory_limit": "2GiB"}
    with LocalCluster(**workers, dashboard_address=":0") as cluster, Client(cluster) as client:
        mission_control.install(client)
        yield client


def speaker(client: Client) -> str:
    """Wait for the speaker of all other workers, and return it."""

    def look() -> str | None:
        workers = status(client)["workers"]
        named = {own["speaker"] for own in workers.values() if "speaker" in own}
        spoken_for = sum("speaker" in own for own in workers.values())
        return next(iter(named)) if len(named) == 1 and named <= {*workers} and spoken_for == 3 else None

    return until(look, "one worker speaks for the other three")


def shuffle(client: Client, job: str, workers: list[str]) -> None:
    """Gather from a number of workers over TCP; check the content and the reports."""
    with mission_control.job(job, transport="tcp", client=client):
        sources = [client.submit(produce, index, workers=[own], pure=False) for index, own in enumerate(workers)]
        sinks = [
            client.submit(consume, sources, part, workers=[workers[part % len(workers)]], pure=False)
            for part in range(PARTS)
        ]
        expected = [[(index * PARTS + part) % 251 for index in range(len(workers))] for part in range(PARTS)]
        assert client.gather(sinks) == expected

        def reported() -> int:
            jobs = [own for own in status(client)["jobs"] if own["job"] == job]
            return sum(transfer["served_bytes"] for own in jobs for transfer in own["transfers"])

        until(lambda: reported() == PARTS * BYTES * len(workers), "all bytes are reported, each once")


def weighed(client: Client, workers: list[str]) -> dict[str, Any]:
    """Return the weights in force on each of these workers."""

    def weights(dask_worker: Any) -> dict[str, float]:
        return dask_worker.plugins["mission-control"].endpoint.weights()

    return client.run(weights, workers=workers)


def test_one_speaks_for_all_and_when_it_dies_another_does(host):
    pids = host.run(os.getpid)
    first = speaker(host)
    shuffle(host, "before", sorted(pids))
    os.kill(pids[first], signal.SIGKILL)
    until(lambda: first not in status(host)["workers"], "the worker is gone")
    second = speaker(host)
    assert second != first
    workers = sorted(status(host)["workers"])
    assert len(workers) == 4
    shuffle(host, "after", workers)
    until(lambda: all("after" in own for own in weighed(host, workers).values()), "all have the shares")


def test_a_speaker_that_stands_still_delays_nobody_for_long(host):
    pids = host.run(os.getpid)
    first = speaker(host)
    others = [worker for worker in pids if worker != first]
    os.kill(pids[first], signal.SIGSTOP)
    try:
        shuffle(host, "stopped", others)
        until(lambda: all("stopped" in own for own in weighed(host, others).values()), "the others have the shares")
        until(lambda: speaker(host) != first, "another speaks for the host")
        shuffle(host, "again", others)
    finally:
        os.kill(pids[first], signal.SIGCONT)
    until(lambda: "again" in weighed(host, [first])[first], "it hears what it has missed")
    shuffle(host, "all", sorted(pids))


def test_each_worker_has_a_session_of_its_own_where_that_is_wanted():
    with dask.config.set({"mission-control.host-sessions": False}):
        workers = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": "1GiB"}
        with LocalCluster(**workers, dashboard_address=":0") as cluster, Client(cluster) as client:
            mission_control.install(client)
            shuffle(client, "apart", sorted(client.run(os.getpid)))
            assert not any("speaker" in own for own in status(client)["workers"].values())
