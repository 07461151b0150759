"""Tasks that delegate: their results and their errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import dask
import dask.bag as db
import numpy as np
import pytest
from distributed import Client, LocalCluster, get_client, wait
from distributed.client import FutureCancelledError

import mission_control
from mission_control.cli.show import print_jobs
from mission_control.dask.seams import delegates
from mission_control.workers import workers_of
from tests.chains import content_of, count_down, kept_by_scheduler, note, noted, nothing_left, square, wait_for
from tests.conftest import data, installed, status, until

PARTS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Dask validates its scheduler's state of each task after each transition."""
    with dask.config.set({"distributed.scheduler.validate": True}), installed() as cluster:
        yield cluster


@pytest.fixture
def client(cluster) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client
    # Dask keeps failed futures of that client: their errors refer to frames, and those to futures.
    with Client(cluster, set_as_default=False) as other:
        until(lambda: nothing_left(other), "nothing is left")


# --- functions of tasks ---------------------------------------------------------------------------------------------


def grow(number: int, reference: Any = None) -> Any:
    """Put an object in each step: the content of the last one, and one more."""
    content = data(200_000, 0) if reference is None else memoryview(mission_control.fetch(reference)[0])
    more = np.frombuffer(content, np.uint8) + np.uint8(1)
    made = mission_control.put([more])
    return mission_control.delegate(grow, number - 1, made) if number else made


def grown(number: int) -> bytes:
    return (data(200_000, 0).view(np.uint8) + np.uint8(number + 1)).tobytes()


def total(rounds: int, before: int, squares: dict[str, Any]) -> Any:
    return sum_of_squares(rounds - 1, before + sum(squares["of"]))


def sum_of_squares(rounds: int, before: int = 0) -> Any:
    if not rounds:
        return before
    futures = get_client().map(square, range(rounds, rounds + PARTS), pure=False)
    return mission_control.delegate(total, rounds, before, {"of": futures})


def expected_sum(rounds: int) -> int:
    return sum(number**2 for first in range(1, rounds + 1) for number in range(first, first + PARTS))


def add(*numbers: int) -> int:
    return sum(numbers)


# --- what they do ---------------------------------------------------------------------------------------------------


def test_the_result_is_that_of_the_last_call(client):
    for length in (0, 1, 2, 300):
        assert client.submit(count_down, length, pure=False).result(60) == length * (length + 1) // 2
    # Dependent tasks wait for the last call.
    first = client.submit(count_down, 50, pure=False)
    later = [client.submit(add, first, number, pure=False) for number in range(5)]
    assert client.gather(later) == [1275 + number for number in range(5)]
    # Positional and keyword arguments.
    keywords = client.submit(lambda: mission_control.delegate(dict, [("a", 1)], function=2, self=3), pure=False)
    assert keywords.result(60) == {"a": 1, "function": 2, "self": 3}
    del first, later, keywords


def test_a_chain_that_runs_is_shown(client, capsys):
    with mission_control.job("counts", client=client):
        chain = client.submit(count_down, 100_000, pure=False)

    def shown() -> Any:
        return [(job, own) for job in status(client)["jobs"] for own in job["chains"] if own["steps"] > 3]

    ((job, own),) = until(shown, "it has delegated")
    assert (job["job"], own["key"], own["again"]) == ("counts", chain.key, 0)
    print_jobs({**status(client), "jobs": [job]})
    assert f"{chain.key} has delegated {own['steps']} times\n" in capsys.readouterr().out
    chain.cancel()
    until(lambda: not any(job["chains"] for job in status(client)["jobs"]), "it is over")


def test_a_long_chain_grows_nothing(client):
    """Many concurrent chains grow nothing, either."""
    chains = [client.submit(count_down, 500, pure=False), *client.map(count_down, [10] * 50, range(50), pure=False)]
    most = 0
    while not all(own.done() for own in chains):
        most = max(most, client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)))
        time.sleep(0.05)
    assert client.gather(chains) == [125250, *(55 + start for start in range(50))]
    assert most <= len(chains)
    del chains


def test_a_step_has_the_objects_that_it_is_called_with(client):
    made = client.submit(grow, 20, pure=False)
    most = 0
    while not made.done():
        most = max(most, client.sync(client.scheduler.mission_control_status)["objects"])
        time.sleep(0.02)
    assert client.submit(content_of, made, pure=False).result(60) == grown(20)
    assert most <= 2, "of the step that runs, and of the next one"
    del made


def test_results_take_the_places_of_futures(client):
    """The steps submit the tasks; those of past rounds are forgotten."""
    found = client.submit(sum_of_squares, 30, pure=False)
    most = 0
    while not found.done():
        most = max(most, client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)))
        time.sleep(0.02)
    assert found.result() == expected_sum(30)
    assert most <= 4 * PARTS
    del found


def test_what_only_the_first_step_takes_is_released(client):
    """It is recomputed if the result is lost: see below."""
    there = client.submit(square, 7, pure=False)
    chain = client.submit(count_down, there, pure=False)
    key = there.key
    del there
    assert chain.result(60) == 49 * 50 // 2
    state = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.tasks[key].state)
    assert state == "released"
    # The task is as its client submitted it.
    client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.validate_state())
    del chain


def test_a_stream_may_be_what_a_chain_ends_with(client):
    def write(reference: Any) -> None:
        with mission_control.open_stream() as out:
            time.sleep(0.5)  # the scheduler has forgotten the step by then
            for start in range(0, 200_000, 50_000):
                out.write(0, memoryview(mission_control.fetch(reference)[0])[start : start + 50_000])

    def begin() -> Any:
        return mission_control.delegate(write, mission_control.put([data(200_000, 5)]))

    def read(reference: Any) -> bytes:
        return b"".join(bytes(buffer) for buffer in mission_control.stream(reference))

    written = client.submit(begin, pure=False)
    assert client.submit(read, written, pure=False).result(60) == data(200_000, 5).tobytes()
    del written


def test_a_coroutine_is_to_be_a_plain_function(client):
    async def begin() -> Any:
        return mission_control.delegate(count_down, 3)

    with pytest.raises(RuntimeError, match="plain def, not async"):
        client.submit(begin, pure=False).result(60)


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_what_cannot_be_delegated_is_named(client, monkeypatch):
    # The scheduler is in this process; an unknown future need not take ten seconds.
    monkeypatch.setattr(delegates, "LOOKS", 50)

    def too_much() -> Any:
        return mission_control.delegate(len, bytes(70 << 20))

    def not_picklable() -> Any:
        import threading

        return mission_control.delegate(id, threading.Lock())

    def inside() -> Any:
        return [mission_control.delegate(add, 1)]

    def argument() -> Any:
        return mission_control.delegate(add, mission_control.delegate(add, 1))

    def after_a_stream() -> Any:
        with mission_control.open_stream() as out:
            try:
                mission_control.delegate(add, 1)
            except RuntimeError as error:
                out.write(0, str(error).encode())

    def read(reference: Any) -> str:
        return bytes(next(mission_control.stream(reference))).decode()

    async def asynchronous() -> None:
        pass

    def unknown() -> Any:
        from distributed import Future

        return mission_control.delegate(add, Future("nobody-submitted-this"))

    for call, error, says in (
        (too_much, ValueError, "put them"),
        (not_picklable, TypeError, "delegate(id, ..): the function and its arguments are sent"),
        (inside, RuntimeError, "return it alone"),
        (argument, TypeError, "return it alone"),
        (lambda: mission_control.delegate(7), TypeError, "first argument is a function"),
        (lambda: mission_control.delegate(asynchronous), TypeError, "plain def"),
        (unknown, RuntimeError, "does not know nobody-submitted-this"),
    ):
        failed = client.submit(call, pure=False).exception(60)
        assert isinstance(failed, error) and says in str(failed), failed
    # Dask's collections go on with what a function returns.
    with pytest.raises(RuntimeError, match="return it alone"):
        db.from_sequence(range(4), npartitions=2).map(count_down).map(str).compute()
    written = client.submit(after_a_stream, pure=False)
    assert "has opened a stream" in client.submit(read, written, pure=False).result(60)
    del written
    with pytest.raises(RuntimeError, match="outside a task"):
        mission_control.delegate(add, 1)


class Counter:
    number = 0

    def add(self, number: int) -> int:
        self.number += number
        return self.number


def test_an_actor_stays_for_the_next_step(client):
    def begin() -> Any:
        counter = get_client().submit(Counter, actor=True, pure=False).result()
        counter.add(3).result()
        return mission_control.delegate(finish, counter)

    def finish(counter: Any) -> int:
        return counter.add(4).result()

    assert client.submit(begin, pure=False).result(60) == 7


def test_a_task_that_waits_for_itself_is_refused(client):
    def itself() -> Any:
        from distributed import Future, get_worker

        return mission_control.delegate(add, Future(get_worker().get_current_task()))

    def behind() -> Any:
        from distributed import Future, get_worker

        mine = Future(get_worker().get_current_task())
        later = get_client().submit(add, mine, pure=False)
        return mission_control.delegate(add, get_client().submit(add, later, pure=False))

    for call in (itself, behind):
        failed = client.submit(call, pure=False).exception(60)
        assert isinstance(failed, RuntimeError) and "wait for itself" in str(failed)


def test_a_step_that_fails_fails_the_task(client, tmp_path):
    path = tmp_path / "runs"

    def fails(times: int) -> int:
        note(path, "step")
        if len([own for own in noted(path) if own == "step"]) <= times:
            raise ValueError("not yet")
        return 5

    def begin(times: int) -> Any:
        note(path, "first")
        return mission_control.delegate(fails, times)

    failed = client.submit(begin, 1, pure=False)
    with pytest.raises(ValueError, match="not yet"):
        failed.result(60)
    assert noted(path) == ["first", "step"]
    # A retry of the task begins with its first step.
    failed.retry()
    assert failed.result(60) == 5 and noted(path) == ["first", "step"] * 2
    path.unlink()
    # `retries` apply to the failing step.
    tried = client.submit(begin, 2, pure=False, retries=2)
    assert tried.result(60) == 5 and noted(path) == ["first", *["step"] * 3]
    del failed, tried


def test_an_old_run_is_not_taken_for_a_new_one(client, tmp_path):
    """Dask lets a cancelled function continue, and takes it for that of the next task with the same key."""
    started, go = tmp_path / "started", tmp_path / "go"
    worker = sorted(workers_of(client))[0]

    def old() -> Any:
        note(started, "old")
        wait_for(go)
        return mission_control.delegate(str, mission_control.put([b"old"]))

    first = client.submit(old, key="the-same", workers=[worker])
    until(started.exists, "it runs")
    first.cancel()
    time.sleep(0.5)
    second = client.submit(lambda: "new", key="the-same", workers=[worker])
    time.sleep(0.5)
    go.touch()
    assert second.result(60) == "new"
    del first, second


def test_the_error_of_an_input_is_there_for_who_asks_later(client, tmp_path):
    go = tmp_path / "go"

    def breaks() -> None:
        wait_for(go)
        raise ZeroDivisionError("of the input")

    first = client.submit(lambda: mission_control.delegate(add, 1, get_client().submit(breaks, pure=False)), pure=False)
    until(lambda: kept_by_scheduler(client).get("first"), "it has delegated")
    go.touch()
    assert isinstance(first.exception(60), ZeroDivisionError)
    time.sleep(1)
    later = client.submit(add, first, 1, pure=False)
    with pytest.raises(ZeroDivisionError, match="of the input"):
        later.result(60)
    del first, later


def test_a_step_whose_input_fails_fails_as_it(client, tmp_path):
    def breaks() -> None:
        raise ZeroDivisionError("of the input")

    def early() -> Any:
        """It has failed before the task delegates."""
        future = get_client().submit(breaks, pure=False)
        wait(future)
        return mission_control.delegate(add, 1, future)

    def late() -> Any:
        def breaks_later() -> None:
            time.sleep(0.5)
            raise ZeroDivisionError("of the input")

        return mission_control.delegate(add, 1, get_client().submit(breaks_later, pure=False))

    for begin in (early, late):
        first = client.submit(begin, pure=False)
        after = client.submit(add, first, pure=False)
        for own in (first, after):
            with pytest.raises(ZeroDivisionError, match="of the input"):
                own.result(60)
        del first, after, own


def test_a_chain_that_is_cancelled_ends(client, tmp_path):
    path = tmp_path / "steps"

    def endless(reference: Any = None) -> Any:
        note(path, "step")
        time.sleep(0.01)
        return mission_control.delegate(endless, mission_control.put([data(100_000, 1)]))

    there = client.submit(square, 2, pure=False)
    chain = client.submit(lambda _: endless(), there, pure=False)
    until(lambda: len(noted(path)) > 20, "it runs")
    chain.cancel()
    with pytest.raises(FutureCancelledError):
        chain.result(60)
    until(lambda: (len(noted(path)), time.sleep(0.5))[0] == len(noted(path)), "no step runs any more")
    del there, chain
