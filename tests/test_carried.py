"""References in results are found, and what carries none is not pickled."""

from __future__ import annotations

import functools
import threading
import types
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mission_control import carried
from mission_control.carried import FINDER, carried_by
from mission_control.objects import Reference

Pair = namedtuple("Pair", "one other")


def made(name: str = "a") -> Reference:
    return Reference(name, "tcp://127.0.0.1:1", "127.0.0.1:2", "job", "stage", [1])


@dataclass
class Held:
    """Sent as it is, by the name of its class."""

    what: Any
    beside: int = 1


class Slotted:
    __slots__ = ("what",)

    def __init__(self, what: Any):
        self.what = what


class Table(dict):
    pass


class Own:
    """Says itself what is sent."""

    def __init__(self, what: Any):
        self.what = what

    def __reduce__(self) -> tuple[Any, ...]:
        return Own, (self.what,)


def array_of(what: Any, *shape: int) -> np.ndarray:
    array = np.empty(shape, dtype=object)
    array.flat[-1] = what
    return array


def local(what: Any) -> Any:
    class Local:
        beside = what

    return Local()


WALKED = {
    "a list": lambda own: [1, "x", [own]],
    "a dictionary": lambda own: {"a": {1: (own, 2.0)}},
    "a key": lambda own: {own: 1},
    "a set": lambda own: {own, 1},
    "a deque": lambda own: deque([own]),
    "an ordered dictionary": lambda own: OrderedDict(a=own),
    "an instance": Held,
    "an instance of instances": lambda own: [Held(Held(own)), Held(None)],
    "a slot": Slotted,
    "a dictionary of its own class": lambda own: Table(a=own),
    "an array": lambda own: array_of(own, 3),
    "a table": lambda own: array_of(own, 3, 4),
    "each second": lambda own: array_of(own, 5, 6)[::2, ::-1],
    "a frame": lambda own: pd.DataFrame({"a": array_of(own, 3), "b": 1}),
    "a series": lambda own: pd.Series(array_of(own, 3)),
    "an index": lambda own: pd.Index(array_of(own, 3)),
}
PICKLED = {
    "a masked array": lambda own: np.ma.masked_array(array_of(own, 3), mask=[1, 0, 0]),
    "a list with a record array": lambda own: [np.rec.array([(1, 2.0)], dtype=[("a", int), ("O", float)]), own],
    "a list with times": lambda own: [np.array(["2026-01-01"], dtype="M8[us]"), own],
    "a tuple with names": lambda own: Pair(1, own),
    "a default": lambda own: defaultdict(lambda: own),
    "a function": lambda own: lambda: own,
    "a method": lambda own: [functools.partial(print, own)],
    "its own way": Own,
    "a class of a function": local,
    "a namespace": lambda own: types.SimpleNamespace(a=own),
    "records": lambda own: np.array([(own, 1)], dtype=[("a", object), ("b", int)]),
}


@pytest.mark.parametrize("value", [*WALKED.values(), *PICKLED.values()], ids=[*WALKED, *PICKLED])
def test_a_reference_is_found_in(value):
    own = made()
    assert carried_by(value(own)) == {own}
    assert carried_by(value(1)) == set()


@pytest.mark.parametrize("value", WALKED.values(), ids=WALKED)
def test_what_is_walked_is_not_pickled(value, monkeypatch):
    def dumped(*_: Any) -> None:
        raise AssertionError("it was pickled")

    monkeypatch.setattr(carried._Finder, "dump", dumped)
    own = made()
    assert carried_by(value(own)) == {own}
    large = [Held(number) for number in range(1000)]
    assert carried_by([*large, own]) == {own} and carried_by(large) == set()


def test_each_object_is_found_once_and_circles_end():
    one, same, other = made(), made(), made("b")
    ring: list[Any] = [one, same]
    ring += [ring, other, {"again": ring}]
    assert carried_by(ring) == {one, other} and len(carried_by(ring)) == 2


def test_a_deep_value_needs_no_stack():
    deep: Any = made()
    for _ in range(200_000):
        deep = [deep]
    assert len(carried_by(deep)) == 1
    while isinstance(deep, list):
        deep = deep.pop()


def test_values_that_change_meanwhile_are_searched_all_the_same():
    own, stop = made(), threading.Event()
    value: dict[Any, Any] = {"kept": [own]}

    def change() -> None:
        for number in range(10**9):
            value[number % 100] = type(f"T{number % 50}", (), {})()
            value.pop((number + 50) % 100, None)
            if stop.is_set():
                return

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(300):
            held = FINDER.find(list(value.values()))
            assert held is None or held == [own]
    finally:
        stop.set()
        thread.join()


def test_arrays_with_code_of_their_own_are_searched_by_many_threads():
    """The first walk ran that code, with a lock held: the process stood still."""
    own = made()
    values = [np.ma.array([1.0, 2.0]), np.rec.array([(1,)], dtype=[("a", int)]), own]

    def search() -> None:
        for _ in range(300):
            assert carried_by(values) == {own}

    threads = [threading.Thread(target=search, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_class_without_a_module_or_many_classes_harm_nobody():
    own = made()
    odd = type("Odd", (), {})
    odd.__module__ = None  # type: ignore[assignment]
    assert carried_by([odd(), own]) == {own}
    many = [type(f"T{number}", (), {})() for number in range(5000)]
    assert carried_by([Held(None), *many, own]) == {own}
    fields = [type(f"D{number}", (dict,), {"__module__": __name__}) for number in range(600)]
    for field in fields:
        globals()[field.__name__] = field
    try:
        assert carried_by([*(field() for field in fields), own]) == {own}
    finally:
        for field in fields:
            del globals()[field.__name__]


def importable(classes: list[type]) -> None:
    for own in classes:
        own.__module__ = __name__
        globals()[own.__name__] = own


def test_new_types_are_learnt_in_as_many_walks_as_they_lie_deep():
    own, walks = made(), []

    def looked_at(kind: type) -> str:
        walks.append(kind)
        return carried.kind_of(kind)

    beside = [type(f"Beside{number}", (Held,), {}) for number in range(300)]
    chain = [type(f"Deep{number}", (Held,), {}) for number in range(40)]
    importable(beside + chain)
    try:
        finder = carried._native.Finder(looked_at)
        # All of one depth at once: each type is asked for once, and the walk begins again once for each depth.
        assert finder.find([kind(own) for kind in beside]) == [own]
        assert len(walks) == len(set(walks)) > 300
        deep: Any = own
        for kind in chain:
            deep = kind(deep)
        # Too deep to learn in one search: it is pickled, and what was learnt serves the next.
        assert carried._native.Finder(carried.kind_of).find(deep) is None
        assert carried_by(deep) == {own}
    finally:
        for kind in beside + chain:
            del globals()[kind.__name__]
