"""The model of incast (`crates/core/src/incast.rs`), for Python."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from mission_control import _native
from mission_control.errors import BadInput

MODELS = "modern: fitted to kernels of today; paper: equations 1 to 4 of Chen et al. as printed"
TERMS = ("headers", "queue-in-rto", "recovery", "overlap", "backoff", "tail")
"""Terms of the modern model that the papers' models lack (`crates/core/src/incast/modern.rs`)."""
PAPER_003 = "paper-003"


def path(
    link: int,
    rtt_s: float,
    rto_s: float,
    buffer: int | str,
    mss: int = 1448,
    initial_window: int = 14480,
    sack: bool = True,
    fresh: bool = False,
) -> dict[str, Any]:
    """Make the path to one receiver, as the model takes it.

    Args:
        link: bits per second of the receiver's link.
        buffer: bytes of the port before the receiver, or ``paper-003``.
        mss: bytes of a full segment's payload; ``initial_window``: bytes of the initial window.
        sack: selective acknowledgments, and with them tail loss probes; for the modern model.
        fresh: each block uses new connections; for the modern model.
    """
    return {
        "link_bits_per_sec": link,
        "rtt_s": rtt_s,
        "rto_s": rto_s,
        "buffer": buffer if isinstance(buffer, str) else {"port": buffer},
        "mss": mss,
        "initial_window": initial_window,
        "sack": sack,
        "fresh": fresh,
    }


def predict(
    path: dict[str, Any],
    senders: Iterable[int],
    fragments: Iterable[int] = (),
    totals: Iterable[int] = (),
    equations: str = "modern",
    alpha: float = 1.0,
    wait_s: float = 0.0,
    without: Iterable[str] = (),
) -> dict[str, Any]:
    """Return ``rows`` (fragment_bytes, senders, goodput_mbit, ideal_mbit, regime) for each fragment and number of
    senders, and ``onset`` (bytes, value, low, high) for each fragment.

    Args:
        fragments: bytes of each sender for a block; ``totals``: of all together.
        alpha: fraction of an RTO in which the link is idle in a block after the onset (equation 4).
        wait_s: before each packet of a sender.
        without: terms of the modern model that are left out (:data:`TERMS`).

    Raises:
        BadInput: there is no such model, or the path is impossible.
    """
    question = {
        "path": path,
        "forms": [{"fragment": fragment} for fragment in fragments] + [{"total": total} for total in totals],
        "senders": list(senders),
        "model": equations,
        "alpha": alpha,
        "wait_s": wait_s,
        "without": list(without),
    }
    try:
        answer: dict[str, Any] = json.loads(_native.incast_predict(json.dumps(question)))
    except ValueError as error:
        raise BadInput(str(error)) from None
    return answer
