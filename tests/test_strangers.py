"""Processes that do not know the token: whatever they occupy or send, processes with the token continue."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time

from tests.conftest import TOKEN, data, fetch, put, tally, until

ADMISSION_S = 5


def cluster_name(token: bytes) -> str:
    """The name of a cluster, as the data plane derives it from the secret without revealing it."""

    return "mission-control-" + hashlib.sha256(b"mission-control cluster " + token).digest()[:8].hex()


def taken(name: str) -> socket.socket:
    """A listener with an abstract name that answers nobody."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen(1)
    return listener


def test_somebody_who_has_taken_the_arbiters_name_keeps_no_worker_from_starting_or_fetching(endpoint):
    token = b"a token of this test"
    with taken(cluster_name(token) + "-slots-1"):
        began = time.monotonic()
        own, reader = endpoint(token), endpoint(token)
        name, sizes = put(own, data(3 << 20))
        assert fetch(reader, name, sizes, [own.address]) == data(3 << 20).tobytes()
        assert time.monotonic() - began < 30
        assert json.loads(own.resources())["has_neighbours"]


def test_somebody_who_answers_in_place_of_an_owner_is_not_believed(endpoint):
    own, reader = endpoint(), endpoint()
    until(lambda: json.loads(own.resources())["has_neighbours"], "the reader joined the host")
    name, sizes = put(own, data(1 << 20))
    # Another address of the same server, under which nobody has a name yet.
    address = own.address.replace("127.0.0.1", "127.0.0.2")
    with taken(f"{cluster_name(TOKEN)}-{address}"):
        demands = json.dumps({"encrypt": "none", "transport": None})
        wanted = [(name, 0, sizes[0], [address, own.address])]
        parts, _, _ = reader.fetch("job", "map", "reduce", demands, wanted, False)
        assert bytes(parts[0]) == data(1 << 20).tobytes()


def test_strangers_that_say_nothing_or_little_are_closed_and_hold_nobody_up(endpoint):
    own, reader = endpoint(), endpoint()
    host, port = own.address.split(":")
    name, sizes = put(own, data(8 << 20))
    strangers = [socket.create_connection((host, int(port))) for _ in range(300)]
    trickles = socket.create_connection((host, int(port)))
    over = threading.Event()

    def trickle() -> None:
        for byte in b"GET /v1/" + b"0" * 1000:
            if over.wait(0.3):
                return
            try:
                trickles.send(bytes([byte]))
            except OSError:
                return

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        for _ in range(5):
            assert fetch(reader, name, sizes, [own.address], transport="tcp") == data(8 << 20).tobytes()
        assert tally(reader)["busy"] == 0
        assert json.loads(own.resources())["serving_connections"] < 100
        # Each connection has an absolute deadline to prove the token, however often it sends a byte.
        until(lambda: json.loads(own.resources())["serving_connections"] < 10, "they are closed", seconds=20)
    finally:
        over.set()
        thread.join()
        for stranger in (*strangers, trickles):
            stranger.close()


def test_a_client_that_guesses_is_closed_after_its_second_try(endpoint):
    own = endpoint()
    host, port = own.address.split(":")
    ask = b"GET /v1/%s/0 HTTP/1.1\r\nHost: mission\r\nRange: bytes=0-9\r\n" % (b"0" * 32)
    nonce = b"Mission-Nonce: %s\r\n" % (b"1" * 32)
    with socket.create_connection((host, int(port)), timeout=10) as stranger:
        stranger.sendall(ask + nonce + b"\r\n")
        assert b"401" in stranger.recv(4096).split(b"\r\n")[0]
        stranger.sendall(ask + b"Authorization: Mission %s\r\n\r\n" % (b"ab" * 32))
        answers = b""
        while chunk := stranger.recv(4096):
            answers += chunk
    assert answers.count(b"HTTP/1.1 401") == 1
