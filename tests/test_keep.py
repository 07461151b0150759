"""References that workers keep what they fetched of."""

from __future__ import annotations

from typing import Any

import pytest

import mission_control
from mission_control.workers import workers_of
from tests.conftest import data, until, what_is_left

NBYTES = 3_000_000


def make(seed: int, keep: bool) -> mission_control.Reference:
    return mission_control.put([data(NBYTES, seed), data(100, seed), data(NBYTES, seed + 1)], keep=keep)


def take(reference: mission_control.Reference, part: int | None, number: int) -> tuple[bool, int]:
    """Return whether the content is right, and the bytes from other workers."""
    fetched = mission_control.fetch(reference, part=part)
    expected = [data(NBYTES, 5), data(100, 5), data(NBYTES, 6)]
    expected = expected if part is None else [expected[part]]
    right = [bytes(own) for own in fetched] == [own.tobytes() for own in expected]
    return right, fetched.tally["bytes"]


def copies(client: Any) -> int:
    run = client.run(lambda dask_worker: dask_worker.plugins["mission-control"].resources()["copies"])
    return sum(run.values())


@pytest.mark.parametrize("kept", ["put", "keep", "not"])
def test_what_a_loop_needs_comes_once(client, kept):
    first, second, _ = sorted(workers_of(client))
    with mission_control.job(f"loop-{kept}", client=client, transport="tcp"):
        there = client.submit(make, 5, kept == "put", workers=[first], pure=False)
        if kept == "keep":
            there = client.submit(mission_control.keep, there, workers=[first], pure=False)
        took = [
            client.submit(take, there, part, number, workers=[second], pure=False).result(60)
            # An object that all fetch completely is a broadcast, and kept anyway.
            for number, part in enumerate([0, 0, 0] if kept == "not" else [0, 0, 0, None, None])
        ]
    assert all(right for right, _ in took)
    moved = [moved for _, moved in took]
    if kept == "not":
        assert moved == [NBYTES] * 3 and copies(client) == 0
    else:
        # Small parts are fetched each time.
        assert moved == [NBYTES, 0, 0, NBYTES + 100, 100] and copies(client) == 2
    del there
    until(lambda: not what_is_left(client, "objects", "copies", "live_bytes"), "nothing is left")


def test_what_cannot_be_kept_is_named(client):
    def stream() -> None:
        with mission_control.open_stream() as out:
            out.write(0, b"x")

    written = client.submit(stream, pure=False)
    with pytest.raises(TypeError, match="keep takes a reference that put gave"):
        client.submit(mission_control.keep, written, pure=False).result(60)
    with pytest.raises(TypeError, match="keep takes a reference"):
        mission_control.keep(7)
