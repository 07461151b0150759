"""Fit the model to a measured run: alpha, effective RTO and round trip, onset; and where it is not to be trusted."""

from __future__ import annotations

import tomllib
from pathlib import Path
from statistics import median
from typing import Any

from mission_control.errors import BadInput
from mission_control.experiments.engine import SCENARIO
from mission_control.experiments.points import variants_of
from mission_control.experiments.result import load
from mission_control.incast import model
from mission_control.incast.points import alpha, collapsed, path_of
from mission_control.scenario import validate

FEW, MOST = 0.1, 0.9
"""Fractions of stalled blocks: below the first and above the second, one effect dominates; between them chance
decides."""


def fit(folder: Path) -> dict[str, Any]:
    """Give ``curves``: for each ``variant`` and ``asked_bytes`` the ``onset``, ``rto_s`` (median of the senders'
    kernels), ``rtt_s`` (median time of unstalled blocks beyond that of their bytes), and ``points``: ``alpha``
    (equation 4's, of this point), ``alpha95`` (its 95 % interval, by the bootstrap over blocks), ``stalled`` (fraction
    of the blocks), ``model_mbit``, ``residual`` (of the model's goodput, as a fraction of the measured one), ``regime``
    (ideal, mixed, timeouts).

    Raises:
        BadInput: the folder is no incast run, or has no measured points.
    """
    result = load(folder)
    try:
        scenario = validate(tomllib.loads((folder / SCENARIO).read_text()))
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder} is no run of one scenario: name a folder results/<id> ({error})") from None
    points: list[Any] = [
        point for point in result.points if point.world == "lab" and point.valid and getattr(point, "blocks", None)
    ]
    if not points:
        raise BadInput(f"{folder} has no valid points that were measured: run an incast scenario --in lab")
    variants, summary = variants_of(scenario), []
    for variant, asked in dict.fromkeys((point.variant, point.asked_bytes) for point in points):
        own = [point for point in points if (point.variant, point.asked_bytes) == (variant, asked)]
        summary.append({"variant": variant, "asked_bytes": asked, **of_curve(own, path_of(variants[variant]))})
    return {"curves": summary}


def of_curve(points: list[Any], path: dict[str, Any]) -> dict[str, Any]:
    """See :func:`fit`."""
    rto_s = path["rto_s"]
    found, timeouts, trips = [], [], []
    for point in points:
        blocks, bits = point.blocks, point.senders * point.fragment_bytes * 8
        # The time of all bytes without loss; more is waiting.
        wire_s = bits / point.ideal_mbit / 1e6 - path["rtt_s"]
        stalled = [seconds for seconds in blocks if seconds > wire_s + rto_s / 2]
        rest = [seconds for seconds in blocks if seconds <= wire_s + rto_s / 2]
        timeouts += [flow["rto_us"] / 1e6 for flow in point.flows if flow["asked"]]
        trips += [seconds - wire_s for seconds in rest]
        part = len(stalled) / len(blocks)
        (row,) = model.predict(path, [point.senders], [point.fragment_bytes])["rows"]
        found.append(
            {
                "senders": point.senders,
                "alpha": alpha(point, point.goodput_mbit),
                "alpha95": point.interval_of("alpha"),
                "stalled": part,
                "goodput_mbit": point.goodput_mbit,
                "model_mbit": row["goodput_mbit"],
                "residual": row["goodput_mbit"] / point.goodput_mbit - 1,
                "regime": "ideal" if part < FEW else "timeouts" if part > MOST else "mixed: not to be trusted",
            }
        )
    late = [point.senders for point in points if collapsed(point)]
    return {
        "onset": min(late, default=None),
        "rto_s": median(timeouts) if timeouts else None,
        "rtt_s": max(0.0, median(trips)) if trips else 0.0,
        "points": found,
    }
