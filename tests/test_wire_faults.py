"""Faults on the way of a range, and their handling: real sockets, and a proxy that injects the faults."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from contextlib import suppress

import pytest

from mission_control import _native
from tests.conftest import TOKEN, data, fetch, put, tally
from tests.proxy import Proxy, flip

SIZE = 6 << 20
CHUNK = 4 << 20


@pytest.fixture
def owner(endpoint):
    own = endpoint()
    content = data(SIZE)
    name, sizes = put(own, content)
    return own, name, sizes, content.tobytes()


def test_a_reset_connection_resumes_its_range(owner, endpoint):
    own, name, sizes, content = owner

    starts = []

    def cut(number: int, offset: int, piece: bytes) -> bytes | None:
        if number < 2 and offset > 1 << 20:
            time.sleep(0.5)  # a reset discards data under way
            return None
        return piece

    def look(number: int, offset: int, piece: bytes) -> bytes:
        starts.extend(int(start) for start in re.findall(rb"Range: bytes=(\d+)-", piece))
        return piece

    reader = endpoint()
    with Proxy(own.address, harm=cut, harm_requests=look) as proxy:
        assert fetch(reader, name, sizes, [proxy.address]) == content
    assert tally(reader)["resumed"] >= 2
    # The verified bytes of the broken ranges were not requested again.
    assert any(start % CHUNK for start in starts), starts


def test_a_stalled_connection_resumes_its_range(owner, endpoint):
    own, name, sizes, content = owner
    forever = threading.Event()

    def stall(number: int, offset: int, piece: bytes) -> bytes:
        if number == 0 and offset > 1 << 20:
            forever.wait(60)
        return piece

    reader = endpoint()
    with Proxy(own.address, harm=stall) as proxy:
        assert fetch(reader, name, sizes, [proxy.address]) == content
        forever.set()
    assert tally(reader)["resumed"] >= 1


@pytest.mark.parametrize("where", ["payload", "status", "length", "checksums", "request"])
def test_a_flipped_bit_is_found_and_the_range_fetched_again(owner, endpoint, where):
    own, name, sizes, content = owner
    flipped = []

    def harm(number: int, offset: int, piece: bytes) -> bytes:
        # The first answer of a connection is the challenge; the second carries the range.
        marks = {
            "payload": b"\r\n\r\n",
            "status": b"206",
            "length": b"Content-Length: ",
            "checksums": b"Mission-Blocks: ",
        }
        mark = marks.get(where)
        if mark is None or flipped or (at := piece.find(b"HTTP/1.1 206")) < 0:
            return piece
        place = piece.index(mark, at) + len(mark) + (3000 if where == "payload" else 0)
        flipped.append(place)
        return flip(piece, 8 * (place - (1 if where == "status" else 0)))

    def harm_requests(number: int, offset: int, piece: bytes) -> bytes:
        if where != "request" or flipped or b"bytes=" not in piece:
            return piece
        flipped.append(offset)
        return flip(piece, 8 * piece.index(b"bytes=") + 8 * 6)

    reader = endpoint()
    with Proxy(own.address, harm=harm, harm_requests=harm_requests) as proxy:
        assert fetch(reader, name, sizes, [proxy.address]) == content
    assert flipped
    record = tally(reader)
    assert record["refetches"] == 1, record


def test_data_that_is_always_damaged_is_an_error_that_says_so(owner, endpoint):
    own, name, sizes, _ = owner
    with (
        Proxy(
            own.address, harm=lambda _, offset, piece: flip(piece, 8 * (len(piece) - 1)) if offset > 5000 else piece
        ) as proxy,
        pytest.raises(_native.Damaged, match="checksum"),
    ):
        fetch(endpoint(), name, sizes, [proxy.address])


def test_another_location_is_tried_where_one_is_gone(owner, endpoint):
    own, name, sizes, content = owner
    gone = endpoint()
    assert fetch(endpoint(), name, sizes, [gone.address, own.address]) == content


def exchange(address: str, request: bytes) -> bytes:
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request)
        connection.settimeout(10)
        answer = b""
        with suppress(ConnectionResetError):
            while b"\r\n\r\n" not in answer and (piece := connection.recv(65536)):
                answer += piece
    return answer


def test_the_server_gives_nothing_to_strangers(owner):
    own, name, _, _ = owner
    asked = f"GET /v1/{name}/0 HTTP/1.1\r\nRange: bytes=0-99\r\n"
    assert b" 401 " in exchange(own.address, f"{asked}\r\n".encode())
    assert b" 401 " in exchange(own.address, f"{asked}Authorization: Mission {'0' * 64}\r\n\r\n".encode())
    for path in ("/etc/passwd", "/v1/../../etc/passwd", "/v1/%2e%2e/0", f"/v1/{name}/../x"):
        assert b" 404 " in exchange(own.address, f"GET {path} HTTP/1.1\r\nRange: bytes=0-9\r\n\r\n".encode())
    assert b" 405 " in exchange(own.address, b"DELETE /v1/x HTTP/1.1\r\n\r\n")
    assert exchange(own.address, b"GET /" + b"a" * 40_000) == b"", "an oversized head ends the connection"


def test_ranges_beyond_the_end_and_unknown_objects_are_refused(owner, endpoint):
    own, name, sizes, _ = owner
    with pytest.raises(_native.Denied, match="range"):
        fetch(endpoint(), name, [sizes[0] + 1], [own.address])
    with pytest.raises(_native.Lost, match="no such object"):
        fetch(endpoint(), "11" * 16, [10], [own.address])


def test_a_wrong_token_is_refused_and_the_token_is_never_sent(owner, endpoint):
    own, name, sizes, content = owner
    heard = b""

    def listen(number: int, offset: int, piece: bytes) -> bytes:
        nonlocal heard
        heard += piece[:4096]
        return piece

    with Proxy(own.address, harm=listen, harm_requests=listen) as proxy:
        with pytest.raises(_native.Denied, match="token"):
            fetch(endpoint(token=b"another"), name, sizes, [proxy.address])
        assert fetch(endpoint(), name, sizes, [proxy.address]) == content
    assert TOKEN not in heard and TOKEN.hex().encode() not in heard


def test_encrypted_bytes_cannot_be_read_on_the_wire(endpoint):
    own, reader = endpoint(), endpoint()
    secret = b"a secret that repeats itself. " * 10_000
    name, sizes = put(own, secret, "opportunistic")
    heard = bytearray()

    def listen(number: int, offset: int, piece: bytes) -> bytes:
        heard.extend(piece)
        return piece

    with Proxy(own.address, harm=listen) as proxy:
        assert fetch(reader, name, sizes, [proxy.address], encrypt="opportunistic") == secret
    assert len(heard) > len(secret) and b"secret" not in heard
    (agreed,) = tally(reader)["transport"]["negotiated"]
    assert agreed["tls"].startswith("TLSv1_3") and not agreed["authenticated"]


def test_a_full_spool_disk_is_a_clear_error_and_nothing_of_it_is_served(tmp_path):
    import subprocess
    import sys

    # A limit on file sizes simulates a full disk without root.
    script = f"""
import json, resource
from tests.conftest import put
from mission_control import _native
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
own = _native.Endpoint("127.0.0.1", b"t", memory_limit=0, spool_folder={str(tmp_path)!r}, flows_per_host=2)
put(own, b"x" * 1000)
try:
    put(own, b"y" * (4 << 20))
except OSError as error:
    print(json.dumps([str(error), json.loads(own.resources())]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    error, left = json.loads(done.stdout)
    assert "the spool disk is full" in error and "free space" in error
    assert (left["objects"], left["spooled_bytes"], left["live_bytes"]) == (1, 1000, 0)


@pytest.mark.parametrize("places", [[100_000], [70_000, 300_000, 1_500_000]])
def test_a_flipped_bit_of_an_encrypted_stream_is_found(owner, endpoint, places):
    own, name, sizes, content = owner
    left, damaged = list(places), set()

    def harm(number: int, offset: int, piece: bytes) -> bytes:
        # Each on another connection: the first damage ends a session.
        if left and number not in damaged and offset <= left[0] < offset + len(piece):
            damaged.add(number)
            return flip(piece, 8 * (left.pop(0) - offset))
        return piece

    reader = endpoint()
    with Proxy(own.address, harm=harm) as proxy:
        assert fetch(reader, name, sizes, [proxy.address], transport="tls") == content
    assert not left
    record = tally(reader)
    assert record["refetches"] + record["resumed"] >= len(places), record
