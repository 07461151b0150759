"""Figures of reports, each as SVG."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mission_control.experiments.compare import RATES, TIMES, undilated
from mission_control.experiments.result import Overhead, Point, Summary, at_in_words
from mission_control.lab.watch import MOVING
from mission_control.map_reduce.phases import PHASES

NAMED_MAX = 16
"""Lines that a legend names; more would leave no room for the drawing."""
DRAWN_MAX = 3000
"""Tasks whose phases are drawn; more would take a browser seconds, and nobody would see them."""
COLOURS = ("#2463b5", "#d2691e", "#2e8b57", "#8a4fbe", "#b8860b", "#a3201d", "#4c8c8c", "#6b7280")
DASHES = {"model": "--", "lab": "-"}
Record = dict[str, Any]


def figure(height: float = 2.6, rows: int = 1, ylabel: str = "", xlabel: str = "seconds") -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, height), layout="constrained")
    every = list(drawn.subplots(rows, sharex=True, squeeze=False)[:, 0])
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
    every[-1].set_xlabel(xlabel)
    every[0].set_ylabel(ylabel)
    return drawn, every


def label_of(text: str) -> str:
    """A name that people gave, as a label: Matplotlib takes what stands between two `$` for a formula."""
    return text.replace("$", r"\$")


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def svg(drawn: Any) -> str:
    text = io.StringIO()
    drawn.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


ABOVE: dict[str, Any] = {"frameon": False, "loc": "lower center", "bbox_to_anchor": (0.5, 1)}
"""Where a legend does not hide what is drawn."""


class Series:
    """Progress over time: of each job the bytes served, of each worker the processor time."""

    def __init__(self, records: list[Record]):
        progress = [record for record in records if record["kind"] == "progress"]
        self.start = min((record["time"] for record in progress), default=0.0)
        self.end = max((record["time"] for record in progress), default=0.0) - self.start
        self.width = max(0.25, self.end / 80)
        self.jobs: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.stages: dict[tuple[str, str, str], list[float]] = {}
        self.cpu: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.weights: dict[str, list[tuple[float, float]]] = defaultdict(list)
        served: dict[tuple[str, ...], float] = {}
        totals: dict[str, float] = defaultdict(float)
        for record in progress:
            now = record["time"] - self.start
            key = (record["worker"], record["job"], record["from"], record["to"])
            totals[record["job"]] += record["served_bytes"] - served.get(key, 0)
            served[key] = record["served_bytes"]
            self.jobs[record["job"]].append((now, totals[record["job"]]))
            self.stages.setdefault(key[1:], [now, now])[1] = now
            self.cpu[record["worker"]].append((now, record["cpu"]))
        for record in records:
            if record["kind"] == "decision" and record["command"] == "weights":
                for job in self.jobs:
                    of_job = sum(own["weight"] for own in record["transfers"] if own["job"] == job)
                    self.weights[job].append((record["time"] - self.start, of_job))

    def bins(self, points: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Increase per second of a growing total, in bins of ``width`` seconds."""
        count = max(1, int(self.end / self.width) + 1)
        bins, before = [0.0] * count, points[0][1] if points else 0.0
        for at, total in points:
            bins[min(count - 1, int(at / self.width))] += total - before
            before = total
        return [((index + 0.5) * self.width, value / self.width) for index, value in enumerate(bins)]

    def binned(self) -> dict[str, list[tuple[float, float]]]:
        return {job: self.bins([(0.0, 0.0), *points]) for job, points in self.jobs.items()}


def timeline(series: Series) -> str:
    drawn, (axes,) = figure(0.9 + 0.4 * len(series.stages))
    jobs = list(series.jobs)
    names = [f"{job}: {source} → {to}" if len(jobs) > 1 else f"{source} → {to}" for job, source, to in series.stages]
    for row, ((job, _, _), (first, last)) in enumerate(series.stages.items()):
        axes.barh(row, max(last - first, 0.02), left=first, height=0.6, color=colour(jobs.index(job)))
    axes.set_yticks(range(len(names)), map(label_of, names))
    axes.invert_yaxis()
    return svg(drawn)


def rates(series: Series) -> str:
    drawn, (axes,) = figure(ylabel="MiB/s")
    for index, (job, bins) in enumerate(series.binned().items()):
        times, values = zip(*[(at, value / 2**20) for at, value in bins], strict=True)
        axes.step(times, values, where="mid", label=label_of(job), color=colour(index))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize="small", ncols=1 + len(series.jobs) // 6)
    return svg(drawn)


def shares(series: Series) -> str:
    """Of the bytes of each interval the part of each job; dashed what its weight says."""
    # The legend has a line for each job.
    drawn, (axes,) = figure(2.4 + 0.22 * len(series.jobs), ylabel="part of the bytes")
    binned = series.binned()
    for index, (job, bins) in enumerate(binned.items()):
        total = [sum(entry[place][1] for entry in binned.values()) for place in range(len(bins))]
        part = [value / whole if whole else float("nan") for (_, value), whole in zip(bins, total, strict=True)]
        axes.plot([at for at, _ in bins], part, label=label_of(f"{job}: bytes"), color=colour(index), marker=".")
        if weights := series.weights.get(job):
            given: dict[str, Any] = {"where": "post", "linestyle": "--", "label": label_of(f"{job}: weight")}
            axes.step(*zip(*weights, strict=True), **given, color=colour(index))
    axes.set_ylim(0, 1.05)
    axes.legend(ncols=2, **ABOVE)
    return svg(drawn)


def processors(series: Series) -> str:
    drawn, (axes,) = figure(ylabel="cores")
    for worker, points in series.cpu.items():
        axes.plot(*zip(*series.bins(points), strict=True), label=label_of(worker))
    axes.set_ylim(bottom=0)
    if len(series.cpu) <= NAMED_MAX:
        axes.legend(frameon=False, fontsize="small")
    return svg(drawn)


def phases_of_tasks(records: list[Record]) -> str:
    """When each task was in which phase; the record comes when the task has ended."""
    records = records[:DRAWN_MAX]
    first = min(record["time"] - sum(record.get(phase, 0.0) for phase in PHASES) for record in records)
    workers = sorted({record["worker"] for record in records})
    drawn, (axes,) = figure(0.9 + 0.4 * len(workers))
    for shade, phase in zip(COLOURS, PHASES, strict=False):
        axes.barh([], [], color=shade, label=phase.removesuffix("_s"))
    for record in records:
        end, row = record["time"] - first, workers.index(record["worker"])
        for shade, phase in reversed(list(zip(COLOURS, PHASES, strict=False))):
            seconds = record.get(phase, 0.0)
            axes.barh(row, seconds, left=end - seconds, height=0.6, color=shade, edgecolor="white", linewidth=0.3)
            end -= seconds
    axes.set_yticks(range(len(workers)), map(label_of, workers))
    axes.invert_yaxis()
    axes.legend(fontsize="small", ncols=len(PHASES), **ABOVE)
    return svg(drawn)


def over_time(points: Mapping[str, Point]) -> str:
    """Processors, links, and queues of points in the lab, every 125 ms; by their names."""
    quantities: tuple[tuple[str, Callable[[Record], list[float]]], ...] = (
        ("processors,\ncores busy", lambda entry: entry["processors"]),
        ("links,\nmean of ports in use", lambda entry: [busy_mean(row) for row in entry["links"]]),
        ("longest port queue,\nKiB", lambda entry: [max(row, default=0) / 1024 for row in entry["queues"]]),
        ("receive queue\nof the first host,\nKiB", lambda entry: [value / 1024 for value in entry["receive"]]),
    )
    drawn, every = figure(7, len(quantities))
    for axes, (label, values) in zip(every, quantities, strict=True):
        axes.set_ylabel(label, fontsize="small")
        for index, (name, point) in enumerate(points.items()):
            axes.plot(point.samples["seconds"], values(point.samples), label=label_of(name), color=colour(index))
        axes.set_ylim(bottom=0)
    if any(points):
        every[0].legend(frameon=False, fontsize="small")
    return svg(drawn)


def named(axes: Any, curves: Mapping[str, Any]) -> None:
    """A legend where there are several, and not too many."""
    if 1 < len(curves) <= NAMED_MAX:
        axes.legend(ncols=min(4, len(curves)), **ABOVE)


def cdf(curves: Mapping[str, Sequence[float]], of: str, xlabel: str, log: bool = False) -> str:
    """Cumulative distributions, by name.

    Args:
        of: what is counted, as in jobs.
    """
    drawn, (axes,) = figure(3.2, ylabel=f"part of the {of}", xlabel=xlabel)
    for index, (name, values) in enumerate(curves.items()):
        parts = [(place + 1) / len(values) for place in range(len(values))]
        axes.step(sorted(values), parts, where="post", color=colour(index), label=label_of(name))
    axes.set_xscale("log" if log else "linear")
    axes.set_ylim(0, 1.02)
    named(axes, curves)
    return svg(drawn)


def busy_mean(parts: list[float]) -> float:
    busy = [part for part in parts if part > MOVING]
    return sum(busy) / len(busy) if busy else 0.0


def medians(found: Sequence[Summary], label: str) -> str:
    """Medians and intervals: a group for each place, a point for each variant."""
    drawn, (axes,) = figure(ylabel=label, xlabel="")
    places = list(dict.fromkeys(at_in_words(entry.at) for entry in found))
    variants = list(dict.fromkeys(entry.variant for entry in found))
    for index, variant in enumerate(variants):
        shift = (index - (len(variants) - 1) / 2) * 0.12
        rows = [
            (places.index(at_in_words(one.at)) + shift, one.median, one.median - one.low, one.high - one.median)
            for one in found
            if one.variant == variant and one.median is not None and one.low is not None and one.high is not None
        ]
        where, middle, below, above = zip(*rows, strict=True) if rows else ((), (), (), ())
        given: dict[str, Any] = {"fmt": "o", "capsize": 3, "color": colour(index), "label": label_of(variant) or None}
        axes.errorbar(where, middle, [below, above], **given)
    axes.set_xticks(range(len(places)), map(label_of, places))
    axes.set_ylim(bottom=0)
    if any(variants):
        axes.legend(ncols=min(4, len(variants)), **ABOVE)
    return svg(drawn)


def overheads(found: Sequence[Overhead]) -> str:
    """Figure 6 of paper 000: of each job and variant completion times above, the overhead and its interval below."""
    drawn, (above, below) = figure(4.6, rows=2, ylabel="job, s", xlabel="")
    names = [" ".join(filter(None, [one.study, at_in_words(one.at)])) for one in found]
    places, variants = list(dict.fromkeys(names)), list(dict.fromkeys(one.variant for one in found))
    width = 0.8 / len(variants)
    for index, variant in enumerate(variants):
        own = [(places.index(name), one) for name, one in zip(names, found, strict=True) if one.variant == variant]
        where = [place + (index - (len(variants) - 1) / 2) * width for place, _ in own]
        given: dict[str, Any] = {"width": 0.4 * width, "color": colour(index)}
        left, right = ([place + side * width for place in where] for side in (-0.2, 0.2))
        above.bar(left, [one.job_seconds for _, one in own], **given, label=label_of(variant))
        above.bar(right, [one.job_seconds_1ms for _, one in own], **given, alpha=0.4, label=label_of(own[0][1].to))
        low, middle, high = zip(*[(one.low or 0, one.median or 0, one.high or 0) for _, one in own], strict=True)
        ends = [[m - o for m, o in zip(middle, low, strict=True)], [o - m for m, o in zip(middle, high, strict=True)]]
        below.errorbar(where, middle, ends, fmt="o", capsize=3, color=colour(index))
    below.set_ylabel("incast overhead")
    below.axhline(0, color="black", linewidth=0.6)
    below.set_xticks(range(len(places)), map(label_of, places))
    above.legend(ncols=4, fontsize="small", **ABOVE)
    return svg(drawn)


def curve_name(variant: str, at: Mapping[str, Any], axis: str) -> str:
    return " ".join(filter(None, [variant, *(str(value) for key, value in at.items() if key != axis)]))


def curves(found: Sequence[Summary], points: Sequence[Any], axis: str, label: str) -> str:
    """A measure over the axis: a colour for each curve, a dash for each world, intervals shaded."""
    points = [point for point in points if point.counts]
    slow = any(getattr(point, "dilation", 1) > 1 for point in points)
    undone = ", slow motion undone" if slow and found[0].unit in (*RATES, *TIMES) else ""
    drawn, (axes,) = figure(4, ylabel=label + undone, xlabel=axis.rpartition(".")[2])
    lines: dict[tuple[str, str], list[Summary]] = {}
    for one in found:
        lines.setdefault((curve_name(one.variant, one.at, axis), one.world), []).append(one)
    names = list(dict.fromkeys(name for name, _ in lines))
    for (name, world), own in lines.items():
        own.sort(key=lambda one: one.at[axis])
        shade, places = colour(names.index(name)), [one.at[axis] for one in own]
        here = [point for point in points if (point.variant, point.world) == (own[0].variant, world)]
        here = [point for point in here if curve_name(point.variant, point.at, axis) == name]
        factor = {point.at[axis]: undilated(own[0].unit, point.dilation) for point in here}
        values = [(one.median or 0) * factor[one.at[axis]] for one in own]
        marker = None if world == "model" else "."
        axes.plot(places, values, DASHES[world], color=shade, marker=marker, label=label_of(f"{name}, {world}"))
        if world == "model" and own[0].measure == "goodput":
            printed = {point.at[axis]: point.paper_mbit * point.dilation for point in here}
            given: dict[str, Any] = {"color": shade, "label": label_of(f"{name}, as printed")}
            axes.plot(places, [printed[place] for place in places], ":", **given)
        elif world != "model":
            ends = [[(end or 0) * factor[one.at[axis]] for end in (one.low, one.high)] for one in own]
            low, high = zip(*ends, strict=True)
            axes.fill_between(places, low, high, color=shade, alpha=0.15, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return svg(drawn)
