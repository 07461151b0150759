"""A TCP proxy that injects faults of networks: slow, cut or stalled connections, and flipped bits."""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

Harm = Callable[[int, int, bytes], bytes | None]
"""A function of the number of the connection, the offset and the bytes; returns the bytes to forward, or `None` to
cut."""


class Limit:
    """A limit in bytes per second for all that share it: a receiver's link."""

    def __init__(self, bytes_per_sec: float):
        self.bytes_per_sec = bytes_per_sec
        self.lock = threading.Lock()
        self.allowed_at = time.monotonic()

    def wait(self, nbytes: int) -> None:
        with self.lock:
            # Unused capacity expires after 10 ms, so no burst compensates a pause.
            self.allowed_at = max(self.allowed_at, time.monotonic() - 0.01) + nbytes / self.bytes_per_sec
            until = self.allowed_at
        time.sleep(max(0.0, until - time.monotonic()))


class Proxy:
    """Listens on loopback and forwards to ``target``; a context manager.

    Args:
        harm: harm of the server's bytes.
        harm_requests: harm of the client's bytes.
        limit: from the server to the clients, of all connections together, and of all proxies that share it.
    """

    def __init__(
        self, target: str, *, harm: Harm | None = None, harm_requests: Harm | None = None, limit: Limit | None = None
    ):
        host, port = target.rsplit(":", 1)
        self.target = (host, int(port))
        self.harm, self.harm_requests, self.limit = harm, harm_requests, limit
        self.trickles: Callable[[int], bool] = lambda number: False
        """Whether the server's bytes on this connection are forwarded one by one, two a second."""
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
        """Forward in both directions, and close both sockets at the end, because descriptors are few."""
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
    """End a connection with a reset, as a peer of a crashed host sees it.

    Closing it would wait for the thread that receives from it; dissolving it (``connect`` to no address) does not.
    """
    with suppress(OSError):
        no_address = struct.pack("H14x", socket.AF_UNSPEC)
        ctypes.CDLL(None).connect(connection.fileno(), no_address, len(no_address))


def flip(piece: bytes, bit: int) -> bytes:
    harmed = bytearray(piece)
    harmed[bit // 8] ^= 1 << (bit % 8)
    return bytes(harmed)
