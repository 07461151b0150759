"""Synchronized reads over real sockets: the receiver asks all senders for a fragment each, and for the next block when
the last fragment is there (paper 000, figure 1)."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mission_control import _native
from mission_control.errors import BadInput

CONNECTIONS = 256
"""That one sender serves at once."""
ANSWER_BYTES = 1 << 30
"""Most that is sent for one request."""


@dataclass(frozen=True)
class Reads:
    """What is to be measured.

    Args:
        fragment: bytes of each sender for each block.
        blocks: that count; ``warm_up`` before them do not.
        concurrent: senders that are asked at once, the next one when one is done; or ``all``, or ``auto``: as many as
            bring most (`crates/core/src/budget.rs`).
        jitter_us: requests are put off by a random time of up to so many microseconds.
        rto_spread: each socket's minimum RTO is shorter by a random part of it, up to this.
        deadline_s: everything ends after so many seconds, with what was measured.
        rto_min_us: minimum RTO of the senders' sockets, in microseconds; a route that locks it wins.
        pace: bits per second of each sender.
        ictcp_link: bits per second of the receiver's link, where its windows follow what is left of it
            (`crates/core/src/ictcp.rs`).
        fresh: each block is asked for over new connections, so that each begins with the initial window; they are made
            before its time begins.
        traced: of how many senders, from the first, ``trace`` tells what arrived when.
    """

    fragment: int
    blocks: int = 100
    warm_up: int = 10
    concurrent: int | Literal["all", "auto"] = "all"
    jitter_us: int = 0
    rto_spread: float = 0.0
    seed: int = 1
    deadline_s: float = 60.0
    congestion_control: str | None = None
    rto_min_us: int | None = None
    pace: int | None = None
    ictcp_link: int | None = None
    fresh: bool = False
    traced: int = 0

    def as_json(self, senders: list[str]) -> str:
        """As the receiver is told."""
        own = asdict(self)
        ask = {
            "congestion_control": own.pop("congestion_control"),
            "rto_min_us": own.pop("rto_min_us"),
            "pace_bits_per_sec": own.pop("pace"),
        }
        return json.dumps({"senders": senders, **own, "ask": ask})


def serve(address: str, port: int, token: bytes, pace: int | None = None) -> tuple[_native.IncastServer, int]:
    """Serves synthetic bytes, in the network namespace of this thread; gives the server and its port.

    Raises:
        OSError: the address cannot be had.
    """
    with closing(socket.create_server((address, port), backlog=CONNECTIONS)) as listener:
        own = listener.getsockname()[1]
        return _native.IncastServer(listener.detach(), token, CONNECTIONS, ANSWER_BYTES, pace), own


def measure(
    senders: list[str], reads: Reads, token: bytes, watch: Callable[[int], bool] = lambda _: False
) -> dict[str, Any]:
    """Reads blocks from all senders (addresses with ports); gives ``blocks`` (seconds of each), ``bytes``, ``seconds``,
    ``flows`` (what each sender's kernel says), ``ended`` (why it ended early), ``trace`` (seconds, number of a sender,
    its bytes so far).

    Args:
        watch: is told how many blocks were read, ten times a second; ends it by a true answer.

    Raises:
        ConnectionError: a sender cannot be reached, or does not want to; names it.
        BadInput: a number that cannot be.
    """
    try:
        found = _native.incast_measure(reads.as_json([resolved(sender) for sender in senders]), token, watch)
    except ValueError as error:
        raise BadInput(str(error)) from None
    result: dict[str, Any] = json.loads(found)
    return result


def resolved(sender: str) -> str:
    """Address and port of HOST:PORT.

    Raises:
        ConnectionError: nobody knows the host.
    """
    host, _, port = sender.rpartition(":")
    try:
        return f"{socket.gethostbyname(host)}:{port}"
    except OSError as error:
        raise ConnectionError(f"sender {sender}: {error.strerror or error}") from None
