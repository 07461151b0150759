"""Output of a replay: lines, and sections of the report that reproduce figures 7, 8 and 9 of paper 000."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mission_control import _native
from mission_control.experiments import charts
from mission_control.experiments.compare import number
from mission_control.experiments.pieces import Piece, details, drawn, table, text
from mission_control.experiments.result import at_in_words
from mission_control.traces.describe import QUANTILES

SEQUENCE = 100
"""Jobs in a sequence, as in figure 9."""
SIZES = ("input", "shuffle", "output")


def lines(point: Any) -> list[str]:
    """Describe a replay in lines of text."""
    done = sum(job.ended_s is not None for job in point.jobs)
    found = [
        f"replay: {done} of {point.distortion['jobs']} jobs ended in {point.seconds or 0:.1f} s, at most "
        f"{point.under_way_max} at once",
        f"job time: {in_seconds(point.job_time_s)}",
        f"late: {point.late} jobs began more than 0.1 s after their time; {in_seconds(point.late_s)}",
    ]
    return found + distorted(point.distortion)


def in_seconds(quantiles: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g} s" for name, value in quantiles.items()) or "no job"


def distorted(found: Mapping[str, Any]) -> list[str]:
    """Describe the effects of scaling."""
    size, shuffling = _native.format_bytes, found["shuffling"]
    words = [
        f"bytes: times {found['factor']:.3g}; of {shuffling} jobs with a shuffle it is empty in "
        f"{found['shuffle_zero']} and below 1 KiB in {found['shuffle_small']}",
        f"cut: {found['cut']} jobs had more than {size(found['most'])}, {size(found['cut_bytes'])} in all are left out",
    ]
    for name, before in found["before"].items():
        after = found["after"][name]
        ends = ", ".join(f"{at} {size(before[at])} -> {size(after[at])}" for at in ("p50", "p90", "max"))
        words.append(f"{name.removesuffix('_bytes')}: {ends}")
    return words


def label_of(point: Any) -> str:
    """Name of a curve."""
    again = f"repetition {point.repetition + 1}" if point.repetition else ""
    return ", ".join(filter(None, [point.variant, at_in_words(point.at), again])) or point.world


def pieces(points: Sequence[Any]) -> list[Piece]:
    """Make the sections of one or several replays."""
    shown = {label_of(point): point for point in points if any(job.ended_s is not None for job in point.jobs)}
    if not shown:
        return []
    head = ("replay", "jobs", *(f"{name}, s" for name in QUANTILES), "late jobs", "late p99, s", "most at once")
    rows = []
    for name, point in shown.items():
        times = [number(point.job_time_s[own]) for own in QUANTILES]
        late = (point.late, number(point.late_s["p99"]), point.under_way_max)
        rows.append((name, len(ended(point)), *times, *late))
    found = [
        text("Job time: from when a job was due to its end.", head="Jobs:"),
        table(head, rows),
        text("Distribution of job times (paper 000, figure 8)."),
        drawn(times_cdf(shown)),
        text(f"Job times in the order of submission, the first {SEQUENCE} and the last (paper 000, figure 9)."),
        *(drawn(sequence(own)) for own in sequences(shown)),
        text("Jobs under way over time."),
        drawn(under_way(shown)),
    ]
    first = next(iter(shown.values()))
    found += [text(words, head="Scaling:" if not at else "") for at, words in enumerate(distorted(first.distortion))]
    found += [
        text(
            "Bytes of a job in the trace (dashed) and here (solid); jobs with none are not shown (paper 000, figure 7)."
        ),
        drawn(sizes_cdf(first)),
    ]
    for name, point in shown.items():
        found.append(details(f"Jobs of {name}", jobs_of(point)))
    return found


def jobs_of(point: Any) -> Piece:
    rows = []
    for job in point.jobs:
        times = [number(own) for own in (job.submitted_s, job.started_s, job.ended_s, job.seconds)]
        rows.append((job.name, *times, *(_native.format_bytes(job.bytes[name]) for name in SIZES)))
    return table(("job", "due, s", "began, s", "ended, s", "job time, s", *SIZES), rows)


def ended(point: Any) -> list[Any]:
    return [job for job in point.jobs if job.ended_s is not None]


def times_cdf(points: Mapping[str, Any]) -> str:
    times = {name: [max(job.seconds, 1e-3) for job in ended(point)] for name, point in points.items()}
    return charts.cdf(times, "jobs", "job time, seconds", log=True)


def sequences(points: Mapping[str, Any]) -> list[dict[str, list[tuple[int, float]]]]:
    """Return the first jobs of each replay, and the last if there are more: number in the order of submission,
    seconds."""
    every = {
        name: [(at, job.seconds) for at, job in enumerate(point.jobs, 1) if job.ended_s is not None]
        for name, point in points.items()
    }
    found = [{name: rows[:SEQUENCE] for name, rows in every.items()}]
    if any(len(rows) > SEQUENCE for rows in every.values()):
        found.append({name: rows[SEQUENCE:][-SEQUENCE:] for name, rows in every.items()})
    return found


def sequence(rows: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    figure, (axes,) = charts.figure(2.2, ylabel="job time, seconds", xlabel="job, in the order of submission")
    for index, (name, own) in enumerate(rows.items()):
        given: dict[str, Any] = {"color": charts.colour(index), "label": charts.label_of(name), "linewidth": 1}
        axes.plot([at for at, _ in own], [value for _, value in own], ".-", **given)
    axes.set_ylim(bottom=0)
    charts.named(axes, rows)
    return charts.svg(figure)


def under_way(points: Mapping[str, Any]) -> str:
    from mission_control.experiments.replay import under_way as counted

    figure, (axes,) = charts.figure(2.2, ylabel="jobs under way")
    for index, (name, point) in enumerate(points.items()):
        began = {job.name: job.started_s for job in point.jobs}
        rows = counted(began, {job.name: job.ended_s for job in ended(point)})
        given: dict[str, Any] = {"where": "post", "color": charts.colour(index), "label": charts.label_of(name)}
        axes.step(*zip(*rows, strict=True), **given)
    axes.set_ylim(bottom=0)
    charts.named(axes, points)
    return charts.svg(figure)


def sizes_cdf(point: Any) -> str:
    figure, (axes,) = charts.figure(2.6, ylabel="fraction of the jobs", xlabel="bytes of a job")
    for index, name in enumerate(SIZES):
        for source, dash in (("trace_bytes", "--"), ("bytes", "-")):
            values = [getattr(job, source)[name] for job in point.jobs]
            above = [value for value in values if value]
            if above:
                # Jobs without bytes lie left of the plot: the curve begins at their fraction.
                places = [1 - (len(above) - at) / len(values) for at in range(1, len(above) + 1)]
                label = name if dash == "-" else None
                axes.step(sorted(above), places, dash, where="post", color=charts.colour(index), label=label)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    charts.legend(axes)
    return charts.svg(figure)
