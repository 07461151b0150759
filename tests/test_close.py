"""Closing a data plane ends its fetches, its server, and its granting of slots."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress

import pytest

from mission_control import _native
from tests.conftest import data, fetch, put, until
from tests.proxy import Proxy
from tests.test_strangers import cluster_name, taken


def test_a_fetch_that_runs_ends_when_its_data_plane_closes(endpoint):
    own, reader = endpoint(), endpoint()
    name, sizes = put(own, data(4 << 20), transport="tcp")
    over, errors = threading.Event(), []

    def stall(number: int, offset: int, piece: bytes) -> bytes:
        over.wait(60)
        return piece

    def read() -> None:
        try:
            fetch(reader, name, sizes, [proxy.address], transport="tcp")
        except _native.Cancelled as error:
            errors.append(str(error))

    with Proxy(own.address, harm=stall) as proxy:
        reads = threading.Thread(target=read)
        reads.start()
        until(lambda: json.loads(reader.resources())["fetching_connections"], "the fetch asks")
        reader.close()
        reads.join(20)
        assert not reads.is_alive()
        over.set()
    assert len(errors) == 1 and "is closing" in errors[0]
    with pytest.raises(RuntimeError, match="closed"):
        reader.resources()


def test_nobody_is_served_by_a_data_plane_that_closed(endpoint):
    own = endpoint()
    host, port = own.address.split(":")
    with socket.create_connection((host, int(port))) as stranger:
        own.close()
        stranger.settimeout(10)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b"", "the server left no connection open"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


def test_whoever_gave_out_the_slots_is_followed_by_another(endpoint):
    first = endpoint()
    until(lambda: json.loads(first.resources())["gives_out_slots"], "the first gives out the host's slots")
    own, reader = endpoint(), endpoint()
    until(lambda: json.loads(reader.resources())["has_neighbours"], "they know one another")
    first.close()
    name, sizes = put(own, data(9 << 20), transport="tcp")
    assert fetch(reader, name, sizes, [own.address], transport="tcp") == data(9 << 20).tobytes()
    until(
        lambda: any(json.loads(entry.resources())["gives_out_slots"] for entry in (own, reader)),
        "another gives out the slots",
    )


def test_other_threads_of_python_go_on_while_a_data_plane_is_set_up(endpoint):
    """Make a data plane that waits for the host's arbiter, here one that never answers."""
    token = b"a name that is taken"
    turns, over = 0, threading.Event()

    def turn() -> None:
        nonlocal turns
        while not over.wait(0.01):
            turns += 1

    turning = threading.Thread(target=turn)
    with taken(cluster_name(token) + "-slots-1"):
        turning.start()
        began = time.monotonic()
        endpoint(token)
        waited, seen = time.monotonic() - began, turns
        over.set()
        turning.join()
    # If a lock was held all the time, none of them could pass.
    assert seen > waited / 0.01 / 10, (waited, seen)
