"""Correlations between variables of the state of TCP over time.

Paper 003, slide 17: "Out of the many TCP state variables, only a small subset has strong correlations to each other."
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LOOK_S = 0.005
"""Seconds between samples: half of a round trip at the papers' operating point with a dilation of ten."""
LOOKS_MIN = 30
"""Fewest samples of a sender for a meaningful correlation."""
STRONG = 0.7
"""Smallest absolute rank correlation that counts as strong: each explains half of the other's variance (0.7
squared)."""


class Looks:
    """Samples the senders' TCP variables while they have data under way."""

    def __init__(self, senders: Sequence[Any]):
        self.senders = senders
        self.seen: list[list[dict[str, int]]] = [[] for _ in senders]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="variables of TCP", daemon=True)

    def __enter__(self) -> Looks:
        if self.senders:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.senders:
            self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            for seen, sender in zip(self.seen, self.senders, strict=True):
                # One connection of a sender has data under way: the one of this block.
                for look in json.loads(sender.variables())[:1]:
                    del look["acked_bytes"]  # a counter that only grows
                    seen.append(look)


def correlations(seen: Sequence[Sequence[dict[str, int]]]) -> dict[str, Any] | None:
    """Compute rank correlations (Spearman 1904) of each pair of variables, as means over senders.

    Args:
        seen: for each sender the samples of its variables.

    Returns:
        ``variables``; ``rank``: a row and a column for each, ``None`` where one never changed; ``looks``: samples;
        ``pairs``: pairs with a correlation; ``strong``: those of at least :data:`STRONG`, the strongest first.
        ``None``: no sender has enough samples.
    """
    known = [sender for sender in seen if len(sender) >= LOOKS_MIN]
    if not known:
        return None
    names = list(known[0][0])
    each = [spearman(np.array([[look[name] for name in names] for look in sender], float)) for sender in known]
    counts = np.sum(~np.isnan(each), axis=0)
    mean = np.where(counts > 0, np.nansum(each, axis=0) / np.maximum(counts, 1), np.nan)
    above = [(float(mean[a, b]), names[a], names[b]) for a, b in zip(*np.triu_indices(len(names), 1), strict=True)]
    pairs = [one for one in above if not np.isnan(one[0])]
    strong = sorted((one for one in pairs if abs(one[0]) >= STRONG), key=lambda one: -abs(one[0]))
    rank = [[None if np.isnan(value) else round(float(value), 3) for value in row] for row in mean]
    return {
        "variables": names,
        "rank": rank,
        "looks": sum(map(len, known)),
        "pairs": len(pairs),
        "strong": [{"of": a, "with": b, "rank": round(value, 3)} for value, a, b in strong],
    }


def spearman(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute rank correlations of columns; NaN where one of the two never changes."""
    ranks = np.column_stack([ranked(column) for column in rows.T])
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.corrcoef(ranks, rowvar=False))


def ranked(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute ranks; equal values have the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[place])
