"""Whether senders stand still together: traces of what arrived from each of two (paper 003, slide 14)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

TOGETHER = 0.1
"""Of a minimum RTO: two senders that go on within it of one another do so at once. Of two whose timeouts are drawn from
one to two RTOs it is to be expected in one case of five."""

Trace = Sequence[Sequence[float]]
"""Seconds, number of the sender, its bytes so far."""


def stalls(trace: Trace, sender: int, fragment: int, rto_s: float) -> list[tuple[float, float]]:
    """When a sender stood still for more than half an RTO in the middle of a fragment, and went on. Not counted: one
    that lost all it sent first looks as one that waits for the next request."""
    rows = [(seconds, count) for seconds, entry, count in trace if entry == sender]
    return [
        (begin, end)
        for (begin, count), (end, _) in itertools.pairwise(rows)
        if count % fragment and end - begin > rto_s / 2
    ]


def synchrony(trace: Trace, fragment: int, rto_s: float) -> dict[str, Any]:
    """Of the first two senders: ``stalls`` of both; ``together``: those during which the other stood still as well;
    ``at_once``: those of these after which both went on within :data:`TOGETHER` of an RTO."""
    one, other = (stalls(trace, sender, fragment, rto_s) for sender in (0, 1))
    together = [(a, b) for a in one for b in other if min(a[1], b[1]) > max(a[0], b[0])]
    at_once = sum(abs(a[1] - b[1]) <= TOGETHER * rto_s for a, b in together)
    return {"stalls": len(one) + len(other), "together": 2 * len(together), "at_once": 2 * at_once}
