"""Programs as tasks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster
from distributed.client import FutureCancelledError

import mission_control
from mission_control import In, Out, ProgramFailed
from mission_control.programs.process import marked
from tests.conftest import data, until, what_is_left


def put_bytes(*parts: bytes) -> mission_control.Reference:
    return mission_control.put(list(parts))


def content_of(reference: mission_control.Reference) -> list[bytes]:
    return [bytes(part) for part in mission_control.fetch(reference)]


def nothing_left(client: Client) -> bool:
    return not what_is_left(client, "objects", "live_bytes") and no_folders(client)


def no_folders(client: Client) -> bool:
    def folders(dask_worker: Any) -> list[str]:
        return [name for name in os.listdir(dask_worker.local_directory) if name.startswith("program-")]

    return not any(client.run(folders).values())


def ran(client: Client, *given: Any, **more: Any) -> list[bytes]:
    """Contents of the outputs."""
    made = client.submit(mission_control.run, *given, pure=False, **more)
    return client.submit(content_of, made, pure=False).result(60)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_any_binary_reads_objects_and_leaves_objects(client):
    lines = b"".join(b"%08d\n" % (number * 7919 % 100_003) for number in range(100_003))
    there = client.submit(put_bytes, lines, pure=False)
    ordered = b"".join(sorted(lines.splitlines(keepends=True)))
    assert ran(client, ["sort", In(0)], inputs=[there]) == [ordered]
    # Through standard input, through a pipe, and into a named output.
    assert ran(client, ["sort"], inputs=[there], stdin=In(0)) == [ordered]
    assert ran(client, ["sort"], inputs=[there], stdin=In(0, pipe=True)) == [ordered]
    assert ran(client, ["sort", "-o", Out(0), In(0, pipe=True)], inputs=[there]) == [ordered]
    # The result is an object like any other.
    made = client.submit(mission_control.run, ["sort", "-r", In(0)], inputs=[there], pure=False)
    assert ran(client, ["head", "-c", "9", In(0)], inputs=[made]) == [b"%08d\n" % 100_002]
    del there, made
    until(lambda: nothing_left(client), "nothing is left")


def test_parts_and_several_inputs_and_outputs(client):
    first = client.submit(put_bytes, b"a1\n", b"", data(3_000_000, 1).tobytes(), pure=False)
    second = client.submit(put_bytes, b"b1\n", pure=False)
    whole = b"a1\n" + data(3_000_000, 1).tobytes()
    assert ran(client, ["cat", In(0), In(1)], inputs=[first, second]) == [whole + b"b1\n"]
    assert ran(client, ["cat", In(0, 0), In(0, 1), In(1, 0), In(0, 0)], inputs=[first, second]) == [b"a1\nb1\na1\n"]
    assert ran(client, ["cat", In(0, 2)], inputs=[first]) == [data(3_000_000, 1).tobytes()]
    script = 'cp "$1" "$2"; echo said; cp "$3" "$4"'
    words = ["sh", "-c", script, "sh", In(1), Out(2), In(0), Out(0)]
    assert ran(client, words, inputs=[first, second], outputs=3) == [whole, b"said\n", b"b1\n"]
    assert ran(client, ["true"], outputs=1) == [b""]
    assert len(client.submit(mission_control.run, ["true"], outputs=0, pure=False).result(60)) == 0
    assert ran(client, ["sh", "-c", "echo $WORD; pwd"], env={"WORD": "given"})[0].startswith(b"given\n/")
    # Files can be mapped, but not changed; another program does not see them.
    look = (
        "import mmap, os, sys; file = open(sys.argv[1], 'rb')\n"
        "print(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)[:2])\n"
        "try: os.write(os.open(sys.argv[1], os.O_WRONLY), b'x')\nexcept OSError as error: print(error.errno)"
    )
    assert ran(client, [sys.executable, "-c", look, In(0)], inputs=[first]) == [b"b'a1'\n1\n"]
    del first, second
    until(lambda: nothing_left(client), "nothing is left")


def write_lines(count: int, pause: float = 0.0, fails: bool = False) -> None:
    """Two parts: the second has a line at once, so that a reader can see that the first is late."""
    with mission_control.open_stream(2) as out:
        out.write(1, b"other\n")
        for number in range(count):
            out.write(0, b"%08d\n" % number)
            time.sleep(pause)
        if fails:
            raise ValueError("as planned")


def test_streams_are_inputs(client):
    whole = b"".join(b"%08d\n" % number for number in range(2000))
    for words, given, expected in (
        (["cat", In(0, 0, pipe=True)], {}, whole),
        (["cat", In(0, pipe=True)], {}, whole + b"other\n"),
        (["cat"], {"stdin": In(0, 0, pipe=True)}, whole),
        (["tac", In(0, 0)], {}, b"".join(reversed(whole.splitlines(keepends=True)))),
        (["cat"], {"stdin": In(0)}, whole + b"other\n"),
        # A program that has read enough ends.
        (["head", "-c", "9", In(0, 0, pipe=True)], {}, whole[:9]),
    ):
        written = client.submit(write_lines, 2000, pure=False)
        assert ran(client, words, inputs=[written], **given) == [expected], words
        del written
    until(lambda: nothing_left(client), "nothing is left")
    with pytest.raises(ValueError, match="numbered from 0 to 1"):
        written = client.submit(write_lines, 1, pure=False)
        ran(client, ["cat", In(0, 2, pipe=True)], inputs=[written])


def test_a_program_reads_a_stream_as_it_is_written(client):
    """The writer would take minutes; the program ends as soon as it has what it wants."""
    written = client.submit(write_lines, 10_000, 0.05, pure=False)
    assert ran(client, ["sed", "3q", In(0, 0, pipe=True)], inputs=[written]) == [b"00000000\n00000001\n00000002\n"]
    # A program that reads no input does not wait for any.
    assert ran(client, ["echo", In(0, 1, pipe=True)], inputs=[written])[0].startswith(b"/")
    written.cancel()
    del written
    until(lambda: nothing_left(client), "nothing is left")


def test_a_stream_that_fails_ends_its_program(client):
    for part in ({"stdin": In(0, 0, pipe=True)}, {"stdin": In(0, 0)}):
        written = client.submit(write_lines, 10, 0.0, True, pure=False)
        with pytest.raises((ProgramFailed, mission_control.StreamFailed), match="as planned"):
            ran(client, ["cat"], inputs=[written], **part)
        del written
    # Dask's clients keep failed futures, and those their inputs.
    until(lambda: no_folders(client), "no folders are left")


@pytest.mark.parametrize("timeout", [2, None])
def test_a_program_that_awaits_a_stream_ends_in_time_or_with_its_task(cluster, timeout):
    """A stream is a file when all of it is written, which would take minutes."""
    # A separate client, because Dask's clients keep failed futures, and those their inputs.
    with Client(cluster) as client:
        written = client.submit(write_lines, 10_000, 0.05, pure=False)
        given = {"inputs": [written], "timeout": timeout, "pure": False}
        awaits = client.submit(mission_control.run, ["cat", In(0, 0)], **given)
        if timeout is None:
            until(lambda: not no_folders(client), "it has begun")
            awaits.cancel()
        else:
            error = awaits.exception(60)
            assert isinstance(error, ProgramFailed) and f"after {timeout} s" in str(error)
        until(lambda: no_folders(client), "it has ended")
    with Client(cluster) as client:
        until(lambda: nothing_left(client), "nothing is left")


def test_a_program_that_fails_says_why(client):
    there = client.submit(put_bytes, b"x", pure=False)
    for words, says in (
        (["sh", "-c", "echo wrong >&2; exit 7"], "sh ended with status 7: wrong"),
        (["false"], "false ended with status 1, without output"),
        (["sh", "-c", "kill -SEGV $$"], "signal SIGSEGV"),
        (["no-such-program"], "no-such-program cannot be started"),
        (["true", Out(0)], "left nothing at Out"),
        (["a\0b"], "cannot be started"),
    ):
        error = client.submit(mission_control.run, words, inputs=[there], pure=False).exception(60)
        assert isinstance(error, ProgramFailed) and says in str(error), error
    for given, kind in (
        (([],), ValueError),
        ((["cat", In(1)],), ValueError),
        ((["cat", In(0, 1)],), ValueError),
        ((["cat", Out(1)],), ValueError),
        ((["cat", 7],), TypeError),
        (("sort -n",), TypeError),
    ):
        error = client.submit(mission_control.run, *given, inputs=[there], pure=False).exception(60)
        assert isinstance(error, kind), error
    error = client.submit(mission_control.run, ["cat"], outputs=2, pure=False).exception(60)
    assert isinstance(error, ValueError) and "Out(number)" in str(error)
    error = client.submit(mission_control.run, ["cat"], inputs=[7], pure=False).exception(60)
    assert isinstance(error, TypeError)
    with pytest.raises(RuntimeError, match="outside a task"):
        mission_control.run(["true"])
    del there, error


WAITS = 'trap "" TERM; setsid sh -c "sleep 300" & sleep 300 & echo $$ > "$1"; wait'
"""A program that starts two others, one of them in a new session."""


def started_by(path: Path) -> list[int]:
    """Return the program, and all processes that it started."""
    until(lambda: path.exists() and path.read_text().strip(), "it runs")
    pid = int(path.read_text())
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    mark = next(own for own in environ if own.startswith(b"MISSION_CONTROL_PROGRAM=")).split(b"=")[1].decode()
    return until(lambda: (found := marked(mark)) and len(found) >= 4 and found, "it has started them")


def test_a_program_ends_with_its_children_when_its_time_is_over(client, tmp_path):
    path = tmp_path / "pid"
    waits = client.submit(mission_control.run, ["sh", "-c", WAITS, "sh", str(path)], timeout=3, pure=False)
    pids = started_by(path)
    error = waits.exception(60)
    assert isinstance(error, ProgramFailed) and "after 3 s" in str(error)
    until(lambda: not any(alive(pid) for pid in pids), "all have ended")


def test_a_program_ends_with_its_task(client, tmp_path):
    path = tmp_path / "pid"
    waits = client.submit(mission_control.run, ["sh", "-c", WAITS, "sh", str(path)], pure=False)
    pids = started_by(path)
    waits.cancel()
    with pytest.raises(FutureCancelledError):
        waits.result(60)
    until(lambda: not any(alive(pid) for pid in pids), "all have ended")
    until(lambda: nothing_left(client), "nothing is left")


def test_a_program_is_over_when_its_outputs_are(client):
    """A shell does not wait for all processes that it starts."""
    there = client.submit(put_bytes, data(200_000, 3).tobytes(), pure=False)
    slow = ["sh", "-c", 'exec > "$2"; (sleep 1; cat "$1") & exit 0', "sh", In(0), Out(0)]
    assert ran(client, slow, inputs=[there]) == [data(200_000, 3).tobytes()]
    del there


def test_what_is_no_file_is_no_output(client, tmp_path):
    other = tmp_path / "other"
    other.write_text("of somebody else")
    for script in ('mkfifo "$1"', f'ln -s {other} "$1"', 'mkdir "$1"', "ln -s /dev/zero $1"):
        made = client.submit(mission_control.run, ["sh", "-c", script, "sh", Out(0)], pure=False)
        error = made.exception(60)
        assert isinstance(error, ProgramFailed), (script, error)
    # The program may delete its folder.
    script = "cd ..; rm -rf work tmp; echo said; echo wrong >&2; exit 3"
    error = client.submit(mission_control.run, ["sh", "-c", script], pure=False).exception(60)
    assert isinstance(error, ProgramFailed) and "status 3: wrong" in str(error)


def test_each_mention_of_a_pipe_has_all_of_the_input(client):
    content = data(3_000_000, 4).tobytes()
    there = client.submit(put_bytes, content, b"", pure=False)
    pipe = In(0, 0, pipe=True)
    assert ran(client, ["cmp", pipe, pipe], inputs=[there]) == [b""]
    assert ran(client, ["cat", pipe, In(0, 1, pipe=True), pipe], inputs=[there]) == [content + content]
    # A second read fails, and does not block.
    words = ["sh", "-c", 'cat "$1" > /dev/null; cat "$1"', "sh", pipe]
    error = client.submit(mission_control.run, words, inputs=[there], pure=False).exception(60)
    assert isinstance(error, ProgramFailed) and "No such file" in str(error)
    del there, error


def test_what_is_cut_off_does_not_see_an_end(client, tmp_path):
    """A program is killed at its timeout, before it can read the end of an incomplete input."""
    path = tmp_path / "whole"
    there = client.submit(put_bytes, data(30_000_000, 5).tobytes(), pure=False)
    script = '(while dd bs=65536 count=1 iflag=fullblock 2> /dev/null | grep -q . ; do sleep 0.05; done; touch "$1")'
    words = ["sh", "-c", script, "sh", str(path)]
    cut = client.submit(mission_control.run, words, inputs=[there], stdin=In(0, pipe=True), timeout=2, pure=False)
    assert "after 2 s" in str(cut.exception(60))
    time.sleep(0.5)
    assert not path.exists()
    del there, cut


def test_what_a_program_leaves_behind_ends_with_it(client, tmp_path):
    path = tmp_path / "pid"
    script = 'setsid sleep 300 & echo $! > "$1"; echo done'
    assert ran(client, ["sh", "-c", script, "sh", str(path)]) == [b"done\n"]
    until(lambda: not alive(int(path.read_text())), "it has ended")


def test_a_program_ends_with_its_worker(tmp_path):
    path = tmp_path / "pid"
    script = 'sleep 300 & echo $$ > "$1"; wait'
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        mission_control.install(client)
        waits = client.submit(mission_control.run, ["sh", "-c", script, "sh", str(path)], pure=False)
        until(lambda: path.exists() and path.read_text().strip(), "it runs")
        pid = int(path.read_text())
        children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
        (worker,) = client.run(os.getpid).values()
        os.kill(worker, signal.SIGKILL)
        until(lambda: not alive(pid) and not any(alive(int(own)) for own in children), "both have ended")
        waits.cancel()


def test_a_program_has_no_more_memory_than_it_is_given(client):
    words = [sys.executable, "-c", "bytearray(1 << 30)"]
    error = client.submit(mission_control.run, words, memory=512 << 20, pure=False).exception(60)
    assert isinstance(error, ProgramFailed) and "MemoryError" in str(error)
    assert ran(client, words, memory=4 << 30) == [b""]


def test_a_pipe_that_nobody_reads_to_its_end_holds_nobody_up(client):
    there = client.submit(put_bytes, data(5_000_000, 2).tobytes(), pure=False)
    began = time.monotonic()
    assert ran(client, ["head", "-c", "10", In(0, pipe=True)], inputs=[there]) == [data(5_000_000, 2).tobytes()[:10]]
    assert ran(client, ["echo", "unread", In(0, pipe=True)], inputs=[there])[0].startswith(b"unread /")
    assert time.monotonic() - began < 60
    del there
    until(lambda: nothing_left(client), "nothing is left")
