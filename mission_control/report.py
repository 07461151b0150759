"""`report.html`: one page that stands alone, drawn from a run's records and nothing else."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mission_control import _native
from mission_control.lab.watch import MOVING
from mission_control.map_reduce.phases import PHASES

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c2330}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #dde2ea;vertical-align:top}
td:first-child{white-space:nowrap}th{background:#f3f5f9}td.n{text-align:right;font-variant-numeric:tabular-nums}svg{width:100%;height:auto}
.good{color:#176b3a}.bad{color:#a3201d}code{background:#f3f5f9;padding:0 .2rem}
"""
NAMED_MAX = 16
"""Lines that a legend names; more would leave no room for the drawing."""
DRAWN_MAX = 3000
"""Tasks whose phases are drawn; more would take a browser seconds, and nobody would see them."""
COLOURS = ("#2463b5", "#d2691e", "#2e8b57", "#8a4fbe", "#b8860b", "#a3201d", "#4c8c8c", "#6b7280")


def write(folder: Path) -> Path:
    """Draws the report of the run in ``folder``; gives its path.

    Raises:
        FileNotFoundError: the folder has no records.
    """
    with open(folder / "records.jsonl") as file:
        records = [json.loads(line) for line in file]
    path = folder / "report.html"
    path.write_text(page(records))
    return path


def page(records: list[dict[str, Any]]) -> str:
    result: dict[str, Any] = next((record for record in reversed(records) if record["kind"] == "result"), {})
    environment = next((record for record in records if record["kind"] == "environment"), {})
    series = Series(records)
    verdict = '<b class="good">every check held</b>' if result.get("ok") else '<b class="bad">not right</b>'
    if result.get("interrupted"):
        verdict = '<b class="bad">interrupted: this is what was done</b>'
    seconds, policy = result.get("seconds"), result.get("policy")
    parts = [
        f"<p>{verdict}{f', {seconds:.2f} s' if seconds else ''}; policy <code>{escape(str(policy))}</code></p>",
        table(("check", "held"), [(name, "yes" if held else "NO") for name, held in result.get("checks", {}).items()]),
    ]
    parts += [f'<p class="bad">{escape(job)}: {escape(error)}</p>' for job, error in result.get("errors", {}).items()]
    parts += ["<h2>What each transfer got, and why</h2>", transfers(result)]
    if series.jobs:
        parts += ["<h2>Timeline of the transfers</h2>", timeline(series)]
        parts += ["<h2>Rates</h2><p>Bytes received per second, by job.</p>", rates(series)]
        parts += ["<h2>Shares against weights</h2>", shares(series)]
        parts += ["<h2>Processors</h2><p>Cores used by each worker.</p>", processors(series)]
    if phases := [record for record in records if record["kind"] == "phases"]:
        parts += ["<h2>Map, shuffle and reduce</h2>", phases_of_tasks(phases[:DRAWN_MAX]), table_of_phases(phases)]
    if result.get("ports"):
        parts += ["<h2>The lab</h2>", *lab_parts(result)]
    parts += ["<h2>Decisions</h2>", decisions(records)]
    shown = {key: value for key, value in environment.items() if key not in ("number", "kind", "time")}
    parts += [
        "<h2>Environment</h2>",
        table(("what", "value"), [(key, json.dumps(value)) for key, value in shown.items()]),
    ]
    return document("Mission Control: run", parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A page that stands alone."""
    body = "\n".join(parts)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>"
        f"<h1>Mission Control</h1>{body}</html>"
    )


class Series:
    """Progress over time: of each job the bytes served, of each worker the processor time."""

    def __init__(self, records: list[dict[str, Any]]):
        progress = [record for record in records if record["kind"] == "progress"]
        self.start = min((record["time"] for record in progress), default=0.0)
        self.end = max((record["time"] for record in progress), default=0.0) - self.start
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
                now = record["time"] - self.start
                for job in self.jobs:
                    of_job = (own["weight"] for own in record["transfers"] if own["job"] == job)
                    self.weights[job].append((now, sum(of_job)))

    def bins(self, points: list[tuple[float, float]], width: float) -> list[tuple[float, float]]:
        """Increase per second of a growing total, in bins of ``width`` seconds."""
        count = max(1, int(self.end / width) + 1)
        bins = [0.0] * count
        before = points[0][1] if points else 0.0
        for now, total in points:
            bins[min(count - 1, int(now / width))] += total - before
            before = total
        return [((index + 0.5) * width, value / width) for index, value in enumerate(bins)]

    @property
    def width(self) -> float:
        return max(0.25, self.end / 80)


def figure(height: float = 2.6) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, height), layout="constrained")
    axes = drawn.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("seconds")
    return drawn, axes


def label_of(text: str) -> str:
    """A name that people gave, as a label: Matplotlib takes what stands between two `$` for a formula."""
    return text.replace("$", r"\$")


def svg(drawn: Any) -> str:
    text = io.StringIO()
    drawn.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def timeline(series: Series) -> str:
    drawn, axes = figure(0.9 + 0.4 * len(series.stages))
    jobs = list(series.jobs)
    names = [f"{job}: {source} → {to}" if len(jobs) > 1 else f"{source} → {to}" for job, source, to in series.stages]
    for row, ((job, _, _), (first, last)) in enumerate(series.stages.items()):
        axes.barh(row, max(last - first, 0.02), left=first, height=0.6, color=COLOURS[jobs.index(job) % len(COLOURS)])
    axes.set_yticks(range(len(names)), map(label_of, names))
    axes.invert_yaxis()
    return svg(drawn)


def rates(series: Series) -> str:
    drawn, axes = figure()
    for index, (job, points) in enumerate(series.jobs.items()):
        bins = series.bins([(0.0, 0.0), *points], series.width)
        axes.step(
            *zip(*[(now, value / 2**20) for now, value in bins], strict=True),
            where="mid",
            label=label_of(job),
            color=COLOURS[index % len(COLOURS)],
        )
    axes.set_ylabel("MiB/s")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize="small", ncols=1 + len(series.jobs) // 6)
    return svg(drawn)


def shares(series: Series) -> str:
    """Of the bytes of each interval the part of each job; dashed what its weight says."""
    drawn, axes = figure(2.4 + 0.22 * len(series.jobs))  # its legend has a line for each job
    binned = {job: series.bins([(0.0, 0.0), *points], series.width) for job, points in series.jobs.items()}
    for index, (job, bins) in enumerate(binned.items()):
        total = [sum(entry[place][1] for entry in binned.values()) for place in range(len(bins))]
        part = [value / whole if whole else float("nan") for (_, value), whole in zip(bins, total, strict=True)]
        colour = COLOURS[index % len(COLOURS)]
        axes.plot([now for now, _ in bins], part, label=label_of(f"{job}: bytes"), color=colour, marker=".")
        if weights := series.weights.get(job):
            axes.step(
                *zip(*weights, strict=True),
                where="post",
                linestyle="--",
                color=colour,
                label=label_of(f"{job}: weight"),
            )
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("part of the bytes")
    axes.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
    return svg(drawn)


def processors(series: Series) -> str:
    drawn, axes = figure()
    for worker, points in series.cpu.items():
        axes.plot(*zip(*series.bins(points, series.width), strict=True), label=label_of(worker))
    axes.set_ylabel("cores")
    axes.set_ylim(bottom=0)
    if len(series.cpu) <= NAMED_MAX:
        axes.legend(frameon=False, fontsize="small")
    return svg(drawn)


def phases_of_tasks(records: list[dict[str, Any]]) -> str:
    """When each task was in which phase; the record comes when the task has ended."""
    first = min(record["time"] - sum(record.get(phase, 0.0) for phase in PHASES) for record in records)
    workers = sorted({record["worker"] for record in records})
    drawn, axes = figure(0.9 + 0.4 * len(workers))
    for colour, phase in zip(COLOURS, PHASES, strict=False):
        axes.barh([], [], color=colour, label=phase.removesuffix("_s"))
    for record in records:
        end = record["time"] - first
        for colour, phase in reversed(list(zip(COLOURS, PHASES, strict=False))):
            seconds = record.get(phase, 0.0)
            row = workers.index(record["worker"])
            axes.barh(row, seconds, left=end - seconds, height=0.6, color=colour, edgecolor="white", linewidth=0.3)
            end -= seconds
    axes.set_yticks(range(len(workers)), map(label_of, workers))
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize="small", ncols=len(PHASES), loc="lower center", bbox_to_anchor=(0.5, 1))
    return svg(drawn)


def table_of_phases(records: list[dict[str, Any]]) -> str:
    """Of each job and phase: its tasks, and their seconds."""
    rows = []
    for job in sorted({str(record["job"]) for record in records}):
        for phase in PHASES:
            seconds = sorted(own[phase] for own in records if str(own["job"]) == job and phase in own)
            if seconds:
                shown = [f"{value:.3f}" for value in (sum(seconds), seconds[len(seconds) // 2], seconds[-1])]
                rows.append((job, phase.removesuffix("_s"), len(seconds), *shown))
    return table(("job", "phase", "tasks", "seconds together", "median", "longest"), rows)


def lab_parts(result: dict[str, Any]) -> list[str]:
    """What the ports counted, and processors, links and queues over time."""
    size = _native.format_bytes
    rows = [
        (
            f"{port['switch']} to {port['port']}",
            f"{port['settings']['bytes_per_second'] * 8 / 1e6:g} Mbit/s",
            size(port["bytes"]),
            port["drops"],
            port["marks"],
            *(size(port[f"queue_bytes_{name}"]) for name in ("p50", "p95", "max")),
        )
        for port in result["ports"]
        if port["packets"]
    ]
    invalid_reasons = "".join(f'<p class="bad">Not valid: {escape(why)}</p>' for why in result["invalid_because"])
    head = ("port", "rate", "bytes", "drops", "marks", "queue p50", "p95", "max")
    return [invalid_reasons, table(head, rows), over_time({"": result}) if "samples" in result else ""]


def over_time(results: dict[str, dict[str, Any]]) -> str:
    """Processors, links, and queues of runs in the lab, every 125 ms; by the runs' names."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, 7), layout="constrained")
    quantities: tuple[tuple[str, Callable[[dict[str, Any]], list[float]]], ...] = (
        ("processors, cores busy", lambda entry: entry["processors"]),
        ("links, mean of ports in use", lambda entry: [busy_mean(row) for row in entry["links"]]),
        ("longest port queue, KiB", lambda entry: [max(row, default=0) / 1024 for row in entry["queues"]]),
        ("receive queue of the first host, KiB", lambda entry: [value / 1024 for value in entry["receive"]]),
    )
    for axes, (label, values) in zip(drawn.subplots(len(quantities), sharex=True), quantities, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel(label.replace(", ", "\n").replace(" of the ", "\nof the "), fontsize="small")
        for index, (name, result) in enumerate(results.items()):
            samples = result["samples"]
            axes.plot(samples["seconds"], values(samples), label=label_of(name), color=COLOURS[index % len(COLOURS)])
        axes.set_ylim(bottom=0)
    if any(results):
        drawn.axes[0].legend(frameon=False, fontsize="small")
    drawn.axes[-1].set_xlabel("seconds")
    return svg(drawn)


def busy_mean(parts: list[float]) -> float:
    busy = [part for part in parts if part > MOVING]
    return sum(busy) / len(busy) if busy else 0.0


def transfers(result: dict[str, Any]) -> str:
    rows = []
    for job in result.get("jobs", []):
        for transfer in job["transfers"]:
            facts = transfer["transport"] or {}
            got = "; ".join(agreement(one) for one in facts.get("negotiated", [])) or "nothing left its worker"
            refused = "; ".join(facts.get("fallbacks", []))
            rows.append(
                (
                    job["name"],
                    f"{transfer['from']} → {transfer['to']}",
                    transfer["pattern"],
                    f"{transfer['weight']:.2f}" if transfer.get("weight") is not None else "",
                    transfer["flows_peak"],
                    _native.format_bytes(transfer["bytes"]),
                    facts.get("chosen") or "none",
                    f"{facts.get('reason')}. Negotiated: {got}.{f' Fallbacks: {refused}.' if refused else ''}",
                )
            )
    return table(("job", "transfer", "pattern", "weight", "flows", "bytes", "transport", "why"), rows)


def agreement(negotiated: dict[str, Any]) -> str:
    """What was negotiated, in words."""
    words = [negotiated["transport"], *filter(None, (negotiated["congestion_control"], negotiated["memory"]))]
    if negotiated["rto_min_us"] is not None:
        words.append(f"minimum RTO {negotiated['rto_min_us'] / 1000:g} ms")
    if negotiated["subflows"] is not None:
        words.append(f"{negotiated['subflows']} subflow{'s' if negotiated['subflows'] != 1 else ''}")
    if negotiated["tls"]:
        words.append(negotiated["tls"])
        words.append("certificates of the cluster" if negotiated["authenticated"] else "no identities")
    return ", ".join(words)


def decisions(records: list[dict[str, Any]]) -> str:
    rows = []
    for record in records:
        if record["kind"] == "decision" and record["command"] == "weights":
            what = ", ".join(
                f"{own['job']}: {own['from']} → {own['to']} {own['weight']:.2f} ({own['flows']} flows)"
                for own in record["transfers"]
            )
            rows.append((time_of(record), "weights", what))
        elif record["kind"] == "decision" and record["command"] == "plan":
            legs = "; ".join(
                f"{leg['transport']}: {leg['reason']}"
                + (f" (not everywhere: {leg['except']})" if leg.get("except") else "")
                for leg in record["plan"]["legs"]
            )
            refused = "; ".join(f"{transport}: {why}" for transport, why in record["plan"]["refused"])
            rows.append(
                (time_of(record), f"plan of {record['job']}", f"{legs}. Not taken: {refused}" if refused else legs)
            )
        elif record["kind"] in ("refused", "recomputed", "worker-left"):
            result = {key: value for key, value in record.items() if key not in ("number", "kind", "time")}
            rows.append((time_of(record), record["kind"], json.dumps(result)))
    return table(("time", "what", "to whom, and why"), rows[:500])


def time_of(record: dict[str, Any]) -> str:
    import time

    return time.strftime("%H:%M:%S", time.localtime(record["time"])) + f".{int(record['time'] * 1000) % 1000:03}"


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    if not rows:
        return "<p>None.</p>"

    def cell(value: Any) -> str:
        return f'<td class="n">{value}</td>' if isinstance(value, int | float) else f"<td>{escape(str(value))}</td>"

    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{body}</table>"
