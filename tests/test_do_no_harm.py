"""What a program gets that never heard of Mission Control: Dask's own order, and nothing of ours on its tasks."""

from __future__ import annotations

import threading
import time
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, Event, LocalCluster, span, wait, worker_client
from distributed.collections import HeapSet
from distributed.shuffle._exceptions import P2PConsistencyError
from distributed.worker_state_machine import WorkerState

import mission_control
from mission_control import frames
from mission_control.dask.scheduler import MissionControlScheduler
from mission_control.dask.seams.objects import BothDone
from mission_control.workers import workers_of
from tests.conftest import status, until

ALWAYS = {"jobs of children", "joining", "demands", "shuffles"}
"""Parts of the scheduler that are in place while nobody uses anything."""


@pytest.fixture
def client():
    with (
        LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=":0", memory_limit="1GiB") as cluster,
        Client(cluster) as client,
    ):
        mission_control.install(client)
        yield client


def plugin_of(client: Client) -> MissionControlScheduler:
    """The plug-in on the scheduler, which is in this process."""
    return client.cluster.scheduler.plugins["mission-control"]


def in_place(client: Client) -> set[str]:
    return {part.name for part in plugin_of(client).parts.installed}


def on_worker(dask_worker: Any) -> tuple[bool, bool, list[str]]:
    plugin = dask_worker.plugins["mission-control"]
    is_plain = type(dask_worker.state) is WorkerState and type(dask_worker.state.ready) is HeapSet
    return is_plain, plugin.turns is None, [part.name for part in plugin.parts.installed]


def inc(value: int) -> int:
    return value + 1


def test_until_something_is_used_nothing_of_ours_runs_for_each_task(client):
    values = client.map(inc, range(50), pure=False)
    assert client.submit(sum, values, pure=False).result() == sum(range(51))
    assert in_place(client) == ALWAYS
    assert not plugin_of(client).numbers and not plugin_of(client).books
    assert type(client.cluster.scheduler.queued) is HeapSet
    assert set(map(str, client.run(on_worker).values())) == {str((True, True, []))}


def test_what_shares_between_jobs_goes_in_with_the_second_named_job_and_out_with_it_at_full_load(client):
    """Again and again, while two other programs keep all threads busy and their results right."""
    stop, sums = threading.Event(), []

    def program() -> None:
        with Client(client.scheduler.address, set_as_default=False) as own:
            while not stop.is_set():
                values = own.map(inc, range(200), pure=False)
                sums.append(own.submit(sum, values, pure=False).result(60))

    programs = [threading.Thread(target=program) for _ in range(2)]
    for one in programs:
        one.start()
    with mission_control.job("first", client=client):
        for number in range(15):
            with mission_control.job(f"second-{number}", client=client):
                until(lambda: in_place(client) >= {"queue-by-job"}, "jobs share the queue")
                until(lambda: all(not plain for plain, _, _ in client.run(on_worker).values()), "and the threads")
            until(lambda: not in_place(client) & {"queue-by-job"}, "Dask's queue is back")
            until(lambda: all(plain for plain, _, _ in client.run(on_worker).values()), "and its threads")
    stop.set()
    for one in programs:
        one.join(60)
    assert set(sums) == {sum(range(201))} and plugin_of(client).off() == []
    until(lambda: in_place(client) == ALWAYS, "nothing of ours is left")


def started(number: int) -> float:
    now = time.time()
    time.sleep(0.02)
    return now


def test_dasks_priority_holds_between_programs_that_name_no_job(client):
    with Client(client.scheduler.address, set_as_default=False) as other:
        backlog = other.map(started, range(150), pure=False)
        urgent = client.map(started, range(8), pure=False, priority=10)
        last = max(client.gather(urgent))
        before = sum(began < last for began in other.gather(backlog))
    assert before < 30, f"{before} of 150 tasks of the backlog went before the last urgent one"


def test_a_users_priority_comes_before_the_weights_of_jobs(client):
    with mission_control.job("heavy", priority=100, client=client):
        backlog = client.map(started, range(150), pure=False)
    with mission_control.job("light", priority=1, client=client):
        urgent = client.map(started, range(8), pure=False, priority=10)
    last = max(client.gather(urgent))
    before = sum(began < last for began in client.gather(backlog))
    assert before < 30, f"{before} of 150 tasks of the heavier job went before the last urgent one"


def test_named_jobs_do_not_multiply_the_root_tasks_that_a_worker_has(client):
    scheduler, most = client.cluster.scheduler, 0
    names = [f"job-{number}" for number in range(6)]
    futures = []
    for name in names:
        with mission_control.job(name, client=client):
            futures += client.map(started, range(30), pure=False)
    while not all(future.done() for future in futures):
        most = max([most, *(len(own.processing) for own in list(scheduler.workers.values()))])
        time.sleep(0.005)
    # Two threads a worker, times Dask's saturation of 1.1, rounded up.
    assert most <= 3


def put(value: int) -> mission_control.Reference:
    return mission_control.put([np.full(100_000, value, np.uint8)])


def fetched(reference: mission_control.Reference) -> int:
    return int(np.frombuffer(mission_control.fetch(reference)[0], np.uint8).sum())


def parent(value: int) -> tuple[int, mission_control.Reference]:
    with worker_client() as client:
        child = client.submit(put, value, pure=False)
        reference = child.result()
        child.release()
        del child
        time.sleep(0.3)
        return fetched(reference), reference


def test_an_object_of_a_child_lives_as_long_as_its_parent_though_nobody_named_a_job(client):
    """The child was submitted before anything of Mission Control was used."""
    done = client.submit(parent, 3, pure=False)
    total, reference = done.result(60)
    assert total == 300_000
    assert client.submit(fetched, done, pure=False).exception(60) is not None, "it takes the reference alone"
    assert client.submit(lambda own: fetched(own[1]), done, pure=False).result(60) == 300_000
    del done, reference
    until(lambda: not plugin_of(client).controller.held()["objects"], "it is freed with its parent")


def test_a_span_names_a_job_from_its_first_graph_on(client):
    with span("nightly"):
        first = client.map(inc, range(5), pure=False)
    wait(first)
    plugin = plugin_of(client)
    assert {plugin.controller.named_job_of(plugin.numbers[own.key]) for own in first} == {"nightly"}
    with span("nightly"):
        # A span says its name itself: nothing of ours is on its tasks.
        assert client.submit(job_here, pure=False).result(60) is None
        assert client.submit(job_of_task, pure=False).result(60) == "nightly"


def test_a_shuffle_belongs_to_its_program_though_only_its_last_task_is_wanted(client):
    """It is the first thing of Mission Control that the program uses."""
    frame = pd.DataFrame({"key": np.arange(400) % 7, "value": np.arange(400)})
    done = dd.from_pandas(frame, npartitions=4).shuffle("key", npartitions=3)["value"].sum().persist()
    assert int(done.compute()) == sum(range(400))
    (job,) = [job for job in status(client)["jobs"] if job["shuffles"]]
    assert job["job"] == client.id and [own["engine"] for own in job["shuffles"]] == ["mission"]


def job_of_task() -> str:
    from distributed import get_worker

    from mission_control.objects import current_task

    return current_task(get_worker()).job


def job_here() -> Any:
    from distributed import get_worker

    worker = get_worker()
    annotations = worker.state.tasks[worker.get_current_task()].annotations or {}
    return annotations.get("mission_control")


def test_an_operator_names_a_job_by_changing_it(client):
    gate = Event("gate", client=client)
    before = client.submit(gate.wait, 60, pure=False)
    until(lambda: [job["job"] for job in status(client)["jobs"]] == [client.id], "somebody looks, and sees the program")
    changed = client.sync(client.scheduler.mission_control_change, job=client.id, transport=None, priority=5.0)
    assert changed == {"error": None, "refused": None}
    assert client.submit(job_here, pure=False).result(60) == {"job": client.id, "priority": 5.0}
    gate.set()
    assert before.result(60)


class Raises:
    """Stands before core, one of whose methods fails."""

    def __init__(self, inner: Any, method: str):
        self.inner, self.method = inner, method

    def __getattr__(self, name: str) -> Any:
        if name == self.method:
            raise RuntimeError("made by a test")
        return getattr(self.inner, name)


def test_a_shuffle_that_demands_encryption_is_refused_if_an_error_keeps_us_from_carrying_it(client):
    security = dask.config.get("distributed.comm.require-encryption")
    assert not security
    plugin = plugin_of(client)

    def shuffle(seed: int) -> Any:
        """Shuffle other rows, so tasks of other keys: a task that a worker still runs for a program that failed would
        otherwise answer for the task of the next program (Dask takes up a cancelled task again)."""
        frame = pd.DataFrame({"key": range(40), "value": range(seed, seed + 40)})
        return dd.from_pandas(frame, npartitions=4).shuffle("key", npartitions=3).compute()

    with mission_control.job("secret", encrypt="opportunistic", client=client):
        assert len(shuffle(0)) == 40, "Mission Control carries it"
        plugin.controller = Raises(plugin.controller, "shuffle_demands")
        # This one, and the next, when the part is off.
        for seed in (1, 2):
            with pytest.raises(P2PConsistencyError, match="encrypt"):
                shuffle(seed)
    plugin.controller = plugin.controller.inner
    assert {own["part"] for own in plugin.off()} == {"shuffles"}
    with (
        pytest.raises(mission_control.JobRejected, match="shuffles of the scheduler is off"),
        mission_control.job("another", encrypt="opportunistic", client=client),
    ):
        pass
    assert len(shuffle(3)) == 40, "who demands nothing has Dask's own"


def delegates() -> mission_control.Delegation:
    return mission_control.delegate(inc, 41)


def test_the_first_delegation_costs_no_worker_that_has_no_plug_in():
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", memory_limit="1GiB") as cluster,
        Client(cluster) as client,
    ):
        # As with a preloaded scheduler, and one worker that was preloaded.
        client.register_plugin(MissionControlScheduler())
        one, other = workers_of(client)
        client.run(mission_control.jobs._add_to_worker, workers=[one])
        assert client.submit(delegates, workers=[one], pure=False).result(60) == 42
        assert client.submit(inc, 1, workers=[other], pure=False).result(60) == 2
        assert set(workers_of(client)) == {one, other}


def test_a_shuffle_right_after_a_restart_is_carried(client):
    frame = pd.DataFrame({"key": range(40), "any": [({"a": 1}, (1, "x"), 2.5)[at % 3] for at in range(40)]})
    for _ in range(2):
        with dask.config.set({"dataframe.convert-string": False}):
            lazy = dd.from_pandas(frame, npartitions=4).shuffle("key", npartitions=3)
            client.restart(timeout=60)
            done = lazy.persist()
            got = done.compute()
        assert sorted(got["any"].map(repr)) == sorted(frame["any"].map(repr))
        assert [own["engine"] for job in status(client)["jobs"] for own in job["shuffles"]] == ["mission"]
        del done, got


def test_an_output_without_parts_has_no_rows_though_the_example_frame_has_one():
    """Dask's frames for types have a row where categories were made known (dask/dask issue 11572)."""
    example = pd.DataFrame({"grade": pd.Categorical(["UNKNOWN"]), "n": [1]})
    joined = frames.decode(None, [], example)  # type: ignore[arg-type]
    assert len(joined) == 0 and (joined.dtypes == example.dtypes).all()


def test_a_worker_that_never_held_an_object_retires_by_dasks_own_rule():
    class Policy:
        no_recipients = False

        def done(self) -> bool:
            return True

    held, policy = [False], Policy()
    both = BothDone(policy, None, lambda: held[0], lambda: True)
    assert both.done()
    held[0] = True
    assert not both.done(), "others take its objects first"
    held[0] = False
    assert not both.done(), "and what held one once waits until they are elsewhere"
