"""Figures of reports, each as SVG."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mission_control.experiments.compare import RATES, TIMES, undilated
from mission_control.experiments.result import Overhead, Point, Summary, at_in_words
from mission_control.lab.watch import MOVING
from mission_control.map_reduce.phases import PHASES

LINE, MARK, LINE_INCHES = 84, 7, 0.17
"""Characters in the width of a figure, those that the mark before a name and the gap take, and the height of a line."""
NAMED_MAX = 16
"""Lines that a legend names; more would leave no room for the drawing."""
DRAWN_MAX = 3000
"""Tasks whose phases are drawn; more would take a browser seconds, and nobody would see them."""
COLOURS = ("#2f74c8", "#c2571a", "#2e8b57", "#8a4fbe", "#9a7209", "#b5453f", "#3f8f8f", "#7a8290")
"""Those of the console. Each has a contrast of 3 or more to both grounds, the light one and the dark one."""
STYLE = {"svg.fonttype": "none", "font.size": 8.5, "legend.frameon": False, "legend.fontsize": 8.5}
DASHES = {"model": "--", "lab": "-"}
Record = dict[str, Any]


def figure(height: float = 2.0, rows: int = 1, ylabel: str = "", xlabel: str = "seconds") -> tuple[Any, list[Any]]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(5.6, height), layout="constrained")
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
    """Draw a figure with real text, in the colours of the page around it: black is its text, white its ground."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        drawn.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    found = text.getvalue()[text.getvalue().index("<svg") :]
    found = re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
    # Names of groups repeat in each figure of a page, and nothing refers to them.
    found = re.sub(r' id="[\w.]+_\d+"', "", found)
    return found.replace("#000000", "currentColor").replace("#ffffff", "var(--ground)")


ABOVE: dict[str, Any] = {
    "frameon": False,
    "fontsize": STYLE["legend.fontsize"],
    "loc": "lower center",
    "bbox_to_anchor": (0.5, 1),
}
"""Where a legend does not hide what is drawn."""


class Series:
    """Progress over time: of each job (of each transfer, if there is one job) the bytes from other workers, of each
    worker the CPU time."""

    def __init__(self, records: list[Record]):
        progress = [record for record in records if record["kind"] == "progress"]
        self.start = min((record["time"] for record in progress), default=0.0)
        self.end = max((record["time"] for record in progress), default=0.0) - self.start
        self.several_jobs = len({record["job"] for record in progress}) > 1
        self.curves: dict[str, list[tuple[float, float]]] = {}
        self.stages: dict[tuple[str, str, str], list[float]] = {}
        self.cpu: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.weights: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.shared = False
        """Whether several transfers had weights at once."""
        served: dict[tuple[Any, ...], float] = {}
        totals: dict[str, float] = defaultdict(float)
        for record in progress:
            now, name = record["time"] - self.start, self.name_of(record)
            # A worker forgets a transfer that is quiet; what it reports later begins at 0, at another time.
            key = (record["worker"], record["job"], record["from"], record["to"], record.get("started"))
            moved = record["served_bytes"] - record["local_bytes"]
            totals[name] += moved - served.get(key, 0)
            served[key] = moved
            self.curves.setdefault(name, []).append((now, totals[name]))
            self.stages.setdefault(key[1:4], [now, now])[1] = now
            self.cpu[record["worker"]].append((now, record["cpu"]))
        for record in records:
            if record["kind"] == "decision" and record["command"] == "weights":
                self.shared = self.shared or len(record["transfers"]) > 1
                for name in self.curves:
                    weight = sum(own["weight"] for own in record["transfers"] if self.name_of(own) == name)
                    self.weights[name].append((record["time"] - self.start, weight))
        self.curves = dict(sorted(self.curves.items())) if self.several_jobs else self.curves
        self.moved = sum(totals.values())

    def name_of(self, own: Record) -> str:
        return str(own["job"]) if self.several_jobs else f"{own['from']} → {own['to']}"

    def bins(self, points: list[tuple[float, float]], width: float) -> list[tuple[float, float]]:
        """Increase per second of a growing total, in bins of ``width`` seconds, by their middles."""
        count = max(1, int(self.end / width) + 1)
        bins, before = [0.0] * count, points[0][1] if points else 0.0
        for at, total in points:
            bins[min(count - 1, int(at / width))] += total - before
            before = total
        return [((index + 0.5) * width, value / width) for index, value in enumerate(bins)]

    def binned(self, width: float) -> dict[str, list[tuple[float, float]]]:
        return {name: self.bins([(0.0, 0.0), *points], width) for name, points in self.curves.items()}

    @property
    def narrow(self) -> float:
        """Width of a bin that shows a rate: workers report four times a second."""
        return max(0.25, self.end / 80)

    @property
    def broad(self) -> float:
        """Width of a bin that shows a fraction: in a narrow one it would jump with each chunk."""
        return max(0.5, self.end / 16)


def timeline(series: Series) -> str:
    drawn, (axes,) = figure(0.6 + 0.3 * len(series.stages))
    jobs = sorted({job for job, _, _ in series.stages})
    several = series.several_jobs
    names = [f"{job}: {source} → {to}" if several else f"{source} → {to}" for job, source, to in series.stages]
    for row, ((job, _, _), (first, last)) in enumerate(series.stages.items()):
        shade = colour(jobs.index(job) if several else row)
        axes.barh(row, max(last - first, 0.02), left=first, height=0.6, color=shade)
    axes.set_yticks(range(len(names)), map(label_of, names))
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    return svg(drawn)


def rates(series: Series) -> str:
    drawn, (axes,) = figure(ylabel="MiB/s")
    binned = series.binned(series.narrow)
    for index, (name, bins) in enumerate(binned.items()):
        if not any(value for _, value in bins):
            continue
        times, values = zip(*[(at, value / 2**20) for at, value in bins], strict=True)
        axes.step(times, values, where="mid", label=label_of(name), color=colour(index))
    from_zero(axes)
    named(axes, binned)
    return svg(drawn)


def from_zero(axes: Any) -> None:
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def shares(series: Series) -> str:
    """Of the bytes of each interval the fraction of each job, one upon the other; dashed where weights put the
    borders."""
    drawn, (axes,) = figure(2.0 + 0.1 * len(series.curves), ylabel="fraction of the bytes")
    binned = series.binned(series.broad)
    total = [sum(value for _, value in column) for column in zip(*binned.values(), strict=True)]
    below, border = [0.0] * len(total), [0.0] * len(next(iter(series.weights.values()), ()))
    for index, (name, bins) in enumerate(binned.items()):
        part = [value / whole if whole else 0.0 for (_, value), whole in zip(bins, total, strict=True)]
        above = [one + own for one, own in zip(below, part, strict=True)]
        given: dict[str, Any] = {"step": "post", "color": colour(index), "label": label_of(name)}
        # The end of the last bin is one more place.
        edges = [place * series.broad for place in range(len(bins) + 1)]
        axes.fill_between(edges, [*below, below[-1]], [*above, above[-1]], linewidth=0, **given)
        below = above
        weights = series.weights.get(name, [])
        border = [one + weight for one, (_, weight) in zip(border, weights, strict=False)]
        if index < len(binned) - 1 and weights:
            times = [at for at, _ in weights]
            # The last weights hold until the end.
            axes.step([*times, series.end], [*border, border[-1]], "k--", where="post", linewidth=1.5)
    if len(next(iter(series.weights.values()), ())):
        axes.plot([], [], "k--", label="weights")
    axes.set_xlim(0, max(series.end, series.broad))
    axes.set_ylim(0, 1.02)
    legend(axes)
    return svg(drawn)


def processors(series: Series) -> str:
    drawn, (axes,) = figure(ylabel="cores")
    for index, (worker, points) in enumerate(series.cpu.items()):
        given: dict[str, Any] = {"label": label_of(worker.rpartition("//")[2]), "color": colour(index)}
        axes.plot(*zip(*series.bins(points, series.narrow), strict=True), **given)
    from_zero(axes)
    named(axes, series.cpu)
    return svg(drawn)


def phases_of_tasks(records: list[Record]) -> str:
    """When each task was in which phase; the record comes when the task has ended."""
    from matplotlib.patches import Patch

    records = records[:DRAWN_MAX]
    first = min(record["time"] - sum(record.get(phase, 0.0) for phase in PHASES) for record in records)
    workers = sorted({record["worker"] for record in records})
    drawn, (axes,) = figure(0.8 + 0.3 * len(workers))
    for record in records:
        end, row = record["time"] - first, workers.index(record["worker"])
        for shade, phase in reversed(list(zip(COLOURS, PHASES, strict=False))):
            seconds = record.get(phase, 0.0)
            axes.barh(row, seconds, left=end - seconds, height=0.6, color=shade, edgecolor="white", linewidth=0.3)
            end -= seconds
    axes.set_yticks(range(len(workers)), [label_of(worker.rpartition("//")[2]) for worker in workers])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    names = [Patch(color=shade, label=phase.removesuffix("_s")) for shade, phase in zip(COLOURS, PHASES, strict=False)]
    axes.legend(handles=names, ncols=len(names), **ABOVE)
    return svg(drawn)


def over_time(points: Mapping[str, Point]) -> str:
    """Processors, links, and queues of points in the lab, every 125 ms; by their names."""
    quantities: tuple[tuple[str, Callable[[Record], list[float]]], ...] = (
        ("CPUs,\ncores busy", lambda entry: entry["processors"]),
        ("links,\nmean of ports in use", lambda entry: [busy_mean(row) for row in entry["links"]]),
        ("longest port queue,\nKiB", lambda entry: [max(row, default=0) / 1024 for row in entry["queues"]]),
        ("receive queue\nof the first host,\nKiB", lambda entry: [value / 1024 for value in entry["receive"]]),
    )
    drawn, every = figure(6, len(quantities))
    for axes, (label, values) in zip(every, quantities, strict=True):
        axes.set_ylabel(label)
        for index, (name, point) in enumerate(points.items()):
            axes.plot(point.samples["seconds"], values(point.samples), label=label_of(name), color=colour(index))
        axes.set_ylim(bottom=0)
    named(every[0], points)
    return svg(drawn)


def named(axes: Any, curves: Mapping[str, Any]) -> None:
    """A legend where there are several, and not too many."""
    if 1 < len(curves) <= NAMED_MAX:
        legend(axes)


def legend(axes: Any) -> None:
    """A legend above, in as many columns as the names leave room for."""
    labels = axes.get_legend_handles_labels()[1]
    most = 2 if len(labels) in (2, 4) else 3
    columns = max(1, min(most, LINE // (max(map(len, labels), default=0) + MARK)))
    axes.legend(ncols=columns, **ABOVE)
    # The drawing keeps its height.
    axes.figure.set_figheight(axes.figure.get_figheight() + LINE_INCHES * -(-len(labels) // columns))


def cdf(curves: Mapping[str, Sequence[float]], of: str, xlabel: str, log: bool = False) -> str:
    """Cumulative distributions, by name.

    Args:
        of: what is counted, as in jobs.
    """
    drawn, (axes,) = figure(2.6, ylabel=f"fraction of the {of}", xlabel=xlabel)
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
    """Medians and intervals: a row for each place and variant, a colour for each variant."""
    drawn, (axes,) = figure(0.7 + 0.25 * len(found), xlabel=label)
    variants = list(dict.fromkeys(entry.variant for entry in found))
    for row, one in enumerate(found):
        if one.median is not None and one.low is not None and one.high is not None:
            ends = [[one.median - one.low], [one.high - one.median]]
            axes.errorbar([one.median], [row], xerr=ends, fmt="o", capsize=3, color=colour(variants.index(one.variant)))
    names = [", ".join(filter(None, [at_in_words(one.at), one.variant])) or one.world for one in found]
    axes.set_yticks(range(len(found)), map(label_of, names))
    axes.set_ylim(len(found) - 0.5, -0.5)
    every = [end for one in found for end in (one.median, one.low, one.high) if end is not None]
    if every and min(every) >= 0 < max(every):
        axes.set_xlim(0, 1.05 * max(every))
    return svg(drawn)


def overheads(found: Sequence[Overhead]) -> str:
    """Figure 6 of paper 000: of each job and variant completion times above, the overhead and its interval below."""
    drawn, (above, below) = figure(3.8, rows=2, ylabel="job, s", xlabel="")
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
    legend(above)
    return svg(drawn)


def curve_name(variant: str, at: Mapping[str, Any], axis: str) -> str:
    return " ".join(filter(None, [variant, *(str(value) for key, value in at.items() if key != axis)]))


def curves(found: Sequence[Summary], points: Sequence[Any], axis: str, label: str) -> str:
    """A measure over the axis: a colour for each curve, a dash for each world, intervals shaded."""
    points = [point for point in points if point.counts]
    slow = any(getattr(point, "dilation", 1) > 1 for point in points)
    undone = ", dilation removed" if slow and found[0].unit in (*RATES, *TIMES) else ""
    drawn, (axes,) = figure(3, ylabel=label + undone, xlabel=axis.rpartition(".")[2])
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
    legend(axes)
    return svg(drawn)
