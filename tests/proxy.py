"""A TCP proxy that does to a connection what networks do: slow it, cut it, stall it, flip its bits."""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

Harm = Callable[[int, int, bytes], bytes | None]
"""Given number of the connection, offset and bytes of what is sent: the bytes to pass on, or `None` to cut."""


class Limit:
    """So many bytes per second, of all who share it: a receiver's link."""

    def __init__(self, bytes_per_sec: float):
        self.bytes_per_sec = bytes_per_sec
        self.lock = threading.Lock()
        self.allowed_at = time.monotonic()

    def wait(self, nbytes: int) -> None:
        with self.lock:
            # What was not used for 10 ms is gone: no burst makes up for a pause.
            self.allowed_at = max(self.allowed_at, time.monotonic() - 0.01) + nbytes / self.bytes_per_sec
            until = self.allowed_at
        time.sleep(max(0.0, until - time.monotonic()))


class Proxy:
    """Listens on loopback and passes on to ``target``; a context manager.

    Args:
        harm: what happens to the server's bytes.
        harm_requests: what happens to the client's bytes.
        limit: from the server to the clients, of all connections together, and of all proxies that share it.
    """

    def __init__(
        self, target: str, *, harm: Harm | None = None, harm_requests: Harm | None = None, limit: Limit | None = None
    ):
        host, port = target.rsplit(":", 1)
        self.target = (host, int(port))
        self.harm, self.harm_requests, self.limit = harm, harm_requests, limit
        self.trickles: Callable[[int], bool] = lambda number: False
        """Whether what the server says on a connection of this number comes in single bytes, two a second."""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.connections = 0
        self.passed = 0
        self.sockets: set[socket.socket] = set()
        self.lock = threading.Lock()

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        with self.lock:
            for entry in self.sockets:
                with suppress(OSError):
                    entry.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                number, self.connections = self.connections, self.connections + 1
                threading.Thread(target=self._serve, args=(number, client), daemon=True).start()

    def _serve(self, number: int, client: socket.socket) -> None:
        """Passes on both ways, and closes both sockets at the end: a process has few descriptors."""
        with client, suppress(OSError), socket.create_connection(self.target) as server:
            with self.lock:
                self.sockets.update((client, server))
            there = threading.Thread(
                target=self._pass, args=(number, client, server, self.harm_requests, None), daemon=True
            )
            there.start()
            self._pass(number, server, client, self.harm, self.limit)
            there.join()
            with self.lock:
                self.sockets.difference_update((client, server))

    def _pass(
        self, number: int, source: socket.socket, sink: socket.socket, harm: Harm | None, limit: Limit | None
    ) -> None:
        offset = 0
        with suppress(OSError):
            while piece := source.recv(16384 if limit else 262144):
                start, offset = offset, offset + len(piece)
                if harm is not None:
                    harmed = harm(number, start, piece)
                    if harmed is None:
                        reset(sink)
                        break
                    piece = harmed
                if limit:
                    limit.wait(len(piece))
                if harm is self.harm and self.trickles(number):
                    for byte in piece:
                        time.sleep(0.5)
                        sink.sendall(bytes([byte]))
                else:
                    sink.sendall(piece)
                self.passed += len(piece)
        for entry in (source, sink):
            with suppress(OSError):
                entry.shutdown(socket.SHUT_RDWR)


def reset(connection: socket.socket) -> None:
    """Ends a connection with a reset, as a crashed host's peer would see it.

    Closing it would wait for the thread that receives from it; dissolving it (``connect`` to no address) does not.
    """
    with suppress(OSError):
        no_address = struct.pack("H14x", socket.AF_UNSPEC)
        ctypes.CDLL(None).connect(connection.fileno(), no_address, len(no_address))


def flip(piece: bytes, bit: int) -> bytes:
    harmed = bytearray(piece)
    harmed[bit // 8] ^= 1 << (bit % 8)
    return bytes(harmed)
