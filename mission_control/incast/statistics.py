"""What synchronized reads come to: goodput with its interval, times of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from mission_control import interrupts
from mission_control.incast.reads import Reads, measure

DRAWS = 2000
"""Of the bootstrap (Efron and Tibshirani 1993, 13.3: 1,000 or more for an interval)."""
AT_ONCE = 1 << 22
"""Numbers that are drawn at once: 32 MiB."""
BUSY = 0.95
"""Of a processor: saturated."""
BUSY_MAX = 0.2
"""Of the looks at the processors, that may find one saturated."""


def repeated(
    senders: list[str],
    reads: Reads,
    token: bytes,
    repeat: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Synchronized reads, ``repeat`` times over new connections.

    Gives ``goodput_mbit`` (bytes of all blocks over their time), ``interval95``, ``block_ms`` (median, p95), ``blocks``
    (seconds of each), ``flows`` (of each sender, summed; cwnd, srtt and the like from the last time), ``ended`` (why it
    ended early), ``trace`` (of the last time), ``interrupted``, ``valid``, ``invalid_because``.

    Args:
        say: is told how far it is.

    Raises:
        ConnectionError: a sender cannot be reached at all.
    """
    runs: list[dict[str, Any]] = []
    looks: list[float] = []
    psutil.cpu_percent(percpu=True)
    stopped = False

    def watch(blocks: int) -> bool:
        nonlocal stopped
        looks.append(max(psutil.cpu_percent(percpu=True)) / 100)
        say(f"repetition {len(runs) + 1} of {repeat}: {blocks} of {reads.warm_up + reads.blocks} blocks")
        try:
            interrupts.check()
        except KeyboardInterrupt:
            stopped = True
        return stopped

    for _ in range(repeat):
        runs.append(measure(senders, reads, token, watch))
        # An interrupt that came into the call to Python ends it too, with what was measured.
        stopped = stopped or runs[-1]["ended"] == "interrupted"
        if runs[-1]["ended"]:
            break
    say("")
    busy = sum(look >= BUSY for look in looks) / len(looks) if looks else 0.0
    because = [f"a processor of this host was saturated for {busy:.0%} of the time"] if busy > BUSY_MAX else []
    return {
        **summary(runs, reads.fragment * len(senders)),
        "interrupted": stopped,
        "valid": not because,
        "invalid_because": because,
    }


def summary(runs: Sequence[dict[str, Any]], block_bytes: int) -> dict[str, Any]:
    """What several measurements of the same say together; see :func:`repeated`."""
    blocks = [run["blocks"] for run in runs if run["blocks"]]
    pooled = [seconds for block in blocks for seconds in block]
    low, high = interval(blocks, block_bytes)
    # Where a measurement ended early, the block that it waited for counts, too, as far as it had come.
    early = [run for run in runs if run["ended"] or not run["blocks"]]
    whole = [block for run in runs if run not in early for block in run["blocks"]]
    seconds = sum(whole) + sum(run["seconds"] for run in early)
    moved = len(whole) * block_bytes + sum(run["bytes"] for run in early)
    result = {
        "goodput_mbit": moved * 8 / seconds / 1e6 if seconds else None,
        "interval95": [low, high] if pooled and not early else None,
        "blocks": pooled,
        "flows": flows(runs),
        "limits": runs[-1].get("limits", []) if runs else [],
        "trace": runs[-1].get("trace", []) if runs else [],
        "ended": next((run["ended"] for run in runs if run["ended"]), None),
    }
    if pooled:
        result["block_ms"] = {"median": float(np.median(pooled)) * 1e3, "p95": float(np.quantile(pooled, 0.95)) * 1e3}
    return result


def interval(blocks: Sequence[Sequence[float]], block_bytes: int) -> tuple[float, float]:
    """95 % interval of goodput in Mbit/s by the bootstrap: measurements are drawn, and of each its blocks. Neighbours
    among blocks are alike, and so are drawn in runs of their number's square root (Künsch 1989)."""
    if not blocks:
        return 0.0, 0.0
    random = np.random.default_rng(1)
    total, count = np.zeros(DRAWS), np.zeros(DRAWS)
    for _ in blocks:
        drawn = random.integers(0, len(blocks), DRAWS)
        for at, block in enumerate(blocks):
            seconds = np.asarray(block)
            for rows in np.array_split(np.flatnonzero(drawn == at), -(-DRAWS * len(block) // AT_ONCE)):
                total[rows] += resampled(seconds, len(rows), random)
            count[drawn == at] += len(block)
    means = count * block_bytes * 8 / total / 1e6
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def rto_min(flows: Sequence[dict[str, Any]], asked: dict[str, int]) -> dict[str, Any]:
    """Which minimum RTO counts: ``asked`` (microseconds, by who gives it, the strongest first), ``observed_us`` (the
    least that a sender's RTO is above its round trip, RFC 6298, 2.3: without backing off), ``won``: who gave the value
    that is nearest to that. ``None`` where no sender has said."""
    seen = [flow["rto_us"] - flow["srtt_us"] for flow in flows if flow["asked"] and flow["rto_us"] > flow["srtt_us"]]
    observed = min(seen, default=None)
    won = observed and min(asked, key=lambda who: abs(math.log(asked[who] / observed)), default=None)
    return {"asked": asked, "observed_us": observed, "won": won}


def resampled(seconds: NDArray[np.float64], times: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Sums of as many seconds as there are, drawn in runs, so many times."""
    length = max(1, int(len(seconds) ** 0.5))
    starts = random.integers(0, len(seconds), (times, -(-len(seconds) // length)))
    places = (starts[:, :, None] + np.arange(length)) % len(seconds)
    drawn: NDArray[np.float64] = seconds[places.reshape(times, starts.shape[1] * length)[:, : len(seconds)]].sum(axis=1)
    return drawn


COUNTS = ("bytes", "retransmits", "timeouts", "delivered", "marks", "loss_probes_of_host")


def flows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each sender what its kernel said, counts summed over the measurements."""
    result: dict[str, dict[str, Any]] = {}
    for run in runs:
        for flow in run["flows"]:
            before = result.get(flow["sender"], {})
            result[flow["sender"]] = {**flow, **{name: flow[name] + before.get(name, 0) for name in COUNTS}}
    return list(result.values())
