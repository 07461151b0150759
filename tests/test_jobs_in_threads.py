"""What a program's threads submit inside a job belongs to it, or is refused where the job demands encryption."""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, get_worker, worker_client
from distributed.worker import thread_state

import mission_control
from mission_control.dask.seams.follow import FOLLOWED, Followed
from mission_control.jobs import ANNOTATION, spec_in


def job_here(_: Any = None) -> str | None:
    """The job of the task that runs this."""
    return spec_in(get_worker().state.tasks[thread_state.key].annotations).get("job")


def in_thread(call: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(60)


@pytest.fixture
def pool() -> Any:
    """A pool whose thread is there before any job."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        yield pool


@pytest.mark.parametrize("demands", [{}, {"encrypt": "opportunistic"}, {"transport": "tcp"}])
def test_threads_that_are_started_inside_belong_to_the_job(client, demands):
    with mission_control.job("threads", client=client, **demands) as name:
        assert in_thread(lambda: client.submit(job_here, pure=False).result(60)) == name
        assert in_thread(lambda: client.gather(client.map(job_here, range(3), pure=False))) == [name] * 3
        assert in_thread(lambda: client.compute(dask.delayed(job_here)()).result(60)) == name
        assert in_thread(lambda: dask.delayed(job_here)().compute()) == name
        ones = da.ones((4,), chunks=2)
        blocks = in_thread(
            lambda: ones.map_blocks(lambda own: np.full(len(own), job_here(), object), dtype=object).compute()
        )
        assert list(blocks) == [name] * 4
    assert "_graph_to_futures" not in vars(client)
    assert client.submit(job_here, pure=False).result(60) is None


def test_the_inner_job_counts_and_the_outer_one_afterwards(client):
    with mission_control.job("outer", client=client) as outer:
        with mission_control.job("inner", client=client) as inner:
            assert in_thread(lambda: client.submit(job_here, pure=False).result(60)) == inner
        assert in_thread(lambda: client.submit(job_here, pure=False).result(60)) == outer


def test_a_thread_that_was_there_before_is_refused_where_encryption_is_demanded(client, pool):
    ran = threading.Event()

    def submits() -> Any:
        return client.submit(job_here, pure=False).result(60)

    with mission_control.job("secret", client=client, encrypt="opportunistic") as name:
        with pytest.raises(mission_control.JobRejected, match=f"job {name}, which demands encryption.*inside"):
            pool.submit(submits).result(60)
        with pytest.raises(mission_control.JobRejected):
            pool.submit(lambda: da.ones(3).sum().compute()).result(60)

        def named() -> Any:
            with mission_control.job("own", client=client) as own:
                ran.set()
                return own, submits()

        own, found = pool.submit(named).result(60)
        assert ran.is_set() and own == found
    assert pool.submit(submits).result(60) is None


def test_another_demand_is_said_aloud_once(client, pool, caplog):
    with mission_control.job("tcp-only", client=client, transport="tcp"):
        for _ in range(3):
            assert pool.submit(lambda: client.submit(job_here, pure=False).result(60)).result(60) is None
    said = [record.getMessage() for record in caplog.records if "outside job tcp-only" in record.getMessage()]
    assert len(said) == 1 and "transport tcp" in said[0]


def test_a_thread_of_somebody_else_stays_outside(client):
    """As in a server: one request is inside a job that demands encryption, and another begins."""
    begun, done = threading.Event(), threading.Event()

    def inside() -> Any:
        with mission_control.job("theirs", client=client, encrypt="opportunistic") as name:
            begun.set()
            done.wait(60)
            return name, in_thread(lambda: client.submit(job_here, pure=False).result(60))

    with ThreadPoolExecutor(1) as requests:
        request = requests.submit(inside)
        begun.wait(60)
        try:
            assert in_thread(lambda: client.submit(job_here, pure=False).result(60)) is None
        finally:
            done.set()
        name, found = request.result(60)
        assert name == found
    assert threading.Thread.start.__name__ == "start" and not hasattr(threading.Thread.start, "__wrapped__")


def test_threads_of_threads_belong_to_the_job(client):
    def submits_in_thread() -> Any:
        return in_thread(lambda: client.submit(job_here, pure=False).result(60))

    with mission_control.job("deep", client=client, encrypt="opportunistic") as name:
        assert in_thread(submits_in_thread) == name


def submits_inside(_: Any) -> tuple[str, str]:
    with worker_client() as own, mission_control.job("of-a-task", client=own, encrypt="opportunistic") as name:
        return name, own.submit(job_here, pure=False).result(60)


def submits(_: Any) -> str | None:
    with worker_client() as own:
        return own.submit(job_here, pure=False).result(60)


def test_tasks_beside_a_task_inside_a_job_are_not_refused(client):
    one = sorted(client.scheduler_info()["workers"])[0]
    inside = client.map(submits_inside, range(3), pure=False, workers=[one])
    beside = client.map(submits, range(6), pure=False, workers=[one])
    assert all(name == found for name, found in client.gather(inside))
    assert client.gather(beside) == [None] * 6


def test_jobs_of_two_clients_in_any_order_leave_no_thread_replaced(client, cluster):
    start = threading.Thread.start

    def enter_and_leave(other: Client) -> None:
        one = mission_control.job("one", client=client)
        two = mission_control.job("two", client=other)
        one.__enter__()
        two.__enter__()
        assert threading.Thread.start is not start
        one.__exit__(None, None, None)
        two.__exit__(None, None, None)
        assert threading.Thread.start is start

    with Client(cluster, set_as_default=False) as other:
        for _ in range(3):
            # Dask's annotations do not survive this order: the first job's would stay, for all later tests too.
            contextvars.copy_context().run(enter_and_leave, other)
    assert ANNOTATION not in dask.get_annotations()


def test_what_this_process_keeps_ends_with_the_job(client):
    for _ in range(3):
        with mission_control.job("again", client=client):
            pass
    assert not FOLLOWED[client].active and FOLLOWED[client].part is None


def test_an_error_of_ours_costs_the_program_nothing(client, monkeypatch):
    def fails(_: Followed) -> None:
        raise ZeroDivisionError("on purpose")

    with monkeypatch.context() as patched, mission_control.job("unlucky", client=client):
        patched.setattr(Followed, "job_of_thread", fails)
        assert in_thread(lambda: client.submit(job_here, pure=False).result(60)) is None
        assert "following" in FOLLOWED[client].parts.off
        assert client.submit(job_here, pure=False).result(60) == "unlucky"
    del FOLLOWED[client]
