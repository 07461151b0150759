"""Tasks release their threads while they wait for the network, and run in turn: nothing waits for ever."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster, get_worker, rejoin, secede, wait, worker_client
from distributed.collections import HeapSet
from distributed.worker_state_machine import WorkerState

import mission_control
from mission_control import fetch, job, put
from mission_control.dask.seams.by_job import ByJob
from mission_control.dask.seams.seam import Parts
from mission_control.dask.seams.turns import Turns
from tests.conftest import two_named_jobs, until

LOCK = threading.Lock()
BEGAN: list[str] = []
ENDED: list[str] = []


def cluster(threads: int) -> Iterator[Client]:
    with (
        LocalCluster(n_workers=1, threads_per_worker=threads, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        mission_control.install(client)
        with two_named_jobs(client):
            yield client


@pytest.fixture
def client() -> Iterator[Client]:
    # A single thread is not shared by default.
    with dask.config.set({"mission-control.lend-threads": True}):
        yield from cluster(1)


def turns_of(client: Client) -> Turns:
    (worker,) = client.cluster.workers.values()
    return worker.plugins["mission-control"].turns


def make(seed: int) -> mission_control.Reference:
    return put([bytes([seed]) * 100_000])


def wait_as_for_the_network(seconds: float) -> None:
    with get_worker().plugins["mission-control"].turns.thread_released():
        time.sleep(seconds)


def waits(number: int) -> int:
    BEGAN.append("begins")
    wait_as_for_the_network(0.3)
    BEGAN.append("goes on")
    return number


def test_a_thread_is_lent_while_a_task_waits_for_the_network():
    BEGAN.clear()
    # Root tasks wait in the scheduler, which does not know of released threads; these tasks do not.
    without = {"distributed.scheduler.worker-saturation": float("inf"), "mission-control.lend-threads": True}
    with dask.config.set(without):
        for client in cluster(1):
            assert client.gather(client.map(waits, range(8), pure=False)) == list(range(8))
            # The number that may have released their threads (three for each), and one more.
            assert BEGAN.index("goes on") in (3, 4) and BEGAN.count("goes on") == 8
            assert len(turns_of(client).threads) == 0


def holds_a_lock(reference: mission_control.Reference) -> bytes:
    with LOCK:
        wait_as_for_the_network(0.1)
        return bytes(fetch(reference)[0])


def test_tasks_that_wait_for_one_another_end(client):
    """A task that waits for its turn holds a lock, and the task on its thread waits for that."""
    made = client.map(make, range(3))
    assert client.gather(client.map(holds_a_lock, made)) == [bytes([seed]) * 100_000 for seed in range(3)]


def leaves(reference: mission_control.Reference) -> bytes:
    own = get_worker().plugins["mission-control"].turns
    secede()
    assert own.own.released, "it counts no more"
    first = bytes(fetch(reference)[0])
    rejoin()
    assert not own.own.released and len(own.threads) >= 1, "it counts again"
    assert bytes(fetch(reference)[0]) == first
    return first


def submits(depth: int) -> int:
    if depth == 0:
        return len(fetch(make(7))[0])
    with worker_client() as own:
        return own.submit(submits, depth - 1, pure=False).result()


def test_tasks_that_leave_the_pool_and_come_back(client):
    made = client.map(make, range(5))
    assert client.gather(client.map(leaves, made)) == [bytes([seed]) * 100_000 for seed in range(5)]
    assert client.gather([client.submit(submits, 4, pure=False) for _ in range(3)]) == [100_000] * 3
    assert len(turns_of(client).threads) == 0


def works(name: str, _: int) -> None:
    time.sleep(0.02)
    ENDED.append(name)


def test_a_job_does_not_wait_for_the_root_tasks_of_another(client):
    ENDED.clear()
    with job("first", client=client):
        first = client.map(works, ["first"] * 60, range(60), pure=False)
        with job("second", client=client):
            second = client.map(works, ["second"] * 10, range(10), pure=False)
        wait(first + second)
    # In Dask's own order all tasks of the first job come before.
    begins = ENDED.index("second")
    assert begins < 30, ENDED
    assert "first" in ENDED[begins : begins + 10], "the first goes on, too"


@pytest.mark.parametrize("part", ["lend-threads", "order-tasks", "queue-by-job"])
def test_each_part_can_be_turned_off(part):
    with dask.config.set({f"mission-control.{part}": False}):
        for client in cluster(2):
            (worker,) = client.cluster.workers.values()
            off = {
                "lend-threads": lambda worker=worker: type(worker.state) is WorkerState,
                "order-tasks": lambda worker=worker: type(worker.state.ready) is HeapSet,
                "queue-by-job": lambda client=client: type(client.cluster.scheduler.queued) is HeapSet,
            }
            until(lambda off=off: [name for name, is_off in off.items() if is_off()] == [part], "all others are on")
            assert client.submit(submits, 4, pure=False).result() == 100_000


def test_who_wants_one_thread_has_one_task_at_a_time():
    for client in cluster(1):
        (worker,) = client.cluster.workers.values()
        assert type(worker.state) is WorkerState and not turns_of(client).lends
        assert client.submit(submits, 4, pure=False).result() == 100_000


def test_a_version_of_dask_that_is_not_known_keeps_its_own_way(caplog):
    class Other(HeapSet):
        """As a later version might have it."""

    for client in cluster(1):
        (worker,) = client.cluster.workers.values()
        state = worker.state
        turns_of(client).close()
        assert type(state) is WorkerState and type(state.ready) is HeapSet
        state.ready = Other(key=state.ready.key)
        parts = Parts("this worker", worker.loop.add_callback)
        assert not Turns(worker, worker.plugins["mission-control"].endpoint, 1, parts).start()
        assert "no threads of a worker as Mission Control knows it" in caplog.text
        assert client.submit(lambda: len(fetch(make(1))[0])).result() == 100_000


class Value:
    """Something with a priority, of a job."""

    def __init__(self, priority: tuple[int, int], job: str):
        self.priority, self.job = priority, job


def test_a_queue_by_job_holds_what_was_put_there_and_what_is_seen_first_is_taken_first():
    for seed in range(50):
        dice = random.Random(seed)
        queue = ByJob(key=lambda own: own.priority, job_of=lambda own: own.job, choose=dice.choice)
        known: set[Any] = set()
        for _ in range(300):
            act = dice.randrange(5)
            if act < 2:
                value = Value((dice.randrange(3), dice.randrange(100)), dice.choice("abc"))
                queue.add(value)
                known.add(value)
            elif act == 2 and known:
                value = dice.choice(sorted(known, key=id))
                queue.discard(value)
                known.discard(value)
            elif known:
                is_chosen_now, seen = queue.front is None, queue.peek()
                assert queue.peek() is seen
                assert seen.priority == min(own.priority for own in known if own.job == seen.job)
                highest = min(own.priority[0] for own in known)
                assert seen.priority[0] == highest or not is_chosen_now, "Dask's priority comes first"
                if act == 3:
                    assert queue.pop() is seen
                    known.discard(seen)
            assert set(queue) == known and len(queue) == len(known)
            assert set(queue.heaps) == {own.job for own in known}
            assert [own.priority for own in queue.sorted()] == sorted(own.priority for own in known)
        assert set(queue.plain()) == known
        queue.clear()
        assert not queue and not queue.heaps
        with pytest.raises(KeyError):
            queue.peek()
