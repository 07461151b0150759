"""Synchronized reads over real sockets: the receiver requests a fragment from each sender, and the next block when the
last fragment has arrived (paper 000, figure 1)."""

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
"""Most connections that one sender serves at once."""
ANSWER_BYTES = 1 << 30
"""Most bytes of one request."""


@dataclass(frozen=True)
class Reads:
    """The parameters of a measurement.

    Args:
        fragment: bytes of each sender for each block.
        blocks: measured blocks; the ``warm_up`` blocks before them do not count.
        concurrent: senders that send at the same time, or ``all``, or ``auto``: the number with the highest goodput
            (`crates/core/src/budget.rs`).
        jitter_us: upper bound of a random delay of each request, in microseconds.
        rto_spread: upper bound of the random fraction by which each socket's minimum RTO is shortened.
        deadline_s: time limit in seconds; the result then has what was measured.
        rto_min_us: minimum RTO of the senders' sockets, in microseconds; a locked one of the route overrides it.
        pace: bits per second of each sender.
        ictcp_link: bits per second of the receiver's link, if its windows follow the link's free capacity
            (`crates/core/src/ictcp.rs`).
        fresh: each block uses new connections, which begin with the initial window; they are made before its time
            begins.
        traced: number of senders, from the first, whose arrivals ``trace`` records.
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
        """The parameters as the receiver takes them."""
        own = asdict(self)
        ask = {
            "congestion_control": own.pop("congestion_control"),
            "rto_min_us": own.pop("rto_min_us"),
            "pace_bits_per_sec": own.pop("pace"),
        }
        return json.dumps({"senders": senders, **own, "ask": ask})


def serve(address: str, port: int, token: bytes, pace: int | None = None) -> tuple[_native.IncastServer, int]:
    """Serve synthetic bytes in the network namespace of this thread; return the server and its port.

    Raises:
        OSError: the address is not available.
    """
    with closing(socket.create_server((address, port), backlog=CONNECTIONS)) as listener:
        own = listener.getsockname()[1]
        return _native.IncastServer(listener.detach(), token, CONNECTIONS, ANSWER_BYTES, pace), own


def measure(
    senders: list[str], reads: Reads, token: bytes, watch: Callable[[int], bool] = lambda _: False
) -> dict[str, Any]:
    """Read blocks from all senders (addresses with ports); return ``blocks`` (seconds of each), ``bytes``, ``seconds``,
    ``flows`` (counters of each sender's kernel), ``ended`` (why it ended early), ``trace`` (seconds, number of a
    sender, its bytes so far).

    Args:
        watch: called ten times a second with the number of blocks read; a true result ends the measurement.

    Raises:
        ConnectionError: a sender cannot be reached, or refuses; names it.
        BadInput: a parameter is out of range.
    """
    try:
        found = _native.incast_measure(reads.as_json([resolved(sender) for sender in senders]), token, watch)
    except ValueError as error:
        raise BadInput(str(error)) from None
    result: dict[str, Any] = json.loads(found)
    return result


def resolved(sender: str) -> str:
    """Resolve HOST:PORT to an address and a port.

    Raises:
        ConnectionError: the host is unknown.
    """
    host, _, port = sender.rpartition(":")
    try:
        return f"{socket.gethostbyname(host)}:{port}"
    except OSError as error:
        raise ConnectionError(f"sender {sender}: {error.strerror or error}") from None
