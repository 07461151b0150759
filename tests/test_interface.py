"""Programs that send requests to their worker over its socket: with curl alone, and malicious ones."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import mission_control
from mission_control import In, ProgramFailed, fetch, open_stream, put, stream
from mission_control.interface import server
from tests.conftest import data, until, what_is_left

SAID = """
ask() { # path, and what curl is to send
    path=$1; shift
    curl --silent --show-error --fail-with-body --unix-socket "$MISSION_CONTROL_SOCKET" \\
        -H "Authorization: Bearer $MISSION_CONTROL_CREDENTIAL" "$@" "http://worker$path"
}
part() { # of a JSON object, by a path of names and numbers
    python3 -c '
import json, sys
value = json.load(sys.stdin)
for name in sys.argv[1:]:
    value = value[int(name) if name.isdigit() else name]
print(json.dumps(value))' "$@"
}
set -e
"""


def put_bytes(*parts: bytes) -> mission_control.Reference:
    return put(list(parts))


def content_of(reference: mission_control.Reference) -> list[bytes]:
    return [bytes(part) for part in fetch(reference)]


def joined(*references: mission_control.Reference) -> bytes:
    return b"".join(bytes(part) for reference in references for part in fetch(reference))


def length_of(word: str, *more: int) -> int:
    return len(word) + sum(more)


def put_letters(first: str, count: int) -> mission_control.Reference:
    return put([first.encode() * count])


def asked(client: Any, script: str, **more: Any) -> Any:
    return client.submit(mission_control.run, ["sh", "-c", SAID + script], pure=False, **more)


def is_clean(client: Any) -> bool:
    # The error of a task refers to its frames, with the last data read, and Dask keeps both in a cycle of references.
    client.run(gc.collect)
    return not what_is_left(client, "objects", "live_bytes")


def test_a_program_puts_and_fetches(client):
    first = client.submit(put_bytes, b"one", b"", data(3_000_000, 1).tobytes(), pure=False)
    script = """
    ask /task > task.json
    reference=$(part inputs 0 < task.json)
    test "$(part inputs 0 sizes < task.json)" = "[3, 0, 3000000]"
    ask /fetch -d "{\\"reference\\": $reference, \\"part\\": 2}" > two
    ask /fetch -d "{\\"reference\\": $reference}" -D heads > all
    grep -q "Mission-Sizes: 3,0,3000000" heads
    { printf one; cat two; } | cmp - all
    made=$(ask /put -T two | part reference)
    ask /fetch -d "{\\"reference\\": $made}" | cmp - two
    made=$(ask "/put?sizes=3,0,3000000" --data-binary @all | part reference)
    ask /fetch -d "{\\"reference\\": $made, \\"part\\": 0}"
    ask /put --data-binary "" > /dev/null
    """
    assert client.submit(content_of, asked(client, script, inputs=[first]), pure=False).result(60) == [b"one"]
    del first
    until(lambda: is_clean(client), "what it put and nobody names is freed")


def test_a_program_spawns_and_delegates(client):
    """As in the paper: the program spawns tasks, and delegates to one that waits for them."""
    first = client.submit(put_bytes, b"b\na\n", pure=False)
    script = """
    input=$(ask /task | part inputs 0)
    one=$(ask /spawn -d "{\\"program\\": [\\"sort\\", {\\"in\\": 0}], \\"inputs\\": [$input]}")
    two=$(ask /spawn -d '{"python": "tests.test_interface:put_letters", "arguments": ["x", 3]}')
    made=$(printf made | ask /put --data-binary @- | part reference)
    ask /delegate -d "{\\"python\\": \\"tests.test_interface:joined\\", \\"inputs\\": [$one, $two, $made, $input]}"
    echo this is dropped
    """
    assert asked(client, script, inputs=[first]).result(60) == b"a\nb\nxxxmadeb\na\n"
    script = """ask /delegate -d '{"program": ["sh", "-c", "printf next"]}'"""
    assert client.submit(content_of, asked(client, script), pure=False).result(60) == [b"next"]
    script = """ask /delegate -d '{"python": "tests.test_interface:length_of", "arguments": ["word", 1, 2]}'"""
    assert asked(client, script).result(60) == 7
    del first
    until(lambda: is_clean(client), "nothing is left")


def read_all(reference: Any) -> list[bytes]:
    return [bytes(buffer) for buffer in stream(reference)]


def write_some(count: int) -> None:
    with open_stream() as out:
        for number in range(count):
            out.write(0, b"%d\n" % number)


def test_programs_write_and_read_streams(client):
    script = """
    ask /stream/open -X POST > /dev/null
    for word in a b c; do printf "$word" | ask /stream/write --data-binary @-; done
    ask /stream/close -X POST
    """
    written = asked(client, script, outputs=0)
    assert client.submit(read_all, written, pure=False).result(60) == [b"a", b"b", b"c"]
    numbers = client.submit(write_some, 1000, pure=False)
    script = """
    reference=$(ask /task | part inputs 0)
    ask /stream/read -d "{\\"reference\\": $reference}"
    """
    expected = b"".join(b"%d\n" % number for number in range(1000))
    summed = asked(client, script, inputs=[numbers])
    assert client.submit(content_of, summed, pure=False).result(60) == [expected]
    # A program that succeeds without closing its stream has not written all of it.
    script = "ask /stream/open -X POST > /dev/null; printf a | ask /stream/write --data-binary @-"
    failed = client.submit(read_all, asked(client, script, outputs=0), pure=False).exception(60)
    assert isinstance(failed, mission_control.StreamFailed) and "did not close it" in str(failed)
    del written, numbers, summed, failed
    until(lambda: is_clean(client), "nothing is left")


def talk(address: str, *requests: bytes) -> bytes:
    """Return a worker's answer to bytes; the connection is closed after the last."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(address)
        got = b""
        # A connection with unread data is reset.
        with suppress(ConnectionResetError, BrokenPipeError):
            for request in requests:
                connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                got += piece
        return got


def harm() -> None:
    """Runs as a program."""
    address, credential = os.environ["MISSION_CONTROL_SOCKET"], os.environ["MISSION_CONTROL_CREDENTIAL"]
    reference = {"object": "x", "worker": "y", "address": "127.0.0.1:1", "job": "j", "stage": "s", "sizes": [1]}

    def status(method: str, path: str, body: Any = b"", key: str = credential, **heads: str) -> int:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        heads = {"Content_Length": str(len(body)), "Authorization": f"Bearer {key}", **heads}
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in heads.items())
        got = talk(address, f"{method} {path} HTTP/1.1\r\nHost: w\r\n{head}\r\n".encode() + body)
        return int(got.split()[1]) if got.startswith(b"HTTP/1.1 ") else -1

    expected = [
        (401, ("GET", "/task", b"", "guessed")),
        (401, ("GET", "/task", b"", "")),
        (401, ("POST", "/next", {})),
        (404, ("GET", "/")),
        (404, ("GET", "/../task")),
        (405, ("GET", "/put")),
        (405, ("DELETE", "/task")),
        (501, ("HEAD", "/task")),
        (401, ("POST", "/next?x", {})),
        (400, ("POST", "/fetch", b"{")),
        (400, ("POST", "/fetch", b"[" * 100_000)),
        (400, ("POST", "/fetch", [])),
        (400, ("POST", "/fetch", {})),
        (400, ("POST", "/fetch", {"reference": {**reference, "sizes": [-1]}})),
        (400, ("POST", "/fetch", {"reference": {**reference, "sizes": [True]}})),
        (400, ("POST", "/fetch", {"reference": {**reference, "object": 7}})),
        (400, ("POST", "/fetch", {"reference": {**reference, "object": "\ud800"}})),
        (400, ("POST", "/fetch", {"reference": {**reference, "stage": "s" * 2000}})),
        (
            400,
            ("POST", "/delegate", {"python": "operator:is_", "inputs": [{**reference, "sizes": [(1 << 62) - 1] * 5}]}),
        ),
        (400, ("POST", "/fetch", {"reference": reference, "part": 1})),
        (400, ("POST", "/fetch", {"reference": reference, "part": "0"})),
        (400, ("POST", "/put?sizes=1,2", b"1234")),
        (400, ("POST", "/put?sizes=-1,5", b"1234")),
        (400, ("POST", "/put?copies=0", b"1234")),
        (400, ("POST", "/put?what=1", b"1234")),
        (400, ("POST", "/spawn", {})),
        (400, ("POST", "/spawn", {"program": ["true"], "python": "os:getpid"})),
        (400, ("POST", "/spawn", {"program": ["cat", {"in": "x"}]})),
        (400, ("POST", "/spawn", {"python": "no.such:function"})),
        (400, ("POST", "/spawn", {"python": "os"})),
        (400, ("POST", "/delegate", {"python": "os:getpid", "inputs": [{"future": "mine"}]})),
        (400, ("POST", "/stream/open", {"parts": 0})),
        (400, ("POST", "/stream/read", {"reference": reference})),
        (409, ("POST", "/stream/write", b"x")),
        (409, ("POST", "/stream/close", {})),
        (409, ("POST", "/result", {"value": 1})),
        (409, ("POST", "/error", {"error": "x"})),
    ]
    for wanted, request in expected:
        got = status(*request)
        assert got == wanted, (request, got, wanted)
    assert status("POST", "/put", b"x", Content_Length="-1") == 400
    assert status("POST", "/put", b"x", Content_Length="9" * 30) == 400
    assert status("POST", "/fetch", b"x", Content_Length=str(1 << 40)) == 413
    assert status("POST", "/put?parts=1", (1).to_bytes(8, "little") + b"x") == 201
    assert status("POST", "/put?parts=2", b"short") == 400
    assert status("POST", "/put", b"x", Transfer_Encoding="chunked") == 411
    assert status("POST", "/put", b"x", Content_Length="100") == 400, "a body that ends too early is no object"
    assert talk(address, b"\x00\xff" * 1000)[:4] in (b"", b"HTTP")
    assert talk(address, b"GET /task HTTP/1.1\r\n" + b"a: b\r\n" * 10_000)[:12] in (b"", b"HTTP/1.1 431")
    # The rest of a request that was not read completely is not parsed as the next request.
    smuggled = b"GET /task HTTP/1.1\r\nAuthorization: Bearer " + credential.encode() + b"\r\n\r\n"
    head = f"POST /nowhere HTTP/1.1\r\nContent-Length: {len(smuggled)}\r\n\r\n".encode()
    assert talk(address, head + smuggled).count(b"HTTP/1.1 ") == 1
    # Afterwards the worker still works.
    assert status("GET", "/task") == 200
    print("unharmed")


def test_what_a_program_sends_cannot_harm_the_worker(client):
    words = [sys.executable, "-c", "from tests.test_interface import harm; harm()"]
    made = client.submit(mission_control.run, words, pure=False)
    assert client.submit(content_of, made, pure=False).result(120) == [b"unharmed\n"]
    del made
    until(lambda: is_clean(client), "nothing is left")


def test_a_credential_is_of_no_use_after_its_task(client):
    script = 'printf "%s %s" "$MISSION_CONTROL_SOCKET" "$MISSION_CONTROL_CREDENTIAL"'
    made = asked(client, script)
    address, credential = client.submit(content_of, made, pure=False).result(60)[0].decode().split()
    said = talk(address, f"GET /task HTTP/1.1\r\nAuthorization: Bearer {credential}\r\n\r\n".encode())
    assert said.startswith(b"HTTP/1.1 401 "), said
    assert os.stat(address).st_mode & 0o077 == 0


def test_a_program_of_a_stream_that_fails_says_why(client):
    script = "ask /stream/open -X POST > /dev/null; printf a | ask /stream/write --data-binary @-; echo no >&2; exit 3"
    failed = client.submit(read_all, asked(client, script, outputs=0), pure=False).exception(60)
    assert isinstance(failed, mission_control.StreamFailed) and "status 3: no" in str(failed)
    # An invalid request gets an answer with the reason, and curl ends with an error.
    error = asked(client, """ask /fetch -d '{"reference": 7}' >&2""").exception(60)
    assert isinstance(error, ProgramFailed) and "7 is no reference" in str(error)
    assert In(0)


KILLED = """
import os, signal
from mission_control.interface.server import Interface
print(Interface().folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_sockets_of_workers_that_were_killed_go_and_those_of_others_stay(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as own:  # a short path, as a socket's has to be
        monkeypatch.setattr(tempfile, "tempdir", own)
        sweep_in(Path(own))


def sweep_in(folder_of_all: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(folder_of_all)}
    dead, young = (
        subprocess.run([sys.executable, "-c", KILLED], env=environment, capture_output=True, text=True).stdout.strip()
        for _ in range(2)
    )
    old = time.time() - 2 * server.YOUNG_S
    other = server.Interface()
    for folder in (dead, str(other.folder)):
        os.utime(folder, (old, old))
    assert sorted(folder_of_all.iterdir()) == sorted(map(Path, (dead, young, other.folder)))
    last = server.Interface()
    assert sorted(folder_of_all.iterdir()) == sorted(map(Path, (young, other.folder, last.folder)))
    for own in (other, last):
        own.close()
    assert [str(folder) for folder in folder_of_all.iterdir()] == [young]
