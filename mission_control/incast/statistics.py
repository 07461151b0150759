"""Statistics of synchronized reads: goodput with its interval, times of blocks."""

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
"""Samples of the bootstrap (Efron and Tibshirani 1993, 13.3: 1,000 or more for an interval)."""
AT_ONCE = 1 << 22
"""Random numbers that are generated at once: 32 MiB."""
BUSY = 0.95
"""Busy fraction from which a CPU counts as saturated."""
BUSY_MAX = 0.2
"""Largest fraction of samples in which a CPU may be saturated."""


def repeated(
    senders: list[str],
    reads: Reads,
    token: bytes,
    repeat: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure synchronized reads ``repeat`` times, each over new connections.

    Returns ``goodput_mbit`` (bytes of all blocks divided by their time), ``interval95``, ``block_ms`` (median, p95),
    ``blocks`` (seconds of each), ``flows`` (of each sender, summed; cwnd, srtt and the like from the last time),
    ``ended`` (why it ended early), ``trace`` (of the last time), ``interrupted``, ``valid``, ``invalid_because``.

    Args:
        say: called with the progress in words.

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
        # An interrupt during the callback also ends the reads; their result is kept.
        stopped = stopped or runs[-1]["ended"] == "interrupted"
        if runs[-1]["ended"]:
            break
    say("")
    busy = sum(look >= BUSY for look in looks) / len(looks) if looks else 0.0
    because = [f"a CPU of this host was saturated for {busy:.0%} of the time"] if busy > BUSY_MAX else []
    return {
        **summary(runs, reads.fragment * len(senders)),
        "interrupted": stopped,
        "valid": not because,
        "invalid_because": because,
    }


def summary(runs: Sequence[dict[str, Any]], block_bytes: int) -> dict[str, Any]:
    """Summarize several measurements with the same parameters; see :func:`repeated`."""
    blocks = [run["blocks"] for run in runs if run["blocks"]]
    pooled = [seconds for block in blocks for seconds in block]
    low, high = interval(blocks, block_bytes)
    # If a measurement ended early, its unfinished block counts with the bytes that arrived.
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
    """95 % interval of goodput in Mbit/s by the bootstrap: it samples measurements, and blocks of each. Neighbouring
    blocks are similar, so it samples runs of blocks; a run has the square root of their number (Künsch 1989)."""
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
    """Find which minimum RTO applies: ``asked`` (microseconds by origin, the strongest first), ``observed_us`` (the
    smallest difference between a sender's RTO and its round trip, RFC 6298, 2.3, without backoff), ``won``: the origin
    of the value nearest to that. ``None`` if no sender reported an RTO."""
    seen = [flow["rto_us"] - flow["srtt_us"] for flow in flows if flow["asked"] and flow["rto_us"] > flow["srtt_us"]]
    observed = min(seen, default=None)
    won = observed and min(asked, key=lambda who: abs(math.log(asked[who] / observed)), default=None)
    return {"asked": asked, "observed_us": observed, "won": won}


def resampled(seconds: NDArray[np.float64], times: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Sum samples of the seconds, ``times`` times; each sample has as many as there are, in runs."""
    length = max(1, int(len(seconds) ** 0.5))
    starts = random.integers(0, len(seconds), (times, -(-len(seconds) // length)))
    places = (starts[:, :, None] + np.arange(length)) % len(seconds)
    drawn: NDArray[np.float64] = seconds[places.reshape(times, starts.shape[1] * length)[:, : len(seconds)]].sum(axis=1)
    return drawn


COUNTS = ("bytes", "retransmits", "timeouts", "delivered", "marks", "loss_probes_of_host")


def flows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernel's values of each sender, with counters summed over the measurements."""
    result: dict[str, dict[str, Any]] = {}
    for run in runs:
        for flow in run["flows"]:
            before = result.get(flow["sender"], {})
            result[flow["sender"]] = {**flow, **{name: flow[name] + before.get(name, 0) for name in COUNTS}}
    return list(result.values())
