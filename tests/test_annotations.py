"""What users see in the annotations of their tasks, and which job a worker sees."""

from __future__ import annotations

from typing import Any

import dask
import pytest
from distributed import get_worker, wait

import mission_control
from mission_control.jobs import ANNOTATION
from mission_control.workers import workers_of
from tests.conftest import held_by_scheduler, until


def job_here() -> str | None:
    worker = get_worker()
    return (worker.state.tasks[worker.get_current_task()].annotations or {}).get(ANNOTATION, {}).get("job")


def annotations(client: Any, key: str) -> Any:
    return client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.tasks[key].annotations)


def test_users_find_only_their_own_annotations(client):
    plain = client.submit(job_here, pure=False)
    with dask.annotate(colour="red"):
        marked = client.submit(job_here, pure=False)
    wait([plain, marked])
    assert not annotations(client, plain.key)
    assert annotations(client, marked.key) == {"colour": "red"}
    assert plain.result() is marked.result() is None, "a program that names no job has nothing of ours on its tasks"


def test_a_worker_gets_the_job_with_the_task(client):
    with mission_control.job("annotated"):
        first = client.submit(job_here, pure=False)
        second = client.submit(lambda name: (name, job_here()), first, pure=False)
        again = client.submit(lambda: client_job(), pure=False)
    assert second.result(timeout=60) == ("annotated", "annotated")
    assert again.result(timeout=60) == "annotated"
    del first, second, again
    until(lambda: not any(held_by_scheduler(client).values()), "the scheduler forgets the tasks")


def client_job() -> str:
    """The job of a task that a task submits."""
    from distributed import worker_client

    with worker_client() as client:
        return client.submit(job_here, pure=False).result(timeout=60)


NONSENSE = ["etl", {"job": "etl", "priority": None}, {"job": 7}, {"job": "two\nlines"}, 7, object()]


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_an_annotation_that_makes_no_sense_costs_no_worker(client, nonsense):
    workers = set(workers_of(client))
    with dask.annotate(mission_control=nonsense):
        tasks = client.map(abs, range(-8, 0), pure=False)
    named = client.submit(job_here, pure=False)
    assert client.gather(tasks) == list(range(8, 0, -1))
    assert named.result(timeout=60) is None, "tasks of the same program belong to no named job"
    assert set(workers_of(client)) == workers
