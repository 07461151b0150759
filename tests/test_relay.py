"""A man in the middle between two workers terminates their TLS sessions and begins others: both sides refuse."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress

import pytest
from distributed import Security

from mission_control import _native
from tests.conftest import data, fetch, put

OPPORTUNISTIC = "opportunistic.mission"
"""The name that a client requests if there are no certificates of the cluster (`crates/transport/src/tls.rs`)."""


class Relay:
    """Accepts connections with its own certificate, and forwards data to the server, also with TLS."""

    def __init__(self, target: str, folder):
        security = Security.temporary()
        for name in ("cert", "key"):
            (folder / name).write_text(getattr(security, f"tls_worker_{name}"))
        self.as_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.as_server.load_cert_chain(folder / "cert", folder / "key")
        self.as_client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.as_client.check_hostname, self.as_client.verify_mode = False, ssl.CERT_NONE
        host, port = target.split(":")
        self.target = (host, int(port))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.read = b""
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self.relay, args=(client,), daemon=True).start()

    def relay(self, client: socket.socket) -> None:
        with suppress(OSError):
            ours = self.as_server.wrap_socket(client, server_side=True)
            made = socket.create_connection(self.target)
            theirs = self.as_client.wrap_socket(made, server_hostname=OPPORTUNISTIC)
            back = threading.Thread(target=self.copy, args=(theirs, ours), daemon=True)
            back.start()
            self.copy(ours, theirs)

    def copy(self, source: ssl.SSLSocket, to: ssl.SSLSocket) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                self.read += piece
                to.sendall(piece)


def test_a_relay_that_ends_the_encryption_is_given_nothing(endpoint, tmp_path):
    own, reader = endpoint(), endpoint()
    content = data(1 << 20).tobytes()
    name, sizes = put(own, content, encrypt="opportunistic")
    relay = Relay(own.address, tmp_path)
    with pytest.raises(_native.TransferError, match="token"):
        fetch(reader, name, sizes, [relay.address], encrypt="opportunistic", transport="tls")
    # The relay has read the request and the challenge, but nothing of the answer.
    assert b"GET /v1/" in relay.read and b"401" in relay.read
    assert b" 206 " not in relay.read and content[:64] not in relay.read
    relay.listener.close()
    # Without the relay the workers continue as before.
    assert fetch(endpoint(), name, sizes, [own.address], encrypt="opportunistic", transport="tls") == content
