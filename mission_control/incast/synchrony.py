"""Whether senders stall together, from traces of the arrivals from two (paper 003, slide 14)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

TOGETHER = 0.1
"""Fraction of a minimum RTO: two senders that resume within it resume together. If their timeouts are random between
one and two RTOs, that happens in one case of five."""

Trace = Sequence[Sequence[float]]
"""Seconds, number of the sender, its bytes so far."""


def stalls(trace: Trace, sender: int, fragment: int, rto_s: float) -> list[tuple[float, float]]:
    """Find when a sender stalled for more than half an RTO in the middle of a fragment, and resumed. A sender whose
    first packets were all lost does not count: it looks like one that waits for the next request."""
    rows = [(seconds, count) for seconds, entry, count in trace if entry == sender]
    return [
        (begin, end)
        for (begin, count), (end, _) in itertools.pairwise(rows)
        if count % fragment and end - begin > rto_s / 2
    ]


def synchrony(trace: Trace, fragment: int, rto_s: float) -> dict[str, Any]:
    """Compare the first two senders: ``stalls`` of both; ``together``: those during which the other stalled, too;
    ``at_once``: those of these after which both resumed within :data:`TOGETHER` of an RTO."""
    one, other = (stalls(trace, sender, fragment, rto_s) for sender in (0, 1))
    together = [(a, b) for a in one for b in other if min(a[1], b[1]) > max(a[0], b[0])]
    at_once = sum(abs(a[1] - b[1]) <= TOGETHER * rto_s for a, b in together)
    return {"stalls": len(one) + len(other), "together": 2 * len(together), "at_once": 2 * at_once}
