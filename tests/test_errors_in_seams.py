"""An error of ours in every part and every callback: the programs end as on plain Dask.

Each error is raised once, where our code asks core or looks at something. Then programs of every kind run. Those
that never heard of Mission Control end with the right result; so do those that name jobs. No worker is lost, and no
task stays.
"""

from __future__ import annotations

from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.distributed import Client, LocalCluster, wait

import mission_control
from mission_control.workers import workers_of
from tests.conftest import held_by_scheduler, two_named_jobs, until
from tests.failing import break_scheduler, break_worker, mend_scheduler, mend_worker, was_raised

FRAME = pd.DataFrame({"key": np.arange(400) % 7, "value": np.arange(400)})

ON_SCHEDULER = (
    "begins",
    "carries",
    "ends",
    "far_bytes",
    "forgotten",
    "handle",
    "named_job_of",
    "next",
    "object_bytes",
    "result_gone",
    "shuffle_demands",
    "engine_refuses",
    "spec_of",
    "tasks",
    "writers",
)
"""Methods of core that our code asks on the scheduler."""
OF_OBJECTS = ("carries", "far_bytes", "object_bytes", "result_gone", "writers")
"""Those that it asks about objects: while they fail, a task that puts objects runs, too."""
ON_WORKER = (
    ("turns", "threads", "begins"),
    ("turns", "threads", "ends"),
    ("turns", "threads", "next"),
    ("turns", "threads", "ahead"),
    ("turns", "threads", "weigh"),
    ("in flight", "native", "begins"),
    ("in flight", "native", "ends"),
    ("lanes", "native", "free"),
    (None, "objects", "look"),
    (None, "objects", "ended"),
    (None, "objects", "are_used"),
    (None, "endpoint", "report"),
    (None, "endpoint", "hear"),
    (None, "inherited", "of"),
)
"""Parts of the plug-in on a worker, and what they ask."""


MORE = 10
"""How often the programs run again until the error is raised."""
KEPT = ("objects", "holds", "lost objects", "writers of streams", "numbers")
"""What core and the plug-in know of tasks and their objects."""


def inc(value: int) -> int:
    return value + 1


def total(values: list[int]) -> int:
    return sum(values)


def put(number: int) -> mission_control.Reference:
    return mission_control.put([np.full(1 << 17, number, np.uint8)])


def fetched(reference: mission_control.Reference) -> int:
    return int(np.frombuffer(mission_control.fetch(reference)[0], np.uint8).sum())


def fetched_all(references: list[mission_control.Reference]) -> int:
    return sum(map(fetched, references))


def plain(client: Client) -> None:
    """Programs that never heard of us."""
    assert client.submit(total, client.map(inc, range(60), pure=False), pure=False).result(60) == sum(range(61))
    large = client.map(np.full, [1 << 18] * 4, [1, 2, 3, 4], pure=False)
    assert client.submit(lambda *own: float(sum(one.sum() for one in own)), *large).result(60) == 10 * (1 << 18)
    shuffled = dd.from_pandas(FRAME, npartitions=4).shuffle("key", npartitions=3).compute()
    assert shuffled.sort_values("value")["value"].tolist() == FRAME["value"].tolist()
    assert set(client.gather(client.map(fails, range(3), pure=False), errors="skip")) == set()


def fails(number: int) -> None:
    raise KeyError(number)


def named(client: Client) -> None:
    """Two jobs at once, with more root tasks than places."""
    with mission_control.job("one", client=client), mission_control.job("two", client=client, priority=3):
        inner = client.map(inc, range(100), pure=False)
        with mission_control.job("three", client=client):
            more = client.map(inc, range(100), pure=False)
        # Their inputs lie on both workers.
        sums = [client.submit(total, own[at : at + 5], pure=False) for at in range(0, 100, 5) for own in (inner, more)]
        assert client.submit(total, sums, pure=False).result(60) == 2 * sum(range(101))


def objects(client: Client) -> None:
    references = client.map(put, range(1, 5), pure=False)
    assert sum(client.gather(client.map(fetched, references, pure=False))) == 10 * (1 << 17)
    # They lie on both workers, so Dask compares these.
    assert client.submit(fetched_all, references, pure=False).result(60) == 10 * (1 << 17)
    assert len(client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.workers_to_close(n=1))) == 1


def settled(client: Client, workers: list[str]) -> None:
    """No worker is lost, and no task stays."""
    until(lambda: not client.cluster.scheduler.tasks, "all tasks are gone")
    left = lambda: {name: count for name, count in held_by_scheduler(client).items() if count and name in KEPT}  # noqa: E731
    until(lambda: not left(), "no objects and no tasks are left", instead=left)
    assert workers_of(client).keys() == set(workers)


@pytest.fixture(scope="module")
def clusters() -> Any:
    """One cluster for each protocol, whose parts go off one after the other."""
    made: dict[str, tuple[LocalCluster, Client]] = {}

    def of(protocol: str) -> Client:
        if protocol not in made:
            # Over mission:// tasks wait on the workers, where jobs share threads; over tcp:// in the scheduler's queue.
            saturation = "inf" if protocol == "mission://" else 1.1
            with dask.config.set({"distributed.scheduler.worker-saturation": saturation}):
                cluster = LocalCluster(
                    n_workers=2, threads_per_worker=2, protocol=protocol, dashboard_address=":0", memory_limit="1GiB"
                )
            made[protocol] = cluster, Client(cluster, set_as_default=False)
            mission_control.install(made[protocol][1])
        return made[protocol][1]

    yield of
    for cluster, client in made.values():
        client.close()
        cluster.close()


def off(client: Client) -> list[dict[str, str]]:
    return client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins["mission-control"].off())


def test_an_error_in_what_the_scheduler_asks_core_costs_no_program_anything(clusters):
    client = clusters("tcp://")
    workers, parts, unmet = list(workers_of(client)), set(), set()
    for number, method in enumerate(ON_SCHEDULER):
        with client.as_current():
            client.run_on_scheduler(break_scheduler, method, number % 2 == 1)
            # It asks that about a shuffle that Mission Control does not carry. The scheduler is in this process.
            with dask.config.set({"mission-control.p2p": False} if method == "engine_refuses" else {}):
                plain(client)
            named(client)
            if method in OF_OBJECTS:
                objects(client)
            parts |= {own["part"] for own in off(client)}
            assert all("made by a test" in own["why"] for own in off(client)), off(client)
            # One place says what Mission Control could not do.
            assert list(client.sync(client.scheduler.mission_control_status, most=0)["off"]) == off(client)
            if not client.run_on_scheduler(mend_scheduler):
                unmet.add(method)
            objects(client)
            settled(client, workers)
    assert not unmet, "these errors were never raised"
    assert {"queue-by-job", "shuffles", "placement", "update_graph", "transition"} <= parts, parts


def test_an_error_while_a_worker_retires_costs_no_worker_and_no_object(clusters):
    client = clusters("tcp://")
    (leaves, _) = workers_of(client)
    with client.as_current():
        kept = [client.submit(put, number, workers=[leaves], allow_other_workers=True) for number in range(1, 5)]
        wait(kept)
        client.run_on_scheduler(break_scheduler, "is_handing_over", False)
        objects(client)
        client.retire_workers([leaves])
        assert client.run_on_scheduler(mend_scheduler)
        assert leaves not in workers_of(client)
        assert sum(client.gather(client.map(fetched, kept, pure=False))) == 10 * (1 << 17)
    assert "retirement" in {own["part"] for own in off(client)}


def test_an_error_on_a_worker_costs_no_program_anything(clusters):
    client = clusters("mission://")
    workers, parts, unmet = list(workers_of(client)), set(), set()
    with client.as_current(), two_named_jobs(client):
        for number, where in enumerate(ON_WORKER):
            client.run(break_worker, *where, number % 2 == 1)
            plain(client)
            named(client)
            for _ in range(MORE):
                if any(client.run(was_raised).values()):
                    break
                # On a busy machine tasks come one by one, and none waits for a thread.
                named(client)
            if where[2] == "look":
                # It is only called where something of ours is used.
                objects(client)
            parts |= {own["part"] for own in off(client)}
            if not any(client.run(mend_worker).values()):
                unmet.add(where)
            objects(client)
        settled(client, workers)
    assert not unmet, "these errors were never raised"
    assert {own["where"] for own in off(client)} == set(workers)
    assert {"threads", "lanes", "results", "messages", "transition"} <= parts, parts
