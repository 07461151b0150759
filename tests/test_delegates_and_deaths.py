"""Tasks that delegate while workers die, or the cluster changes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, KilledWorker, LocalCluster, get_client, wait

import mission_control
from mission_control.workers import workers_of
from tests.chains import content_of, count_down, kept_by_scheduler, note, noted, nothing_left, square, wait_for
from tests.conftest import data, installed, status, until


def kill_who_said(path: Path, what: str) -> None:
    """Kill the process of the worker that was the first to note this."""
    said = until(lambda: [own for own in noted(path) if own.startswith(f"{what}-")], what)
    os.kill(int(said[0].split("-")[1]), signal.SIGKILL)


@pytest.fixture(scope="module")
def mortals() -> Iterator[LocalCluster]:
    with installed(threads_per_worker=1) as cluster:
        yield cluster


@pytest.fixture
def mortal(mortals) -> Iterator[Client]:
    """A cluster whose workers may die; others replace them."""
    with Client(mortals) as client:
        until(lambda: len(status(client)["workers"]) == 3, "three workers have joined", 180)
        yield client
        until(lambda: nothing_left(client), "nothing is left")


def result_after_loss(chain: Any, path: Path, go: Path) -> Any:
    """The result of a chain whose object is lost while its steps wait; it is put again, once."""
    kill_who_said(path, "put")
    time.sleep(1)
    go.touch()
    result = chain.result(120)
    assert len([own for own in noted(path) if own.startswith("put")]) == 2
    return result


def test_only_the_step_runs_again_whose_worker_dies(mortal, tmp_path):
    path, go = tmp_path / "runs", tmp_path / "go"

    def step(number: int) -> Any:
        note(path, f"{number}-{os.getpid()}")
        if number == 3:
            wait_for(go)
        return mission_control.delegate(step, number + 1) if number < 5 else number

    chain = mortal.submit(step, 0, pure=False)
    kill_who_said(path, "3")
    go.touch()
    assert chain.result(60) == 5
    assert [own.split("-")[0] for own in noted(path)] == ["0", "1", "2", "3", "3", "4", "5"]
    del chain


def test_a_task_begins_again_whose_object_is_lost(mortal, tmp_path):
    path, go = tmp_path / "runs", tmp_path / "go"

    def use(reference: Any, number: int) -> bytes:
        note(path, f"use-{os.getpid()}")
        wait_for(go)
        return content_of(reference) + bytes([number])

    def begin(number: int) -> Any:
        note(path, f"put-{os.getpid()}")
        return mission_control.delegate(use, mission_control.put([data(300_000, 3)]), number)

    number = mortal.submit(square, 3, pure=False)
    chain = mortal.submit(begin, number, pure=False)
    del number
    until(lambda: any(own.startswith("use") for own in noted(path)), "the second step runs")
    assert result_after_loss(chain, path, go) == data(300_000, 3).tobytes() + bytes([9])
    del chain


def test_a_task_begins_again_that_waits_while_its_object_is_lost(mortal, tmp_path):
    """The tasks for which it waits name the object, too; they would fail."""
    path, go = tmp_path / "runs", tmp_path / "go"

    def use(reference: Any, part: int) -> bytes:
        note(path, f"use-{os.getpid()}")
        wait_for(go)
        return content_of(reference)[part::2]

    def begin(number: int) -> Any:
        note(path, f"put-{os.getpid()}")
        reference = mission_control.put([data(300_000, number)])
        elsewhere = [own for own in workers_of(get_client()) if own != reference.worker]
        parts = get_client().map(use, [reference] * 2, range(2), pure=False, workers=elsewhere)
        return mission_control.delegate(join, parts, reference)

    def join(parts: list[bytes], reference: Any) -> bool:
        content = content_of(reference)
        return parts == [content[0::2], content[1::2]]

    chain = mortal.submit(begin, mortal.submit(square, 2, pure=False), pure=False)
    until(lambda: len(noted(path)) == 3, "both use it")
    assert result_after_loss(chain, path, go) is True
    del chain


def test_a_result_that_is_lost_is_computed_from_the_first_step(mortal, tmp_path):
    path = tmp_path / "runs"

    def last(number: int) -> Any:
        note(path, "last")
        return number, os.getpid()

    def begin(number: int) -> Any:
        note(path, "first")
        return mission_control.delegate(last, number + 1)

    number = mortal.submit(square, 3, pure=False)
    chain = mortal.submit(begin, number, pure=False)
    wait(chain)
    del number
    pid = mortal.submit(lambda own: own[1], chain, pure=False).result(60)
    os.kill(pid, signal.SIGKILL)
    until(lambda: noted(path) == ["first", "last"] * 2, "it is computed again")
    assert chain.result(60)[0] == 10
    del chain


def made_elsewhere(client: Client, there: Any, pid: int) -> bool:
    return client.submit(lambda own: own[1], there, pure=False).result(60) != pid


def test_a_task_does_not_begin_again_for_ever(mortal, tmp_path):
    """An object that its step needs is lost, not one of this task."""
    path = tmp_path / "runs"

    def make() -> Any:
        return mission_control.put([data(100_000, 2)]), os.getpid()

    def begin(reference: Any) -> Any:
        note(path, "first")
        return mission_control.delegate(content_of, reference)

    there = mortal.submit(make, pure=False)
    reference, pid = there.result(60)
    os.kill(pid, signal.SIGKILL)
    until(partial(made_elsewhere, mortal, there, pid), "it is put again")
    failed = mortal.submit(begin, reference, pure=False)
    assert isinstance(failed.exception(120), mission_control.Lost)
    assert len(noted(path)) <= 8
    del there, failed


def test_a_step_that_kills_its_worker_is_given_up(tmp_path):
    """Its object is lost with the worker each time."""
    path = tmp_path / "runs"

    def kills(reference: Any) -> None:
        note(path, "killed")
        mission_control.fetch(reference)
        os._exit(1)

    def begin() -> Any:
        return mission_control.delegate(kills, mission_control.put([data(100_000, 1)]))

    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        mission_control.install(client)
        with pytest.raises(KilledWorker):
            client.submit(begin, pure=False).result(120)
        assert len(noted(path)) <= 3
        # Dask cannot close a nanny in the moment in which it starts another worker ("can only join a started process").
        client.wait_for_workers(1, timeout=120)


def test_what_a_step_took_is_not_awaited_by_the_first_step(mortal, tmp_path):
    """The worker still knows the task, because a dependent task runs there."""
    started, go = tmp_path / "started", tmp_path / "go"
    other, worker, _ = sorted(workers_of(mortal))

    def put_there() -> Any:
        return mission_control.put([data(300_000, 4)])

    def begin(_: int) -> Any:
        there = get_client().submit(put_there, pure=False, workers=[other], allow_other_workers=True)
        return mission_control.delegate(passed, there)

    def passed(reference: Any) -> Any:
        return reference

    def use(reference: Any) -> bytes:
        note(started, "use")
        wait_for(go)
        return content_of(reference)

    pid = mortal.run(os.getpid, workers=[other])[other]
    number = mortal.submit(square, 3, pure=False)
    chain = mortal.submit(begin, number, pure=False, workers=[worker])
    wait(chain)
    del number
    used = mortal.submit(use, chain, pure=False, workers=[worker])
    until(started.exists, "it is used")
    os.kill(pid, signal.SIGKILL)
    time.sleep(2)
    go.touch()
    assert used.result(60) == data(300_000, 4).tobytes()
    del chain, used


def test_tasks_that_were_there_before_delegate_too(tmp_path):
    path = tmp_path / "go"

    def begin() -> Any:
        wait_for(path)
        return mission_control.delegate(content_of, mission_control.put([b"content"]))

    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        runs, waits = (client.submit(begin, pure=False) for _ in range(2))
        time.sleep(0.5)
        mission_control.install(client)
        path.touch()
        # The first task has begun before delegation was possible.
        with pytest.raises(RuntimeError, match="began before"):
            runs.result(60)
        assert waits.result(60) == b"content"


def test_a_cluster_restarts_while_chains_run(mortal, tmp_path):
    there = mortal.submit(square, 2, pure=False)

    def endless(_: Any) -> Any:
        time.sleep(0.05)
        return mission_control.delegate(endless, get_client().submit(square, 5, pure=False))

    chain = mortal.submit(endless, there, pure=False)
    until(lambda: kept_by_scheduler(mortal).get("first"), "it has delegated")
    with pytest.raises(RuntimeError, match="have delegated"):
        mission_control.uninstall(mortal)
    mortal.restart(timeout=180)
    assert mortal.submit(count_down, 20, pure=False).result(60) == 210
    del there, chain
