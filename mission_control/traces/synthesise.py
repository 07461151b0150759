"""Synthesise traces: sampled from windows of another one, as in SWIM, or generated from a shape.

A **shape** has aggregates of a trace and none of its jobs: for jobs with and without a shuffle, their fraction, the
quantiles of their bytes and the correlations of these (of normal scores, a Gaussian copula); quantiles of gaps and of
jobs per hour. The package's shapes are in `shapes/`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from mission_control.errors import BadInput
from mission_control.traces.describe import HOUR_S, per_hour
from mission_control.traces.swim import BYTES_MAX, QUANTITIES, TraceJob

SHAPES = Path(__file__).parent / "shapes"
AT = (0, 0.01, 0.05, *(round(0.1 * tenth, 1) for tenth in range(1, 10)), 0.95, 0.99, 0.999, 1)
"""Quantiles in a shape."""
JOBS_MAX = 1_000_000
"""Most jobs of a synthesised trace."""
Shape = dict[str, Any]


def from_windows(source: Sequence[TraceJob], hours: float, seed: int, window_h: float = 1.0) -> list[TraceJob]:
    """Concatenate windows of a trace, sampled with replacement (Chen et al., MASCOTS 2011).

    Args:
        source: at least one job, in the order of submission.
        hours: length of the new trace; the last window is cut.
        window_h: hours of a window: jobs of a burst stay together, and so do jobs that were submitted at about the same
            time.

    Raises:
        BadInput: no sampled window has a job, or they have too many.
    """
    random = np.random.default_rng([seed, 1])
    first = source[0].submit_s
    times = np.array([job.submit_s - first for job in source])
    span = max(float(times[-1]), 1.0)
    length, end, begin = min(window_h * HOUR_S, span), hours * HOUR_S, 0.0
    found: list[TraceJob] = []
    while begin < end:
        # A window at the end of the source includes its last job, so that this is sampled as often as any other.
        start = random.uniform(0, span - length)
        low, high = np.searchsorted(times, [start, start + min(length, end - begin)], side="left")
        high += int(high == len(times) - 1 and start + length >= span)
        for index in range(low, high):
            at = begin + float(times[index]) - start
            found.append(replace(source[index], submit_s=round(at, 3)))
        check_count(len(found))
        begin += length
    return named(found)


def named(jobs: list[TraceJob]) -> list[TraceJob]:
    """Rename the jobs, because a job may occur twice.

    Raises:
        BadInput: there are no jobs.
    """
    if not jobs:
        raise BadInput("no job came into the new trace: give more --hours, or another --seed")
    jobs.sort(key=lambda job: job.submit_s)
    return [replace(job, name=f"job{number}") for number, job in enumerate(jobs)]


def check_count(count: int) -> None:
    """
    Raises:
        BadInput: there are more jobs than a synthesised trace may have.
    """
    if count > JOBS_MAX:
        raise BadInput(f"the new trace would have more than {JOBS_MAX} jobs: give fewer --hours")


def fit(jobs: Sequence[TraceJob], hosts: int, about: str) -> Shape:
    """Compute the shape of a trace.

    Args:
        jobs: at least some tens of jobs, in the order of submission.
        hosts: hosts of their cluster.
        about: origin of the trace, for readers.
    """
    classes = []
    for shuffles in (False, True):
        own = [job for job in jobs if bool(job.shuffle_bytes) == shuffles]
        if not own:
            continue
        names = [name for name in QUANTITIES if shuffles or name != "shuffle_bytes"]
        values = np.array([[getattr(job, name) for name in names] for job in own], float)
        scores = np.array([normal_scores(column) for column in values.T])
        together = np.corrcoef(scores) if len(own) > 2 else np.eye(len(names))
        classes.append(
            {
                "part": round(len(own) / len(jobs), 4),
                "quantiles": {name: rounded(np.quantile(values[:, at], AT)) for at, name in enumerate(names)},
                "correlations": np.nan_to_num(together, nan=0.0).round(2).tolist(),
            }
        )
    gaps = np.diff([job.submit_s for job in jobs]) if len(jobs) > 1 else np.ones(1)
    return {
        "about": about,
        "hosts": hosts,
        "at": list(AT),
        "jobs_per_hour": rounded(np.quantile(per_hour(jobs), AT)),
        "gaps_s": rounded(np.quantile(gaps, AT)),
        "classes": classes,
    }


def normal_scores(values: np.ndarray) -> np.ndarray:
    """Compute normal scores: for each value the normal quantile of its rank; equal values get their mean."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    normal = NormalDist()
    return np.array([normal.inv_cdf((rank - 0.5) / len(values)) for rank in ranks])


def rounded(values: Any) -> list[float]:
    """Round to three digits."""
    return [float(f"{value:.3g}") for value in values]


def shapes() -> list[str]:
    """Names of the shapes that come with the package."""
    return sorted(path.stem for path in SHAPES.glob("*.json"))


def load_shape(name: str) -> Shape:
    """Load a shape of the package.

    Raises:
        BadInput: there is no shape of this name.
    """
    if name not in shapes():
        raise BadInput(f"--shape {name}: unknown. Use {', '.join(shapes())}, or --from FILE.")
    shape: Shape = json.loads((SHAPES / f"{name}.json").read_text())
    return shape


def from_shape(shape: Shape, hours: float, seed: int) -> list[TraceJob]:
    """Generate a trace from a shape.

    Raises:
        BadInput: the time is too short for a job, or there would be too many.
    """
    random = np.random.default_rng([seed, 2])
    found: list[TraceJob] = []
    for hour in range(int(np.ceil(hours))):
        count = round(float(drawn(shape["jobs_per_hour"], shape["at"], random.random(1))[0]))
        check_count(len(found) + count)
        # One more gap than jobs, for the time after the last job. Scaling all gaps to an hour keeps bursts.
        gaps = np.maximum(drawn(shape["gaps_s"], shape["at"], random.random(count + 1)), 0.001)
        times = hour * HOUR_S + np.cumsum(gaps)[:-1] / gaps.sum() * HOUR_S
        kinds = random.choice(len(shape["classes"]), count, p=parts(shape))
        sizes = [of_class(one, shape["at"], count, random) for one in shape["classes"]]
        for index, (time, kind) in enumerate(zip(times, kinds, strict=True)):
            if time < hours * HOUR_S:
                found.append(TraceJob("", round(float(time), 3), *(int(value) for value in sizes[kind][index])))
    return named(found)


def parts(shape: Shape) -> np.ndarray:
    own = np.array([one["part"] for one in shape["classes"]])
    return own / own.sum()


def of_class(one: Shape, at: Sequence[float], count: int, random: np.random.Generator) -> np.ndarray:
    """Generate the bytes of jobs of a class: rows of input, shuffle, output."""
    names = list(one["quantiles"])
    together = np.array(one["correlations"])
    # Rounding of correlations may make an eigenvalue slightly negative.
    values, vectors = np.linalg.eigh(together)
    root = vectors * np.sqrt(np.maximum(values, 0))
    scores = random.standard_normal((count, len(names))) @ root.T
    chances = np.vectorize(NormalDist().cdf, otypes=[float])(scores) if count else scores
    sizes = np.zeros((count, len(QUANTITIES)))
    for column, name in enumerate(names):
        sizes[:, QUANTITIES.index(name)] = np.round(drawn(one["quantiles"][name], at, chances[:, column]))
    return sizes


def drawn(quantiles: Sequence[float], at: Sequence[float], chances: np.ndarray) -> np.ndarray:
    """Interpolate quantiles at these probabilities, on a logarithmic scale, because sizes span ten decades."""
    return np.expm1(np.interp(chances, at, np.log1p(quantiles)))


def for_hosts(jobs: Sequence[TraceJob], hosts: int, source_hosts: int) -> list[TraceJob]:
    """Scale jobs to another number of hosts, as SWIM does: bytes in proportion, times unchanged."""
    return [
        replace(job, **{name: min(BYTES_MAX, round(getattr(job, name) * hosts / source_hosts)) for name in QUANTITIES})
        for job in jobs
    ]
