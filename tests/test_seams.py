"""A seam into Dask: on any error of ours Dask's own method is back, and the program goes on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mission_control import _native
from mission_control.dask.seams.seam import Parts, Seam


class Dask:
    """Stands for a class of Dask."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def place(self, task: int) -> int:
        self.calls.append(task)
        if task < 0:
            raise KeyError(task)
        return task * 10

    async def retire(self, worker: int) -> int:
        await asyncio.sleep(0)
        return self.place(worker)


PLACE = Seam("Dask", "place", "for this test", ("task",))
RETIRE = Seam("Dask", "retire", "for this test", ("worker",))
DELIBERATE = Seam("Dask", "place", "for this test", ("task",), deliberate=(PermissionError,))


class World:
    def __init__(self) -> None:
        self.dask = Dask()
        self.later: list[Any] = []
        self.told: list[tuple[str, str]] = []
        self.parts = Parts("this test", self.later.append, lambda name, why: self.told.append((name, why)))
        self.part = self.parts.part("placement", "tasks lie anywhere")

    def settle(self) -> None:
        while self.later:
            self.later.pop(0)()


@pytest.fixture
def world() -> World:
    return World()


def test_ours_runs_in_place_of_dasks_until_it_is_undone(world):
    assert world.part.replace(PLACE, world.dask, lambda place, task: place(task) + 1)
    assert world.dask.place(2) == 21
    world.parts.undo()
    assert world.dask.place(2) == 20
    assert vars(world.dask) == {"calls": [2, 2]}
    assert world.parts.installed == []
    assert world.parts.off == {}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [ValueError("ours"), _native.PanicException("rust")])
def test_an_error_of_ours_switches_the_part_off_and_dask_is_called_once(world, when, error, caplog):
    def ours(place: Any, task: int) -> int:
        if when == "after":
            place(task)
        raise error

    world.part.replace(PLACE, world.dask, ours)
    assert world.dask.place(3) == 30
    assert world.dask.calls == [3]
    assert world.parts.off.keys() == {"placement"}
    assert world.told == [("placement", world.parts.off["placement"])]
    assert world.dask.place(4) == 40
    assert world.dask.calls == [3, 4]
    assert caplog.text.count("is off on this test") == 1
    assert "tasks lie anywhere" in caplog.text
    world.settle()
    assert "place" not in vars(world.dask)
    # For good: another part of this name does not begin.
    again = world.parts.part("placement", "tasks lie anywhere")
    assert not again.replace(PLACE, world.dask, lambda place, task: 7)
    assert world.dask.place(5) == 50


def test_an_error_of_dask_passes_through_and_ours_stays(world):
    world.part.replace(PLACE, world.dask, lambda place, task: place(task) + 1)
    with pytest.raises(KeyError):
        world.dask.place(-1)
    assert world.dask.calls == [-1]
    assert world.dask.place(1) == 11
    assert world.parts.off == {}


def test_an_error_of_ours_after_one_of_dasks_gives_dasks(world):
    def ours(place: Any, task: int) -> int:
        try:
            return place(task)
        finally:
            raise ValueError("ours")

    world.part.replace(PLACE, world.dask, ours)
    with pytest.raises(KeyError):
        world.dask.place(-1)
    assert world.dask.calls == [-1]
    assert "ours" in world.parts.off["placement"]


def test_what_is_refused_on_purpose_is_refused(world):
    def ours(place: Any, task: int) -> int:
        raise PermissionError("encrypt")

    world.part.replace(DELIBERATE, world.dask, ours)
    with pytest.raises(PermissionError):
        world.dask.place(1)
    assert world.parts.off == {}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_coroutine_is_called_once_too(world, when):
    async def ours(retire: Any, worker: int) -> int:
        if when == "after":
            await retire(worker)
        raise ValueError("ours")

    world.part.replace(RETIRE, world.dask, ours)
    assert asyncio.iscoroutinefunction(world.dask.retire), "Dask looks at it"
    assert asyncio.run(world.dask.retire(6)) == 60
    assert world.dask.calls == [6]
    assert asyncio.run(world.dask.retire(7)) == 70


def test_a_coroutine_that_is_cancelled_is_no_error(world):
    async def ours(retire: Any, worker: int) -> int:
        await asyncio.sleep(60)
        return 0

    world.part.replace(RETIRE, world.dask, ours)

    async def main() -> None:
        task = asyncio.ensure_future(world.dask.retire(1))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert world.parts.off == {}


def test_a_version_of_dask_with_other_parameters_is_left_alone(world, caplog):
    other = Seam("Dask", "place", "for this test", ("task", "priority"))
    assert not world.part.replace(other, world.dask, lambda place, task: 0)
    assert not world.parts.part("another", "").replace(Seam("Dask", "gone", ""), world.dask, lambda gone: 0)
    assert world.dask.place(1) == 10
    assert "this version of Dask has no Dask.place" in caplog.text
    assert world.parts.off.keys() == {"placement", "another"}


def test_a_handler_is_put_back_unless_somebody_else_has_replaced_it(world):
    handlers = {"get_data": world.dask.place}
    seam = Seam("Worker.handlers", "get_data", "for this test")
    world.part.replace(seam, handlers, lambda handler, task: handler(task) + 1)
    ours = handlers["get_data"]
    handlers["get_data"] = lambda task: ours(task) + 100
    assert handlers["get_data"](1) == 111
    world.part.undo()
    assert handlers["get_data"](1) == 110, "theirs stays, and ours passes everything on"


def test_parts_are_undone_in_reverse_order(world):
    world.part.replace(PLACE, world.dask, lambda place, task: place(task) + 1)
    world.parts.part("more", "").replace(PLACE, world.dask, lambda place, task: place(task) + 2)
    assert world.dask.place(1) == 13
    world.parts.undo()
    assert "place" not in vars(world.dask)


def test_a_callback_that_fails_is_logged_once_and_stays(world, caplog):
    events = SimpleNamespace(handled=0)

    def on_event(number: int) -> None:
        if number < 2:
            raise ValueError(number)
        events.handled += 1

    callback = world.parts.callback(on_event)
    for number in range(4):
        callback(number)
    assert events.handled == 2
    assert world.parts.faults == {"on_event": "ValueError: 0"}
    assert caplog.text.count("was lost on this test") == 1
    assert world.told == [("on_event", "ValueError: 0")]
