"""What a job demands holds for its tasks also where an error of ours has lost a message about them."""

from __future__ import annotations

import json
import threading
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask.distributed import Client, LocalCluster, get_worker, span, worker_client

import mission_control
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


def demands_here() -> Any:
    """Return the demands of the task that runs here, as `put` and `fetch` see them."""
    worker = get_worker()
    mission_control.put([np.zeros(1 << 17, np.uint8)])
    annotations = worker.state.tasks[worker.get_current_task()].annotations or {}
    return annotations.get(ANNOTATION, {}).get("demands")


def demands_of_a_child() -> Any:
    with worker_client() as client:
        return client.submit(demands_here, pure=False).result(WAIT_S)


def held(value: np.ndarray, gate: str) -> np.ndarray:
    """Wait, so that the shuffle stays while the test looks."""
    from distributed import Event

    assert Event(gate).wait(WAIT_S)
    return value


def test_a_shuffle_whose_registration_was_lost_is_encrypted_as_its_job_demands(cluster):
    own, client = cluster
    from distributed import Event

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
