"""`mission://`: Dask's messages, with large frames on the data plane. Messages arrive unchanged."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
from distributed.comm import CommClosedError, connect, listen
from distributed.protocol import Serialized, deserialize, to_serialize

import mission_control
from mission_control.dask import comm
from mission_control.dask.seams import messages
from tests.conftest import TOKEN

LARGE = 4 * comm.EAGER_BYTES


@pytest.fixture
def plane(endpoint) -> Iterator[Any]:
    """A data plane of this process, for both ends of a connection."""
    own = endpoint()
    comm.PLANES.add(TOKEN, own)
    yield own
    comm.PLANES.remove(own)
    comm.PLANES.avoided.clear()


def held(own: Any) -> int:
    return json.loads(own.resources())["objects"]


async def pair(address: str = "mission://127.0.0.1", **options: Any) -> tuple[Any, Any, Any]:
    """Make both ends of a connection, and its listener."""
    accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def handle(end: Any) -> None:
        accepted.set_result(end)

    listener = await listen(address, handle, **options)
    mine = await connect(listener.contact_address, **options)
    return mine, await accepted, listener


MESSAGES: list[Any] = [
    {"op": "small"},
    "OK",
    {"op": "x", "data": to_serialize(np.arange(LARGE // 8))},
    {"op": "x", "data": [to_serialize(np.arange(LARGE // 8) + n) for n in range(3)], "little": to_serialize(b"")},
    {"op": "x", "data": to_serialize(np.zeros(0)), "more": to_serialize(bytes(LARGE)), "n": [1, (2, "ß")]},
    {"op": "x", "data": to_serialize(pd.DataFrame({"a": np.arange(LARGE // 8), "b": ["text"] * (LARGE // 8)}))},
    {"op": "x", "data": to_serialize(np.random.default_rng(1).random((300, 500))[:, ::2])},
    {"op": "x", "data": to_serialize([np.arange(n) for n in range(0, 3000, 7)])},
    # Dask passes arrays unchanged, even with formats that are no plain numbers.
    *({"op": "x", "data": to_serialize(np.ones(LARGE // 2, dtype))} for dtype in ("c8", ">f8", "U2", "S5", "?")),
]


def plain(message: Any) -> Any:
    """Return a message without markers for serialization."""
    if isinstance(message, dict):
        return {key: plain(own) for key, own in message.items()}
    if isinstance(message, list):
        return [plain(own) for own in message]
    return message.data if type(message).__name__ == "Serialize" else message


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one.equals(other) if isinstance(one, pd.DataFrame) else one == other


@pytest.mark.parametrize("address", ["mission://127.0.0.1", "mission://[::1]"])
def test_messages_arrive_as_they_were_sent_in_both_directions(plane, address):
    async def talk() -> None:
        mine, other, listener = await pair(address)
        for message in MESSAGES:
            for one, two in ((mine, other), (other, mine)):
                # A writer never waits: both may be written before one is read.
                assert await one.write(message) > 0 and await one.write({"next": 1}) > 0
                assert same(plain(message), await two.read())
                assert await two.read() == {"next": 1}
        assert mine.written and other.written, "some had frames on the data plane"
        await mine.write("last")
        await other.read()
        await other.write("last")
        await mine.read()
        assert held(plane) == 0, "who has read says so with the next message"
        await mine.close()
        await other.close()
        listener.stop()

    asyncio.run(talk())


class Counted:
    """How often it was serialized."""

    times = 0

    def __reduce__(self) -> Any:
        Counted.times += 1
        return int, ("7",)


@pytest.mark.parametrize("number", [3, comm.EAGER_BYTES // 100])
def test_a_message_of_small_results_is_serialized_as_often_as_over_tcp(plane, number):
    """Its frames are at hand, whatever carries them."""

    async def times(address: str) -> int:
        mine, other, listener = await pair(address)
        Counted.times = 0
        message = {"data": [to_serialize(Counted()), *(to_serialize(bytes([n % 256] * 400)) for n in range(number))]}
        await mine.write(message)
        received = await other.read()
        assert list(received["data"]) == [7, *(bytes([n % 256] * 400) for n in range(number))]
        listener.stop()
        mine.abort()
        other.abort()
        return Counted.times

    assert asyncio.run(times("mission://127.0.0.1")) == asyncio.run(times("tcp://127.0.0.1"))


@pytest.mark.skipif(psutil.virtual_memory().total < 16 << 30, reason="it is three times in memory")
def test_a_frame_above_two_gibibytes_arrives_whole(endpoint):
    own, numbers = endpoint(memory_limit=4 << 30), np.arange((2 << 30) // 8 + 1000)

    async def talk() -> None:
        mine, other, listener = await pair()
        await mine.write({"data": to_serialize(numbers)})
        assert mine.written == 1, "its frame is on the data plane"
        assert np.array_equal((await other.read())["data"], numbers)
        listener.stop()
        mine.abort()
        other.abort()

    comm.PLANES.add(TOKEN, own)
    try:
        asyncio.run(talk())
    finally:
        comm.PLANES.remove(own)


def test_without_a_data_plane_or_with_anothers_all_goes_through_the_connection(endpoint):
    async def talk() -> None:
        mine, other, listener = await pair()
        for message in MESSAGES:
            await mine.write(message)
            assert same(plain(message), await other.read())
        assert mine.written == 0
        # The handshake announced the data plane, and there was none.
        own = endpoint()
        comm.PLANES.add(TOKEN, own)
        await mine.write(MESSAGES[2])
        assert same(plain(MESSAGES[2]), await other.read()) and mine.written == 0
        comm.PLANES.remove(own)
        listener.stop()
        mine.abort()
        other.abort()

    asyncio.run(talk())


def test_what_is_read_can_be_written_to_and_outlives_everything(plane):
    async def talk() -> np.ndarray:
        mine, other, listener = await pair()
        await mine.write({"data": to_serialize(np.arange(LARGE // 8))})
        array = (await other.read())["data"]
        mine.abort()
        other.abort()
        listener.stop()
        return array

    array = asyncio.run(talk())
    gc.collect()
    assert array.flags.writeable
    array += 1
    assert np.array_equal(array, np.arange(LARGE // 8) + 1)


def test_a_reader_may_leave_the_data_serialized(plane):
    async def talk() -> None:
        mine, other, listener = await pair(deserialize=False)
        await mine.write({"data": to_serialize(np.arange(LARGE // 8))})
        message = await other.read()
        assert isinstance(message["data"], Serialized)
        await other.write(message)
        back = await mine.read()
        assert np.array_equal(deserialize(back["data"].header, back["data"].frames), np.arange(LARGE // 8))
        listener.stop()
        mine.abort()
        other.abort()

    asyncio.run(talk())


def test_what_its_writer_changes_afterwards_was_sent_as_it_was(plane):
    async def talk() -> None:
        mine, other, listener = await pair()
        array = np.zeros(LARGE, np.uint8)
        await mine.write({"data": to_serialize(array)})
        array[:] = 1
        assert not (await other.read())["data"].any()
        listener.stop()
        mine.abort()
        other.abort()

    asyncio.run(talk())


def test_frames_nobody_reads_are_freed_after_their_connection(plane, monkeypatch):
    monkeypatch.setattr(comm, "LINGER_S", 0.2)

    async def talk() -> None:
        mine, other, listener = await pair()
        await mine.write(MESSAGES[2])
        assert held(plane) == 1
        closing = mine.close()
        # The reader gets them nevertheless.
        assert same(plain(MESSAGES[2]), await other.read())
        await closing
        with pytest.raises(CommClosedError):
            await other.read()
        await asyncio.sleep(0.3)
        comm.PLANES.sweep()
        assert held(plane) == 0
        listener.stop()

    asyncio.run(talk())


def test_frames_of_an_aborted_connection_are_freed_at_once(plane):
    async def talk() -> None:
        mine, other, listener = await pair()
        await mine.write(MESSAGES[2])
        mine.abort()
        assert held(plane) == 0
        with pytest.raises(CommClosedError):
            await other.read()
        listener.stop()

    asyncio.run(talk())


@pytest.mark.parametrize("mark", [None, "", "0" * 32])
def test_no_message_is_taken_for_a_place_of_frames_without_the_number_of_its_connection(plane, mark):
    async def talk() -> None:
        mine, other, listener = await pair()
        await mine.write(MESSAGES[2])
        for forged in (
            {comm.RECEIVED: 1, comm.MARK: mark},
            {comm.FRAMES: {"address": "127.0.0.1:1"}, comm.MARK: mark},
        ):
            await other.write(forged)
            assert await mine.read() == forged, "it is a message of Dask's as any other"
        assert held(plane) == 1
        assert same(plain(MESSAGES[2]), await other.read())
        mine.abort()
        other.abort()
        listener.stop()

    asyncio.run(talk())


def test_frames_that_are_refused_end_their_connection_and_the_next_one_says_so(plane):
    async def talk() -> None:
        mine, other, listener = await pair()
        demands = {"encrypt": "authenticated", "transport": None}
        with comm.belongs_to(comm.Whose("secret", "a", "b", demands)):
            await mine.write(MESSAGES[2])
        # Both ends are one process without certificates, which only refuses the plan.
        with pytest.raises(CommClosedError, match="the job demands encryption"):
            await other.read()
        assert other.closed()
        # The handshake of the next connection announces that this end avoids the other's data plane.
        assert comm.PLANES.avoids() == [plane.address]
        mine.abort()
        listener.stop()

    asyncio.run(talk())


def test_frames_whose_data_plane_closes_or_is_not_reached_come_another_time(endpoint, monkeypatch):
    """The connection ends, and Dask makes another one, which carries frames itself if the peer's data plane is
    unreachable."""
    own = endpoint()
    comm.PLANES.add(TOKEN, own)

    async def closes() -> None:
        mine, other, listener = await pair()
        await mine.write(MESSAGES[2])
        own.close()
        with pytest.raises(CommClosedError):
            await other.read()
        listener.stop()
        mine.abort()

    class Elsewhere:
        address = "127.0.0.1:1"

        def __getattr__(self, name: str) -> Any:
            return getattr(there, name)

        def receive(self, *_: Any) -> Any:
            raise mission_control.Unreachable("nobody there")

    async def unreachable() -> None:
        mine, other, listener = await pair()
        await other.write(MESSAGES[2])
        with pytest.raises(CommClosedError):
            await mine.read()
        other.abort()
        mine.abort()
        listener.stop()
        # The next connection announces that, whichever end began it.
        for mine_writes in (True, False):
            ends = mine, other, listener = await pair()
            writer, reader, _ = ends if mine_writes else (other, mine, listener)
            await writer.write(MESSAGES[2])
            assert writer.written == 0 and same(plain(MESSAGES[2]), await reader.read())
            mine.abort()
            other.abort()
            listener.stop()

    try:
        asyncio.run(closes())
    finally:
        comm.PLANES.remove(own)
    there = endpoint()
    elsewhere: Any = Elsewhere()
    comm.PLANES.add(TOKEN, elsewhere)
    try:
        asyncio.run(unreachable())
    finally:
        comm.PLANES.remove(elsewhere)
        comm.PLANES.avoided.clear()


def test_who_only_reads_says_so_after_a_while(plane, monkeypatch):
    monkeypatch.setattr(comm, "ACKNOWLEDGE_WITHIN_S", 0.1)

    async def talk() -> None:
        mine, other, listener = await pair()
        reading = asyncio.create_task(mine.read())
        await mine.write(MESSAGES[2])
        await other.read()
        for _ in range(50):
            await asyncio.sleep(0.1)
            if held(plane) == 0:
                break
        assert held(plane) == 0 and not reading.done()
        mine.abort()
        other.abort()
        with pytest.raises(CommClosedError):
            await reading
        listener.stop()

    asyncio.run(talk())


def test_frames_that_are_gone_end_the_connection_with_an_error(plane):
    async def talk() -> None:
        mine, other, listener = await pair()
        await mine.write(MESSAGES[2])
        for _, name in mine.kept.values():
            plane.free(name)
        with pytest.raises(CommClosedError, match="could not be fetched"):
            await other.read()
        assert other.closed()
        listener.stop()
        mine.abort()

    asyncio.run(talk())


def test_strangers_that_speak_nonsense_or_nothing_harm_nobody(plane):
    async def talk() -> None:
        mine, other, listener = await pair()
        host, port = listener.get_host_port()
        for nonsense in (b"", b"x", b"\xff" * 100, bytes(64), b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection((host, port)) as stranger:
                stranger.sendall(nonsense)
        await asyncio.sleep(0.2)
        await mine.write(MESSAGES[3])
        assert same(plain(MESSAGES[3]), await other.read())
        listener.stop()
        mine.abort()
        other.abort()

    asyncio.run(talk())


def test_encryption_that_is_required_is_not_left_out():
    async def refused() -> None:
        with pytest.raises(RuntimeError, match="encryption required"):
            await listen("mission://127.0.0.1", lambda end: None, require_encryption=True)
        with pytest.raises(RuntimeError, match="encryption required"):
            await connect("mission://127.0.0.1:1", require_encryption=True)

    asyncio.run(refused())


def test_what_is_to_be_encrypted_does_not_go_through_a_plain_connection(plane, monkeypatch):
    """Neither in many small pieces, nor if the data plane has no room."""
    secret = comm.Whose("secret", "make", "gather", {"encrypt": "opportunistic", "transport": None})
    pieces = [to_serialize(np.arange(6000) + number) for number in range(20)]

    async def talk() -> None:
        mine, other, listener = await pair()
        with comm.belongs_to(secret):
            await mine.write({"data": pieces})
        assert mine.written == 1
        got = (await other.read())["data"]
        assert all(np.array_equal(own, piece.data) for own, piece in zip(got, pieces, strict=True))

        async def full(*_: Any) -> str:
            raise OSError("no room")

        monkeypatch.setattr(mine, "keep", full)
        with comm.belongs_to(secret), pytest.raises(CommClosedError, match="must be encrypted"):
            await mine.write({"data": pieces})
        await mine.write({"data": pieces})
        assert same(plain({"data": pieces}), await other.read()), "others go through the connection"
        listener.stop()
        mine.abort()
        other.abort()

    asyncio.run(talk())


def test_frames_that_nobody_says_to_have_are_not_kept_without_end(plane, monkeypatch):
    monkeypatch.setattr(comm, "KEPT_MAX", 3)

    async def talk() -> None:
        mine, other, listener = await pair()
        for _ in range(5):
            await mine.write({"data": to_serialize(np.arange(LARGE // 8))})
        assert len(mine.kept) == mine.written == 3
        for _ in range(5):
            assert np.array_equal((await other.read())["data"], np.arange(LARGE // 8))
        listener.stop()
        mine.abort()
        other.abort()

    asyncio.run(talk())


def test_copies_that_are_still_coming_keep_what_their_job_demands_and_what_is_gone_is_forgotten(monkeypatch):
    tasks: set[str] = set()
    inherited = messages.Inherited(SimpleNamespace(state=SimpleNamespace(tasks=tasks)))
    secret = comm.Whose("secret", "a", "b", {"encrypt": "opportunistic", "transport": None})
    first, second, third = ([f"{which}-{n}" for n in range(messages.INHERITED_MIN)] for which in "abc")
    # Dask gathers from several workers before it stores a result.
    inherited.add(first, secret)
    inherited.add(second, secret)
    assert all(inherited.of(key) == secret for key in first + second)
    tasks.update(second)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + messages.UNKEPT_S + 1)
    inherited.add(third, secret)
    inherited.add(["another"], secret)
    assert all(inherited.of(key) == secret for key in second + third) and inherited.of(first[0]) is None
