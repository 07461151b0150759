"""Tasks in Java."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, wait

import mission_control
from mission_control import ProgramFailed, fetch, java, open_stream, put
from mission_control.jvm.process import LIBRARY
from mission_control.workers import workers_of
from tests.conftest import data, installed, mission, until, what_is_left

SOURCE = Path(__file__).parent / "java" / "Tried.java"


@pytest.fixture(scope="module")
def jar(tmp_path_factory: Any) -> bytes:
    """Compile the tasks of :data:`SOURCE` into an archive."""
    folder = tmp_path_factory.mktemp("java")
    subprocess.run(["javac", "-Xlint:all", "-cp", str(LIBRARY), "-d", str(folder), str(SOURCE)], check=True)
    classes = sorted(path.name for path in folder.glob("*.class"))
    subprocess.run(["jar", "--create", "--file", "tried.jar", *classes], cwd=folder, check=True)
    return (folder / "tried.jar").read_bytes()


@pytest.fixture
def tried(client: Client, jar: bytes) -> Iterator[Any]:
    """Submit tasks in Java: their action, and their number."""
    archives = [client.submit(put, [jar], pure=False)]

    def submit(what: str, count: int = 0, **more: Any) -> Any:
        given = {"what": what, "count": count}
        return client.submit(java, "Tried", jars=archives, arguments=given, pure=False, **more)

    yield submit
    archives.clear()
    # The frames of a task's error, which Dask keeps, hold the data that the task had read.
    client.run(gc.collect)
    until(lambda: not what_is_left(client, "objects", "live_bytes"), "nothing is left")


def content_of(reference: mission_control.Reference) -> list[bytes]:
    return [bytes(part) for part in fetch(reference)]


def put_bytes(*parts: bytes) -> mission_control.Reference:
    return put(list(parts))


def write_some(count: int) -> None:
    with open_stream() as out:
        for number in range(count):
            out.write(0, b"%d\n" % number)


def read_all(reference: Any) -> bytes:
    return b"".join(bytes(buffer) for buffer in mission_control.stream(reference))


def test_tasks_get_arguments_and_give_values(client, tried):
    assert tried("arguments", 7).result(60) == {"what": "arguments", "count": 7}
    assert tried("nothing").result(60) is None
    assert tried("interrupted", 5).result(60) == 5
    assert tried("text").result(60) == 'a text: "ä" \u2603'
    # One process for all tasks of a worker.
    first, *rest = workers_of(client)
    processes = {tried("process", workers=[first]).result(60) for _ in range(4)}
    assert len(processes) == 1 and processes != {tried("process", workers=rest[:1]).result(60)}


def test_objects_pass_between_java_and_python(client, tried):
    content = data(3_000_000, 1).tobytes()
    there = client.submit(put_bytes, content, b"", b"end", pure=False)
    assert tried("sum", inputs=[there]).result(60) == sum(content) + sum(b"end")
    back = tried("copy", inputs=[there])
    assert client.submit(content_of, back, pure=False).result(60) == [content, b"", b"end"]
    number, references = tried("both", 3).result(60)
    assert number == 3 and len(references) == 3
    del there, back, references


def put_data(size: int, seed: int) -> mission_control.Reference:
    return put([data(size, seed)])


def leases(dask_worker: Any) -> int:
    interface = dask_worker.plugins["mission-control"].interface
    return len(interface.jvm.leases.parts) if interface is not None and interface.jvm is not None else 0


def test_what_is_mapped_stays_as_it_is_and_is_given_back(client, tried, tmp_path):
    """Objects of its own worker, of another one, and one too small to be mapped."""
    first, second = sorted(workers_of(client))[:2]
    sizes = [(8 << 20, first), (8 << 20, second), (3 << 20, second), (1000, second), (0, first)]
    made = [client.submit(put_data, size, n, workers=[at], pure=False) for n, (size, at) in enumerate(sizes)]
    sums = [zlib.crc32(data(size, n)) for n, (size, _) in enumerate(sizes)]
    path = tmp_path / "go on"
    maps = tried(f"map:{path}", inputs=made, workers=[first])
    until(lambda: Path(f"{path}.begun").exists(), "it has mapped them")
    assert client.run(leases)[first] == 3
    # Freed memory is reused at once.
    del made
    others = [client.submit(put_data, 8 << 20, 100 + n, pure=False) for n in range(8)]
    wait(others)
    path.touch()
    assert maps.result(60) == sums
    until(lambda: not any(client.run(leases).values()), "nothing is mapped any more")
    del maps, others


def test_streams_pass_between_java_and_python(client, tried):
    expected = b"".join(b"%d\n" % number for number in range(1000))
    written = client.submit(write_some, 1000, pure=False)
    assert tried("read", inputs=[written]).result(60) == expected.decode()
    assert client.submit(read_all, tried("stream", 1000), pure=False).result(60) == expected
    error = client.submit(read_all, tried("stream fails", 10), pure=False).exception(60)
    assert isinstance(error, mission_control.StreamFailed) and "as planned" in str(error)
    del written, error


def test_a_task_spawns_and_delegates(client, tried):
    assert tried("spawn", 5).result(60) == [1, 2, 3, 4, 5]
    assert client.submit(content_of, tried("chain", 50), pure=False).result(120) == [b"end"]
    assert tried("python").result(60) == 6
    assert client.submit(content_of, tried("program"), pure=False).result(60) == [b"a\nb\n"]


def test_what_was_spawned_has_what_its_call_names(client, tried):
    """Also if the task that made it is over, and the call to which that delegates does not name it."""
    assert tried("spawn named", 1000).result(60) == [1000]


def write_slowly(count: int) -> None:
    with open_stream() as out:
        for number in range(count):
            out.write(0, b"%d\n" % number)
            time.sleep(0.02)


def test_a_reader_of_a_stream_reads_it_again_when_its_process_ends(client, tried):
    """The data that it has read from the stream is gone."""
    (worker, *_) = workers_of(client)
    wait(tried("nothing", workers=[worker]))
    written = client.submit(write_slowly, 100, pure=False)
    read = tried("read", inputs=[written], workers=[worker])
    time.sleep(0.5)
    assert isinstance(tried("exit", workers=[worker]).exception(60), ProgramFailed)
    assert read.result(120) == "".join(f"{number}\n" for number in range(100))
    del written, read


def test_what_fails_says_why(client, tried):
    error = tried("fail").exception(60)
    assert isinstance(error, ProgramFailed) and "IllegalStateException: as planned" in str(error)
    assert "StackOverflowError" in str(tried("overflow").exception(60))
    error = tried("wait", timeout=0.5).exception(60)
    assert isinstance(error, ProgramFailed) and "after 0.5 s" in str(error)
    assert "does not implement" in str(client.submit(java, "java.lang.Object", pure=False).exception(60))
    assert "no.such.Task" in str(client.submit(java, "no.such.Task", pure=False).exception(60))
    assert isinstance(client.submit(java, "Tried", jars=[7], pure=False).exception(60), TypeError)
    assert isinstance(client.submit(java, "Tried", arguments=object, pure=False).exception(60), TypeError)
    error = tried("bad requests").exception(60)
    assert error is None, error
    del error


def test_a_process_that_ends_with_tasks_of_others_costs_them_nothing(client, tried):
    """Ten tasks run in the process, and one ends it repeatedly: that one fails, and the others run once more."""
    (worker, *_) = workers_of(client)
    wait(tried("nothing", workers=[worker]))
    slow = [tried("sleep", number, workers=[worker]) for number in range(10)]
    ends = tried("exit", workers=[worker])
    error = ends.exception(120)
    assert isinstance(error, ProgramFailed) and "status 7" in str(error) and "bye" in str(error)
    assert client.gather(slow) == list(range(10))


def test_a_task_that_is_cancelled_is_interrupted(client, tried, tmp_path):
    path = tmp_path / "interrupted"
    waits = tried(f"wait:{path}")
    until(lambda: Path(f"{path}.begun").exists(), "it runs")
    waits.cancel()
    until(path.exists, "its thread was interrupted")
    del waits


def jar_files(dask_worker: Any) -> int:
    return len(list(Path(dask_worker.local_directory, "jars").glob("*")))


def with_entry(jar: bytes, name: str) -> bytes:
    """The same classes in an archive of other content."""
    archive = io.BytesIO(jar)
    with zipfile.ZipFile(archive, "a") as file:
        # Without the time: the same name twice is the same content.
        file.writestr(zipfile.ZipInfo(name), name)
    return archive.getvalue()


def test_jars_that_no_task_uses_are_dropped(client, tried, jar):
    """20 archives, one after the other, and the first one again."""
    (worker, *_) = workers_of(client)
    given = {"what": "process", "count": 0}

    def keep_few(dask_worker: Any, most: int) -> None:
        from mission_control.jvm import jars

        jars.IDLE_MAX = most

    client.run(keep_few, most=4, workers=[worker])
    try:
        archives = [client.submit(put, [with_entry(jar, f"entry {number}")], pure=False) for number in range(20)]
        processes = {
            client.submit(java, "Tried", jars=[archive], arguments=given, pure=False, workers=[worker]).result(60)
            for archive in [*archives, archives[0]]
        }
        assert len(processes) == 1
        assert client.run(jar_files, workers=[worker])[worker] == 4
        links = [path.readlink().name for path in Path(f"/proc/{processes.pop()}/fd").iterdir() if path.is_symlink()]
        assert 1 <= len({name for name in links if ".jar" in name} - {LIBRARY.name}) <= 17
    finally:
        client.run(keep_few, most=64, workers=[worker])


def test_equal_jars_are_one_file(client, tried, jar):
    (worker, *_) = workers_of(client)
    before = client.run(jar_files)[worker]
    for _ in range(3):
        archive = client.submit(put, [with_entry(jar, "the same")], pure=False)
        given = {"what": "arguments", "count": 1}
        done = client.submit(java, "Tried", jars=[archive], arguments=given, pure=False, workers=[worker])
        assert done.result(60) == given
        del archive, done
    assert client.run(jar_files)[worker] == before + 1


def test_a_process_ends_with_its_worker(jar):
    with installed(n_workers=1, threads_per_worker=1) as cluster, Client(cluster) as client:
        archive = client.submit(put, [jar], pure=False)
        given = {"what": "process", "count": 0}
        process = client.submit(java, "Tried", jars=[archive], arguments=given, pure=False).result(60)
        (worker,) = client.run(os.getpid).values()
        os.kill(worker, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{process}/cmdline").exists(), "it has ended")


def test_a_worker_without_java_says_so():
    def without(dask_worker: Any, command: str) -> None:
        import dask

        dask.config.set({"mission-control.java.command": command})

    with installed(n_workers=1, threads_per_worker=1) as cluster, Client(cluster) as own:
        own.run(without, command="no-such-java")
        error = own.submit(java, "Tried", pure=False).exception(60)
        assert isinstance(error, ProgramFailed) and "no no-such-java: install Java 17" in str(error)


@pytest.mark.parametrize("words", (("sort", "--size", "4MiB"), ("kmeans", "--points", "20000", "--k", "7")))
def test_workloads_in_java_are_right(words, tmp_path):
    ran = mission("run", *words, "--engine", "java", "--workers", "2", "--results", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert "ok" in ran.stdout
