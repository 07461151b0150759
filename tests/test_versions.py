"""The scheduler numbers its messages to a worker: the worker detects missed ones, and requests them again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from distributed import Client, LocalCluster, wait

import mission_control
from mission_control import _native, put
from mission_control.dask.scheduler import MissionControlScheduler
from mission_control.dask.worker import MissionControlWorker
from mission_control.workers import workers_of
from tests.conftest import resources, status, until


def made(seed: int) -> mission_control.Reference:
    return put([bytes([seed]) * 100_000])


def lose(messages: int, dask_scheduler: Any) -> None:
    """Drop the next messages to each worker."""
    own = dask_scheduler.plugins["mission-control"]
    left = dict.fromkeys(own.status()["workers"], messages)

    def tell(worker: str, version: int, message: dict[str, Any]) -> None:
        if left[worker] > 0:
            left[worker] -= 1
        else:
            type(own).tell(own, worker, version, message)

    own.tell = tell


def versions(client: Client) -> tuple[dict[str, int], dict[str, int]]:
    """The last version that was sent to each worker, and the last that it saw."""
    sent = {worker: own["version"] for worker, own in status(client)["workers"].items()}
    return sent, client.run(lambda dask_worker: dask_worker.plugins["mission-control"].endpoint.heard)


@pytest.mark.parametrize("messages", [1, 3])
def test_what_workers_missed_is_said_again(client, messages):
    references = client.map(made, range(6), pure=False)
    wait(references)
    assert sum(entry["objects"] for entry in resources(client).values()) == 6
    client.run_on_scheduler(lose, messages)
    # The message with the objects to free to each worker is lost.
    del references
    # Later messages arrive: their versions show that a message is missing.
    with mission_control.job("another", priority=5):
        for seed in range(2 * messages):
            wait(client.submit(made, seed, pure=False))
    until(lambda: not sum(entry["objects"] for entry in resources(client).values()), "what nobody needs is freed")
    until(lambda: len(set(map(str, versions(client)))) == 1, "all workers saw everything")
    client.run_on_scheduler(lose, 0)


def test_what_workers_saw_is_not_kept(client):
    for seed in range(20):
        wait(client.submit(made, seed, pure=False))

    def kept() -> int:
        return sum(own["unseen"] for own in status(client)["workers"].values())

    assert any(versions(client)[0].values())
    until(lambda: kept() == 0, "every worker said what it has seen")


def test_what_is_said_while_a_worker_joins_is_not_lost():
    """The answer to its join is on its way when the scheduler sends more messages, over another connection."""

    def speak_early(dask_scheduler: Any) -> None:
        own = dask_scheduler.plugins["mission-control"]
        joined = own.on_join

        async def join(worker: str, **known: Any) -> dict[str, Any]:
            answer = await joined(worker=worker, **known)
            own.event("admit", spec={"job": f"early for {worker}"}, client="nobody")
            await asyncio.sleep(0.5)  # that arrives first
            return answer

        dask_scheduler.handlers["mission_control_join"] = join
        # A later message would reveal the gap, but there is none here.
        dask_scheduler.periodic_callbacks[own.name].stop()

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(MissionControlScheduler())
        client.run_on_scheduler(speak_early)
        # The workers run already, so that they receive messages while their data planes are set up.
        client.register_plugin(MissionControlWorker())
        until(lambda: len(set(map(str, versions(client)))) == 1, "all workers saw everything")
        assert all(versions(client)[0].values())


def test_a_worker_that_dask_does_not_take_is_forgotten(client):
    """It joined before Dask refused it, and no event reports that it left."""

    def join(dask_scheduler: Any) -> bool:
        own = dask_scheduler.plugins["mission-control"]
        where = {"worker": "tcp://127.0.0.1:1", "host": "nowhere", "address": "127.0.0.1:1"}
        own.event("join", **where, environment={}, protocol=_native.PROTOCOL)
        joined = len(own.status()["workers"]) == 4
        own.began -= 31  # half a minute passes
        return joined

    assert client.run_on_scheduler(join)
    until(lambda: len(status(client)["workers"]) < 4, "it is forgotten")
    assert len(status(client)["workers"]) == 3


def test_a_worker_of_another_version_is_refused_and_works_for_dask(monkeypatch):
    """It reports the reason in one line, and so does the error of its tasks."""
    with LocalCluster(n_workers=1, dashboard_address=":0", processes=False) as cluster, Client(cluster) as client:
        mission_control.install(client)
        monkeypatch.setattr(_native, "PROTOCOL", _native.PROTOCOL - 1)
        cluster.scale(2)
        client.wait_for_workers(2)
        late = next(iter(set(workers_of(client)) - set(status(client)["workers"])))
        until(lambda: status(client)["without"], "the scheduler hears of it")
        (why,) = status(client)["without"].values()
        assert "this worker's is the older one: install the same version on both" in why and "\n" not in why
        assert client.submit(sum, [1, 2], workers=[late]).result() == 3
        with pytest.raises(RuntimeError, match=r"no data plane.*install the same version"):
            client.submit(lambda: put([b"x"]), workers=[late]).result()
