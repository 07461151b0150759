"""Inputs that put accepts and refuses, and values that a task cannot return."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import mission_control


def stored(client: Any, make: Callable[[], Any]) -> list[bytes]:
    """Return the parts of an object, as a second task reads them."""

    def put() -> mission_control.Reference:
        return mission_control.put(make())

    def fetch(reference: mission_control.Reference) -> list[bytes]:
        return [bytes(part) for part in mission_control.fetch(reference)]

    return client.submit(fetch, client.submit(put, pure=False), pure=False).result(timeout=60)


def failure(client: Any, function: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        client.submit(function, *arguments, pure=False).result(timeout=60)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.array(["a", None], dtype=object),
        lambda: np.zeros(2, [("number", "i4"), ("anything", "O")]),
        lambda: memoryview(np.array([1, None], dtype=object)),
    ],
    ids=["array", "field", "view"],
)
def test_pointers_are_refused(client, make):
    text = failure(client, lambda: mission_control.put([b"fine", make()]))
    assert "part 1" in text and "Python objects" in text and "pickle.dumps" in text


def test_what_is_no_list_of_buffers_is_refused(client):
    assert "put([data])" in failure(client, lambda: mission_control.put(b"one buffer"))
    text = failure(client, lambda: mission_control.put([b"", 7]))
    assert "part 1" in text and "int" in text and "numpy.asarray" in text
    assert "put([data])" in failure(client, lambda: mission_control.put(7))


def test_arrays_with_gaps_are_copied(client):
    whole = np.arange(12, dtype=np.int16).reshape(3, 4)
    columns = [whole[:, 1], whole.T, whole[::-1], memoryview(whole)[::2], np.asfortranarray(whole)]
    assert stored(client, lambda: columns) == [column.tobytes() for column in columns]


def test_times_are_stored_as_their_bytes(client):
    times = np.array(["2020-01-01", "2021-06-01", "NaT"], "datetime64[ns]")
    parts = [times, times[:2] - times[0], times[::2], times[0:0], np.array(times[0])]
    parts.append(np.zeros(2, [("when", "M8[s]"), ("count", "i4")]))
    assert stored(client, lambda: parts) == [part.tobytes() for part in parts]


def test_generators_are_put(client):
    assert stored(client, lambda: (bytes([number]) for number in range(3))) == [b"\0", b"\1", b"\2"]


@pytest.mark.parametrize("what", ["all of them", "one part"])
def test_a_fetched_part_as_a_result_says_what_to_return(client, what):
    def fetch(reference: mission_control.Reference) -> Any:
        fetched = mission_control.fetch(reference)
        return fetched if what == "all of them" else fetched[0]

    reference = client.submit(lambda: mission_control.put([b"part"]), pure=False)
    with pytest.raises(Exception) as caught:
        client.submit(fetch, reference, pure=False).result(timeout=60)
    assert "bytes(part)" in str(caught.value)


def test_a_thread_of_ones_own_is_told_what_to_do(client):
    def task() -> str:
        with ThreadPoolExecutor(1) as pool:
            return str(pool.submit(mission_control.put, [b"part"]).exception())

    text = client.submit(task, pure=False).result(timeout=60)
    assert "thread" in text and "in the task's own thread" in text
