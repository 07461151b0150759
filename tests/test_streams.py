"""Streams: between data planes without Dask, then on Dask."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster, get_worker, secede, wait

import mission_control
from mission_control.workers import workers_of
from tests.conftest import data, until, what_is_left
from tests.proxy import Limit, Proxy

DEMANDS = json.dumps({"encrypt": "none", "transport": None})
TCP = json.dumps({"encrypt": "none", "transport": "tcp"})
AHEAD = 1 << 20


def writer(own: Any, parts: int = 1, ahead: int = AHEAD, keep: bool = False, demands: str = DEMANDS) -> Any:
    return own.open_stream("job", demands, parts, ahead, keep)


def reader(
    own: Any,
    of: Any,
    stream: Any,
    part: int = 0,
    parts: int = 1,
    who: str = "reader",
    demands: str = DEMANDS,
    run: int = 1,
) -> Any:
    place = (stream.object, part, parts, of.address)
    return own.read_stream("job", "write", "read", demands, place, who, run)


def read_all(own: Any) -> list[bytes]:
    """Return the writes of a part, unchanged."""
    found: list[bytes] = []
    while chunk := read_chunk(own):
        found += chunk
    return found


def read_chunk(own: Any) -> list[bytes]:
    chunk, sizes, _ = own.next()
    return [] if chunk is None else [bytes(one) for one in mission_control.streams._writes(memoryview(chunk), sizes)]


def held(own: Any) -> dict[str, int]:
    resources = json.loads(own.resources())
    return {name: resources[name] for name in ("objects", "streams", "live_bytes", "spooled_bytes")}


NOTHING = {"objects": 0, "streams": 0, "live_bytes": 0, "spooled_bytes": 0}


@pytest.mark.parametrize("transport", [None, "tcp", "tls"])
@pytest.mark.parametrize("same", [True, False])
def test_what_is_written_is_read_as_it_was_written(endpoint, transport, same):
    own = endpoint()
    other = own if same else endpoint()
    demands = json.dumps({"encrypt": "none", "transport": transport})
    chance = np.random.default_rng(7)
    sizes = [0, 1, 0, 0, 5 << 20, 3, *chance.integers(0, 3000, 4000), 4 << 20, 100_000, 0]
    written = [chance.bytes(int(size)) for size in sizes]
    stream = writer(own, parts=3, demands=demands)
    read: dict[int, list[bytes]] = {}

    def take(part: int) -> None:
        read[part] = read_all(reader(other, own, stream, part, 3, f"reader {part}", demands))

    threads = [threading.Thread(target=take, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    for number, buffer in enumerate(written):
        stream.write(number % 2, buffer)
    stream.end()
    for thread in threads:
        thread.join(60)
    assert read == {0: written[0::2], 1: written[1::2], 2: []}
    until(lambda: held(own)["objects"] == 0, "what was read is freed")
    assert own.free(stream.object) and not own.free(stream.object)
    until(lambda: held(own) == NOTHING, "nothing is left")


def test_readers_hear_of_a_write_at_once_and_of_a_failure(endpoint):
    own, other = endpoint(), endpoint()
    stream = writer(own)
    reading = reader(other, own, stream)
    for number in range(20):
        assert reading.next(wait=False) == (None, None, True)
        stream.write(0, b"%d" % number)
        assert bytes(reading.next()[0]) == b"%d" % number
    stream.write(0, b"not read any more")
    stream.end("ValueError: the writer broke")
    with pytest.raises(mission_control.StreamFailed, match="the writer broke"):
        while reading.next()[0] is not None:
            pass
    with pytest.raises(mission_control.Cancelled, match="ended"):
        stream.write(0, b"more")


def test_chunks_are_freed_once_read_unless_they_are_kept(endpoint):
    own, other = endpoint(), endpoint()
    for keep in (False, True):
        stream = writer(own, keep=keep)
        written = [data(300_000, seed).tobytes() for seed in range(30)]
        for buffer in written:
            stream.write(0, buffer)
        stream.end()
        first = reader(other, own, stream, who="first")
        assert read_all(first) == written
        if keep:
            assert held(own)["objects"] > 0
            assert read_all(reader(other, own, stream, who="second")) == written
            assert read_all(reader(own, own, stream, who="first")) == written
        else:
            assert held(own)["objects"] == 0
            with pytest.raises(mission_control.Denied, match="keep=True"):
                reader(other, own, stream, who="second").next()
            with pytest.raises(mission_control.Denied, match="keep=True"):
                reader(other, own, stream, who="first").next()
            # The task runs again.
            with pytest.raises(mission_control.Lost, match="read and freed"):
                reader(other, own, stream, who="first", run=2).next()
        own.free(stream.object)
        # Leases on shared memory are returned by messages, and end in a separate thread.
        until(lambda: held(own) == NOTHING, "nothing is left")
        with pytest.raises(mission_control.Lost):
            reader(other, own, stream, who="late").next()


def test_a_writer_waits_for_a_reader_that_is_behind_and_for_nobody_else(endpoint):
    own, other = endpoint(memory_limit=8 << 20), endpoint()
    buffer = data(1 << 20, 1).tobytes()
    stream = writer(own, parts=2)
    # Nobody reads this part, so it goes to the disk.
    for _ in range(20):
        stream.write(1, buffer)
    assert held(own)["spooled_bytes"] > 0 and held(own)["live_bytes"] <= 8 << 20
    reading = reader(other, own, stream, 0, 2)
    written = []

    def write() -> None:
        for number in range(100):
            stream.write(0, buffer)
            written.append(number)
        stream.end()

    thread = threading.Thread(target=write)
    thread.start()
    first = read_chunk(reading)
    until(lambda: len(written) > 30, "what is read ahead has come")
    time.sleep(2)
    # 32 MiB, the chunk being read, the writer's lead, and bytes under way.
    assert len(written) < 60, "the writer waits"
    rest = read_all(reading)
    thread.join(60)
    assert first + rest == [buffer] * 100
    assert read_all(reader(other, own, stream, 1, 2, "another")) == [buffer] * 20
    own.free(stream.object)
    until(lambda: held(own) == NOTHING, "nothing is left")


def test_a_reader_ends_where_the_writer_or_its_own_data_plane_closes(endpoint):
    for closes in ("writer", "reader"):
        own, other = endpoint(), endpoint()
        stream = writer(own)
        reading = reader(other, own, stream)
        ends: list[Any] = []

        def read(reading: Any = reading, ends: list[Any] = ends) -> None:
            try:
                ends.append(reading.next())
            except mission_control.TransferError as raised:
                ends.append(raised)

        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(0.2)
        (own if closes == "writer" else other).close()
        if closes == "writer":
            # As the Mission Controller reports.
            other.lost([stream.object], "its worker left")
            with pytest.raises(mission_control.Cancelled):
                stream.write(0, b"x")
        thread.join(30)
        (error,) = ends
        assert isinstance(error, mission_control.Lost if closes == "writer" else mission_control.Cancelled), error


def test_more_readers_than_a_server_has_connections(endpoint):
    own, other = endpoint(), endpoint()
    stream = writer(own, parts=400)
    reading = [reader(other, own, stream, part, 400, f"reader {part}") for part in range(400)]
    time.sleep(1)
    began = time.monotonic()
    for part in range(400):
        stream.write(part, b"%d" % part)
    found = [read_chunk(one) for one in reading]
    took = time.monotonic() - began
    assert found == [[b"%d" % part] for part in range(400)]
    assert took < 40, "far from the patience of a reader"
    stream.end()
    assert all(one.next()[0] is None for one in reading)
    own.free(stream.object)


def test_a_reader_whose_writer_is_lost_while_it_fetches_hears_of_it(endpoint):
    """The Mission Controller does not know the objects of its chunks."""
    own, other = endpoint(), endpoint()
    with Proxy(own.address, limit=Limit(4e6)) as proxy:
        stream = writer(own, demands=TCP)
        for seed in range(8):
            stream.write(0, data(4 << 20, seed).tobytes())
        place = (stream.object, 0, 1, proxy.address)
        reading = other.read_stream("job", "write", "read", TCP, place, "reader", 1)
        time.sleep(1)
        own.close()
    other.lost([stream.object], "its worker left")
    ends: list[Exception] = []

    def read() -> None:
        try:
            read_all(reading)
        except mission_control.TransferError as raised:
            ends.append(raised)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(30)
    assert ends and isinstance(ends[0], mission_control.Lost), "not after a minute"


def test_what_could_not_be_written_is_written_once(endpoint, tmp_path):
    own = endpoint(memory_limit=1 << 20)
    stream = writer(own, parts=64)
    written = [data(300_000, seed).tobytes() for seed in range(30)]
    spool = tmp_path / "spool"
    shutil.rmtree(spool, ignore_errors=True)
    spool.write_text("no folder")
    failed = 0
    for buffer in written:
        try:
            stream.write(0, buffer)
        except OSError:
            failed += 1
            spool.unlink()
            spool.mkdir()
            stream.write(0, buffer)
    stream.end()
    assert failed == 1 and read_all(reader(own, own, stream, 0, 64)) == written


def test_bad_input_is_named(endpoint):
    own = endpoint()
    with pytest.raises(ValueError, match="parts"):
        writer(own, parts=0)
    stream = writer(own, parts=2)
    with pytest.raises(ValueError, match="no part 2"):
        stream.write(2, b"x")
    with pytest.raises(mission_control.Lost):
        reader(own, own, stream, part=2, parts=3).next()


# --- on Dask --------------------------------------------------------------------------------------------------------


def lines(count: int, seed: int) -> list[bytes]:
    return [b"%d %d" % (seed, number) for number in range(count)]


def write_lines(count: int, seed: int, parts: int = 1, wait_s: float = 0.0, keep: bool = False) -> Any:
    with mission_control.open_stream(parts, keep=keep) as out:
        for number, line in enumerate(lines(count, seed)):
            out.write(number % parts, line)
            time.sleep(wait_s / count)
    return "Dask does not see this"


def read_lines(reference: Any, part: int = 0) -> list[bytes]:
    return [bytes(line) for line in mission_control.stream(reference, part)]


def left(client: Client) -> dict[str, dict[str, Any]]:
    return what_is_left(client, "objects", "streams", "live_bytes", "spooled_bytes")


def nothing_left(client: Client) -> bool:
    return not left(client)


def test_tasks_read_what_another_is_still_writing(client):
    began = time.monotonic()
    written = client.submit(write_lines, 300, 1, parts=3, wait_s=3, pure=False)
    reference = written.result()
    assert time.monotonic() - began < 2.5, "its reference is known before it ends"
    assert isinstance(reference, mission_control.StreamReference) and len(reference) == 3
    read = client.map(read_lines, [written] * 3, range(3), pure=False)
    firsts = client.submit(first_line, written, pure=False)
    assert client.gather(read) == [lines(300, 1)[part::3] for part in range(3)]
    # If raised, the error would hold its future for ever: Dask keeps it with its traceback.
    assert isinstance(firsts.exception(), mission_control.Denied)
    del written, read, firsts, reference
    until(lambda: nothing_left(client), "nothing is left", instead=lambda: left(client))


def first_line(reference: Any) -> bytes:
    time.sleep(1)
    return bytes(next(mission_control.stream(reference)))


def test_a_kept_stream_is_read_by_any_number_and_after_its_end(client):
    written = client.submit(write_lines, 2000, 2, keep=True, pure=False)
    for _ in range(2):
        read = client.map(read_lines, [written] * 4, pure=False)
        assert client.gather(read) == [lines(2000, 2)] * 4
    del written, read
    until(lambda: nothing_left(client), "nothing is left", instead=lambda: left(client))


def write_and_break(count: int) -> None:
    with mission_control.open_stream() as out:
        for line in lines(count, 3):
            out.write(0, line)
        raise ValueError("the writer broke")


def test_an_error_of_the_writer_is_an_error_of_those_who_read(client):
    written = client.submit(write_and_break, 10, pure=False)
    read = client.submit(read_lines, written, pure=False)
    error = read.exception()
    assert isinstance(error, mission_control.StreamFailed) and "ValueError: the writer broke" in str(error)
    del written, read
    until(lambda: nothing_left(client), "nothing is left", instead=lambda: left(client))


def opens_and_returns() -> None:
    mission_control.open_stream().write(0, b"x")


def opens_and_breaks() -> None:
    mission_control.open_stream()
    raise ValueError("before the block")


def secedes_first() -> None:
    secede()
    with mission_control.open_stream() as out:
        out.write(0, b"x")


def test_a_stream_that_its_task_does_not_close_has_failed(client):
    for function, why in ((opens_and_returns, "did not close it"), (opens_and_breaks, "before the block")):
        # More streams than may be written at once.
        for _ in range(10):
            written = client.submit(function, pure=False)
            error = client.submit(read_lines, written, pure=False).exception()
            assert isinstance(error, mission_control.StreamFailed) and why in str(error)
    written = client.submit(secedes_first, pure=False)
    assert client.submit(read_lines, written, pure=False).result(30) == [b"x"]
    del written, error
    until(lambda: nothing_left(client), "nothing is left", instead=lambda: left(client))


def reads_twice(reference: Any) -> list[bytes]:
    next(mission_control.stream(reference))
    return read_lines(reference)


def test_reading_a_part_twice_needs_a_stream_that_is_kept(client):
    for keep in (False, True):
        written = client.submit(write_lines, 20, 8, keep=keep, pure=False)
        read = client.submit(reads_twice, written, pure=False)
        if keep:
            assert read.result() == lines(20, 8)
        elif read.exception() is None:
            # The writer did not know yet what the first reader had read.
            assert read.result() == lines(20, 8)
        else:
            assert isinstance(read.exception(), mission_control.Denied)
    del written, read
    until(lambda: nothing_left(client), "nothing is left", instead=lambda: left(client))


def job_after(seconds: float) -> None:
    with mission_control.open_stream() as out:
        time.sleep(seconds)
        out.write(0, mission_control.objects.current_task(get_worker()).job.encode())


def test_a_writer_keeps_its_job_and_its_worker(client):
    """Dask drops unneeded copies of its result, and considers its worker idle."""
    first, second, third = sorted(workers_of(client))
    with mission_control.job("mine", client=client):
        written = client.submit(job_after, 5, workers=[first], pure=False)
        wait(written)
        kept = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.workers_to_close(n=3))
        assert first not in kept and {second, third} == set(kept)
        read = client.map(read_lines, [written], workers=[second], pure=False)
        assert client.gather(read) == [[b"mine"]]
    del written, read
    until(lambda: nothing_left(client), "nothing is left", instead=lambda: left(client))


def passes_on(reference: Any) -> None:
    with mission_control.open_stream() as out:
        for line in mission_control.stream(reference):
            out.write(0, line)


def put_lines(count: int, seed: int) -> Any:
    return mission_control.put(lines(count, seed))


def write_fetched(reference: Any, after_s: float) -> None:
    with mission_control.open_stream() as out:
        time.sleep(after_s)
        for part in mission_control.fetch(reference):
            out.write(0, part)


def test_what_a_writer_needs_stays_though_its_result_is_known(client):
    """No other task wants the inputs."""
    there = client.submit(put_lines, 100, 6, pure=False)
    written = client.submit(write_fetched, there, 2, pure=False)
    passed = client.submit(passes_on, written, pure=False)
    read = client.submit(read_lines, passed, pure=False)
    del there, written, passed
    assert read.result(60) == lines(100, 6)
    del read
    until(lambda: nothing_left(client), "nothing is left", instead=lambda: left(client))


def test_more_stages_than_threads_do_not_stand_still(client):
    """All tasks run on one worker with two threads."""
    worker = sorted(workers_of(client))[0]
    stages = [client.submit(write_lines, 500, 4, pure=False, workers=[worker])]
    for _ in range(12):
        stages.append(client.submit(passes_on, stages[-1], pure=False, workers=[worker]))
    assert client.submit(read_lines, stages[-1], pure=False, workers=[worker]).result(60) == lines(500, 4)
    del stages
    until(lambda: nothing_left(client), "nothing is left", instead=lambda: left(client))


def test_many_writers_at_once_on_few_threads(client):
    written = client.map(write_lines, [50] * 100, range(100), pure=False)
    read = client.map(read_lines, written, pure=False)
    assert client.gather(read) == [lines(50, seed) for seed in range(100)]
    del written, read
    until(lambda: nothing_left(client), "nothing is left", instead=lambda: left(client))


def test_what_a_task_may_not_do_with_a_stream_is_named(client):
    def twice() -> None:
        with mission_control.open_stream() as out:
            errors = []
            for wrong in (mission_control.open_stream, lambda: mission_control.put([b"x"])):
                try:
                    wrong()
                except RuntimeError as error:
                    errors.append(str(error))
            out.write(0, json.dumps(errors).encode())

    written = client.submit(twice, pure=False)
    (said,) = client.submit(read_lines, written, pure=False).result()
    first, second = json.loads(said)
    assert "opened a stream before" in first and "its result is known already" in second
    for call, error in (
        (lambda own: list(mission_control.stream(own, 7)), IndexError),
        (lambda own: mission_control.fetch(own), TypeError),
        (lambda _: list(mission_control.stream(7)), TypeError),
        (lambda _: mission_control.open_stream(0), ValueError),
        (lambda _: mission_control.open_stream("x"), TypeError),
    ):
        assert isinstance(client.submit(call, written, pure=False).exception(), error)
    with pytest.raises(RuntimeError, match="outside a task"):
        mission_control.open_stream()
    del written
    until(lambda: nothing_left(client), "nothing is left", instead=lambda: left(client))


@pytest.mark.parametrize("dies", ["input", "writer", "reader"])
def test_a_worker_that_dies_is_made_up_for(dies):
    with LocalCluster(n_workers=3, threads_per_worker=2, dashboard_address=":0") as cluster, Client(cluster) as client:
        mission_control.install(client)
        workers = sorted(workers_of(client))
        pids = client.run(os.getpid)
        # What is left is freed when the tasks end, and not when Python happens to look for cycles.
        client.run(gc.disable)
        options = {"pure": False, "allow_other_workers": True}
        if dies == "input":
            there = client.submit(put_lines, 2000, 5, workers=[workers[2]], **options)
            written = client.submit(write_fetched, there, 3, workers=[workers[0]], **options)
            del there
        else:
            written = client.submit(write_lines, 2000, 5, wait_s=4, workers=[workers[0]], **options)
        wait(written)
        read = client.submit(read_lines, written, workers=[workers[1]], **options)
        time.sleep(1)
        os.kill(pids[workers[{"writer": 0, "reader": 1, "input": 2}[dies]]], signal.SIGKILL)
        assert read.result(120) == lines(2000, 5)
        del written, read
        until(lambda: nothing_left(client), "nothing is left", instead=lambda: left(client))


def note(notes: str) -> None:
    with open(notes, "a") as file:
        file.write(f"{os.getpid()}\n")


def write_alike(count: int, wait_s: float, alike: bool, notes: str) -> None:
    note(notes)
    with mission_control.open_stream(2, deterministic=True) as out:
        for number, line in enumerate(lines(count, 5)):
            out.write(number % 2, line if alike else line + os.urandom(8))
            time.sleep(wait_s / count)


def read_and_note(reference: Any, notes: str) -> list[bytes]:
    note(notes)
    # The second part is read after the first: nothing of it was read when the writer is lost.
    return [bytes(line) for part in range(2) for line in mission_control.stream(reference, part)]


@pytest.mark.parametrize(
    ("alike", "dies"),
    [
        *((True, "writer"), (True, "twice"), (False, "both")),
        *(pytest.param(*own, marks=pytest.mark.long) for own in ((True, "both"), (False, "writer"), (False, "twice"))),
    ],
)
def test_a_task_reads_on_where_its_writer_writes_the_same_again(tmp_path, dies, alike):
    with LocalCluster(n_workers=4, threads_per_worker=2, dashboard_address=":0") as cluster, Client(cluster) as client:
        mission_control.install(client)
        workers = sorted(workers_of(client))
        pids = client.run(os.getpid)
        options = {"pure": False, "allow_other_workers": True}
        writers, readers = tmp_path / "writers", tmp_path / "readers"
        written = client.submit(write_alike, 2000, 4, alike, str(writers), workers=[workers[0]], **options)
        wait(written)
        # A task without restrictions continues where it is.
        read = client.submit(read_and_note, written, str(readers), workers=workers[1:3], **options)
        until(lambda: readers.exists() and readers.read_text(), "it reads")
        time.sleep(1)
        os.kill(pids[workers[0]], signal.SIGKILL)
        if dies == "both":
            os.kill(int(readers.read_text()), signal.SIGKILL)
        elif dies == "twice":
            until(lambda: len(writers.read_text().split()) > 1, "it is written again")
            time.sleep(1)
            again = writers.read_text().split()[-1]
            if again not in readers.read_text():
                os.kill(int(again), signal.SIGKILL)
        if alike:
            assert read.result(120) == [line for part in range(2) for line in lines(2000, 5)[part::2]]
        else:
            error = read.exception(120)
            # Data without a remaining reader may differ.
            assert dies == "both" or (isinstance(error, mission_control.StreamFailed) and "deterministic" in str(error))
        assert len(readers.read_text().split()) == (2 if dies == "both" else 1)
        if alike:
            del written, read
            until(lambda: nothing_left(client), "nothing is left", instead=lambda: left(client))
