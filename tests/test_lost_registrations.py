"""What a job demands holds for its tasks also where an error of ours has lost a message about them."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask.distributed import (
    Client,
    Event,
    Future,
    LocalCluster,
    Variable,
    fire_and_forget,
    get_worker,
    span,
    worker_client,
)
from distributed import Scheduler, Worker

import mission_control
from mission_control import _native
from mission_control.dask.scheduler import MissionControlScheduler
from mission_control.dask.worker import MissionControlWorker
from mission_control.jobs import ANNOTATION
from tests.conftest import until
from tests.failing import Failing, put_all_in

ENCRYPTED = {"encrypt": "opportunistic", "transport": None}
WAIT_S = 60


class NoText:
    """Raises where somebody wants to print it."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


class NoDict(dict):
    """Raises where somebody looks into it."""

    def get(self, *args: Any) -> Any:
        raise RuntimeError("no such method")


@pytest.fixture(scope="module")
def module_cluster() -> Any:
    with (
        LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=":0", memory_limit="1GiB") as own,
        Client(own, set_as_default=False) as client,
    ):
        mission_control.install(client)
        yield own, client


@pytest.fixture
def cluster(module_cluster) -> Any:
    own, client = module_cluster
    with client.as_current():
        yield own, client
    plugin = plugin_of(own)
    if isinstance(plugin.controller, Failing):
        plugin.controller = plugin.controller._inner
    plugin.parts.faults.clear()
    plugin.off_at.clear()
    put_all_in(own.scheduler)
    if plugin.books:
        plugin._send_jobs()


def plugin_of(cluster: LocalCluster) -> Any:
    return cluster.scheduler.plugins["mission-control"]


def runs(cluster: LocalCluster, key: Any) -> bool:
    task = cluster.scheduler.tasks.get(key)
    return task is not None and task.state == "processing"


def demands_here() -> Any:
    """Return the demands of the task that runs here, as `put` and `fetch` see them."""
    worker = get_worker()
    mission_control.put([np.zeros(1 << 17, np.uint8)])
    annotations = worker.state.tasks[worker.get_current_task()].annotations or {}
    return annotations.get(ANNOTATION, {}).get("demands")


def demands_of_a_child(gate: str | None = None) -> Any:
    assert gate is None or Event(gate).wait(WAIT_S)
    with worker_client() as client:
        return client.submit(demands_here, pure=False).result(WAIT_S)


def say_demands_of_a_child(gate: str, said: str) -> None:
    with worker_client() as client:
        assert Event(gate, client).wait(WAIT_S)
        Variable(said, client).set(client.submit(demands_here, pure=False).result(WAIT_S))


def continued(said: str) -> int:
    with worker_client() as client, span("next"):
        own = Future(get_worker().get_current_task(), client)
        fire_and_forget(client.submit(say_one_more, own, said, pure=False))
    return 1


def say_one_more(value: int, said: str) -> None:
    with worker_client() as client:
        Variable(said, client).set(value + 1)


def put_later(gate: str) -> mission_control.Reference:
    assert Event(gate).wait(WAIT_S)
    return mission_control.put([np.full(1 << 17, 7, np.uint8)])


def fetched(reference: mission_control.Reference) -> int:
    return int(np.frombuffer(mission_control.fetch(reference)[0], np.uint8).sum())


def held(value: np.ndarray, gate: str) -> np.ndarray:
    """Wait, so that the shuffle stays while the test looks."""
    assert Event(gate).wait(WAIT_S)
    return value


def test_a_shuffle_whose_registration_was_lost_is_encrypted_as_its_job_demands(cluster):
    own, client = cluster
    array = np.arange(3600.0).reshape(60, 60)
    gate = Event("looked", client)
    with mission_control.job("secret", encrypt="opportunistic", client=client):
        plugin = plugin_of(own)
        plugin.controller = failing = Failing(plugin.controller, "tasks", False)
        chunks = (
            da.from_array(array, chunks=(10, 60))
            .rechunk((60, 10), method="p2p")
            .map_blocks(held, "looked", dtype=float, meta=np.empty((0, 0)))
        )
        future = client.compute(chunks, optimize_graph=False)
        active = own.scheduler.plugins["shuffle"].active_shuffles
        until(lambda: active or future.status == "error", "the shuffle begins")
        assert failing.raised
        (run,) = active.values()
        assert json.loads(run.run_spec.spec.demands)["encrypt"] == "opportunistic"
        gate.set()
        assert np.array_equal(future.result(WAIT_S), array)


@pytest.mark.parametrize("method", ["begins", "spec_of", "tasks", "named_job_of"])
def test_children_keep_their_demands_after_an_error_in_what_tells_workers_the_jobs(cluster, method):
    own, client = cluster
    with mission_control.job("secret", encrypt="opportunistic", client=client):
        before = client.submit(demands_of_a_child, pure=False).result(WAIT_S)
        assert before == ENCRYPTED
        plugin = plugin_of(own)
        plugin.controller = failing = Failing(plugin.controller, method, True)
        assert client.submit(abs, -1, pure=False).result(WAIT_S) == 1
        assert client.submit(demands_of_a_child, pure=False).result(WAIT_S) == before
        assert failing.raised


@pytest.mark.parametrize("method", ["begins", "spec_of", "named_job_of"])
def test_the_child_whose_message_meets_the_error_keeps_its_demands(cluster, method):
    own, client = cluster
    gate = Event(f"broken-{method}", client)
    with mission_control.job("secret", encrypt="opportunistic", client=client):
        parent = client.submit(demands_of_a_child, gate.name, pure=False)
        until(lambda: runs(own, parent.key), "the parent runs")
        plugin = plugin_of(own)
        plugin.controller = failing = Failing(plugin.controller, method, False)
        gate.set()
        assert parent.result(WAIT_S) == ENCRYPTED
        assert failing.raised


def test_what_the_thread_of_a_forgotten_task_submits_keeps_the_demands_of_its_job(cluster):
    own, client = cluster
    gate, said = Event("forgotten", client), Variable("said", client)
    with mission_control.job("secret", encrypt="opportunistic", client=client):
        parent = client.submit(say_demands_of_a_child, gate.name, said.name, pure=False)
        until(lambda: runs(own, parent.key), "the parent runs")
        key = parent.key
        parent.release()
        until(lambda: key not in own.scheduler.tasks, "the scheduler has forgotten it")
        gate.set()
        assert said.get(WAIT_S) == ENCRYPTED


def test_a_task_that_submits_its_own_continuation_in_a_span_is_known(cluster):
    own, client = cluster
    said = Variable("after", client)
    # The span is the first name, while no books are kept.
    plugin_of(own).looked_at = -math.inf
    until(lambda: not plugin_of(own).books, "nothing is named or used any more")
    # Kept: if it were released before the scheduler hears of the task that follows it, Dask would cancel that.
    first = client.submit(continued, said.name, pure=False)
    assert first.result(WAIT_S) == 1
    assert said.get(WAIT_S) == 2
    assert plugin_of(own).off() == []


def test_a_task_that_only_a_variable_with_an_odd_name_holds_keeps_its_objects(cluster):
    own, client = cluster
    gate = Event("held", client)
    task = client.submit(put_later, gate.name, pure=False)
    variable = Variable("a\nb" + "c" * 300, client)
    variable.set(task)
    del task
    until(lambda: any("put_later" in str(key) for key in own.scheduler.tasks), "it is there")
    gate.set()
    assert client.submit(fetched, variable.get(WAIT_S), pure=False).result(WAIT_S) == 7 << 17
    assert plugin_of(own).off() == []
    variable.delete()


def test_what_nobody_can_read_of_an_annotation_switches_nothing_off(cluster):
    own, client = cluster
    # Somebody looks, so that also tasks that named no job are registered.
    client.sync(client.scheduler.mission_control_status)
    for odd in ({"job": NoText()}, {"demands": {"encrypt": NoText()}}, NoDict(job="x"), {"job": "\ud800"}, NoText()):
        with dask.annotate(**{ANNOTATION: odd}):
            assert client.submit(abs, -1, pure=False).result(WAIT_S) == 1
    assert plugin_of(own).off() == []
    with span("\ud800"), mission_control.job("secret", encrypt="opportunistic", client=client):
        pass
    with mission_control.job("secret", encrypt="opportunistic", client=client):
        assert client.submit(demands_of_a_child, pure=False).result(WAIT_S) == ENCRYPTED


def test_a_worker_says_what_is_off_within_bounds_and_not_of_the_scheduler(cluster):
    own, client = cluster
    plugin = plugin_of(own)
    worker = next(iter(own.scheduler.workers))
    plugin.on_off(worker, "transition", "a lost event of that worker")
    for number in range(1000):
        plugin.on_off(worker, f"part {number}" * 1000, "x" * 10_000)
    assert len(plugin.off()) < 100 and len(json.dumps(plugin.off())) < 100_000
    with mission_control.job("secret", encrypt="opportunistic", client=client):
        assert client.submit(demands_of_a_child, pure=False).result(WAIT_S) == ENCRYPTED


def test_a_job_that_demands_encryption_is_refused_where_threads_cannot_be_followed(cluster, monkeypatch):
    _, client = cluster
    from mission_control.dask.seams.follow import STARTS

    monkeypatch.setitem(STARTS.parts.off, "following", "an error made by a test")
    with (
        pytest.raises(mission_control.JobRejected, match="made by a test"),
        mission_control.job("secret", encrypt="opportunistic", client=client),
    ):
        pass
    with mission_control.job("open", client=client):
        assert client.submit(abs, -1, pure=False).result(WAIT_S) == 1
    assert threading.Thread.start.__qualname__ == "Thread.start"


def test_a_worker_without_descriptors_for_news_reports_all_the_same(monkeypatch):
    def refused(*args: Any) -> None:
        raise OSError(24, "Too many open files")

    async def reports() -> int:
        async with (
            Scheduler(dashboard_address=":0", port=0) as scheduler,
            Worker(scheduler.address) as worker,
            Client(scheduler.address, asynchronous=True) as client,
        ):
            monkeypatch.setattr(MissionControlWorker, "listen_for_news", refused)
            await client.register_plugin(MissionControlScheduler())
            await client.register_plugin(MissionControlWorker())
            monkeypatch.undo()
            own = worker.plugins["mission-control"]
            assert own.news is None and worker.status.name == "running"
            return own.worker.periodic_callbacks["mission-control"].callback_time

    assert asyncio.run(reports()) == _native.REPORT_EVERY_MS
