"""`report.html`: one page that stands alone, of sections, drawn from a run's result and records."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mission_control import _native
from mission_control.experiments import charts
from mission_control.experiments.compare import number, spread
from mission_control.experiments.result import Comparison, Overhead, Point, Result, Summary, at_in_words, load
from mission_control.map_reduce.phases import PHASES

RECORDS = "records.jsonl"
DECISIONS_MAX = 500
Piece = dict[str, Any]
"""Of a section: a text, table, figure, links or details, as the template shows them."""


def text(words: str, css: str = "", head: str = "") -> Piece:
    return {"kind": "text", "words": words, "css": css, "head": head}


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Piece:
    return {"kind": "table", "head": head, "rows": rows}


def drawn(svg: str) -> Piece:
    return {"kind": "figure", "svg": svg}


def details(head: str, *parts: Piece) -> Piece:
    return {"kind": "details", "head": head, "parts": parts}


def write(folder: Path, result: Result | None = None) -> Path:
    """Draw the report of the run in ``folder``; give its path.

    Raises:
        BadInput: there is none.
    """
    result = result or load(folder)
    records = []
    if len(result.points) == 1 and (folder / RECORDS).exists():
        records = [json.loads(line) for line in (folder / RECORDS).read_text().splitlines()]
    path = folder / "report.html"
    path.write_text(page(result, records))
    return path


def page(result: Result, records: list[dict[str, Any]]) -> str:
    """The page; ``records`` are of the only point."""
    from jinja2 import Environment, PackageLoader

    from mission_control.workloads import WORKLOADS

    loader = PackageLoader("mission_control.experiments")
    template = Environment(loader=loader, autoescape=True, trim_blocks=True).get_template("report.html")
    sections = [{"title": "", "parts": verdict(result)}]
    if result.overheads:
        sections.append({"title": "Incast overhead", "parts": overhead_parts(result.overheads)})
    for name, study in result.studies.items():
        sections.append({"title": study["title"] or (name if len(result.studies) > 1 else ""), "parts": []})
        sections[-1]["parts"] = section(name, study, result)
    if len(result.points) == 1 and result.points[0].jobs:
        (study,), (point,) = result.studies.values(), result.points
        many = WORKLOADS[study["kind"]].many_jobs
        sections += few_sections(point) if many else run_sections(point, records)
    environment: dict[str, list[str]] = {}
    for own in [point.environment for point in result.points] or [result.environment]:
        for key, value in own.items():
            # Points that an earlier session measured may have another one.
            environment.setdefault(key, []).append(json.dumps(value))
    shown = [(key, "; ".join(dict.fromkeys(values))) for key, values in environment.items()]
    sections.append({"title": "Environment", "parts": [table(("what", "value"), shown)]})
    return template.render(title="run" if len(result.points) == 1 else "study", sections=sections)


def verdict(result: Result) -> list[Piece]:
    bad = [point for point in result.points if not (point.ok and point.valid)]
    words = [
        f"{len(result.points)} points",
        f"{len(bad)} of them not right or not valid" if bad else "all right and valid",
    ]
    missed = [one for one in result.comparisons if one.held is False]
    if any(one.expected for one in result.comparisons):
        words.append(f"{len(missed)} expectations missed" if missed else "every expectation held")
    if len(result.points) == 1:
        words = ["not right" if bad else "every check held"]
        words += [f"{result.seconds:.2f} s"] if result.seconds else []
        words += [f"policy {result.policy}"] if result.policy else []
    if result.interrupted:
        words.append("interrupted: this is what was done")
    parts = [text(", ".join(words), "good" if result.ok and result.valid else "bad")]
    parts += [text(note, head="Note:") for note in result.notes]
    if len(result.studies) > 1:
        rows = [(one["title"] or name, one["paper"], seen(name, one, result)) for name, one in result.studies.items()]
        parts.append(table(("what", "the paper", "here"), rows))
    return parts


def seen(name: str, study: dict[str, Any], result: Result) -> str:
    """What a study has found, in a line."""
    own: Sequence[Summary] = [one for one in result.comparisons if one.study == name]
    if not own and not study["compares"]:
        own = [one for one in result.summary if one.study == name][:12]
    onsets = [
        f"onset {one.world} {one.variant} {one.of_goodput or 'none'}" for one in result.onset if one.study == name
    ]
    words = onsets or [f"{in_words(one)}: {number(one.median)}" for one in own]
    return "; ".join(words) or "nothing"


def in_words(one: Summary) -> str:
    variants = f"{one.variant} to {one.to}" if isinstance(one, Comparison) else one.variant
    return ", ".join(filter(None, [one.measure.replace("_", " "), at_in_words(one.at), variants]))


def section(name: str, study: dict[str, Any], result: Result) -> list[Piece]:
    """One scenario: what was hoped, what was seen, and why."""
    from mission_control.workloads import WORKLOADS

    workload = WORKLOADS[study["kind"]]
    points = [point for point in result.points if point.study == name]
    parts = [text(study[key], head=head) for key, head in HEADS.items() if study[key]]
    for point in points:
        label = f"{point.label()}: " if len(result.points) > 1 else ""
        parts += [text(label + why, "bad") for why in point.wrong()]
    if len(result.points) > 1:
        for measure in study["measure"]:
            label = workload.measures[measure].label
            found = [one for one in result.summary if (one.study, one.measure) == (name, measure)]
            ratios = [one for one in result.comparisons if (one.study, one.measure) == (name, measure)]
            parts += comparison(label, found, ratios, points, workload.axis)
    parts += workload.pieces(points)
    parts += onset_parts([one for one in result.onset if one.study == name])
    off = sorted(abs(one.part) for one in result.differences if one.study == name)
    if off:
        words = f"The model is off by {median(off):.1%} in the median, by {off[-1]:.1%} at most, of {len(off)} points."
        parts.append(text(words))
    if shown := shown_over_time(points) if len(result.points) > 1 else {}:
        parts += [text("Over time, of one run each:"), drawn(charts.over_time(shown))]
    if len(result.points) > 1:
        parts.append(details(f"All {len(points)} points", all_points(points, workload.measures)))
    below = "" if len(result.studies) == 1 else f"{name}/"
    links = [(Path(one.folder).name, f"{below}{one.folder}/report.html") for one in points if one.folder]
    if links:
        parts.append(details(f"{len(links)} runs", {"kind": "links", "links": links}))
    return parts


HEADS = {"paper": "The paper:", "hope": "We hope:", "because": "Because:"}


def comparison(
    label: str, found: Sequence[Summary], ratios: Sequence[Comparison], points: Sequence[Point], axis: str
) -> list[Piece]:
    """One quantity: its medians, ratios, and a drawing."""
    rows: list[tuple[Any, ...]] = [
        (one.world, at_in_words(one.at), one.variant, number(one.median), spread(one), one.runs) for one in found
    ]
    shown = table(("world", "at", "variant", label, "interval of 95 %", "runs"), rows)
    parts = [text("", head="We see:")]
    if found and axis:
        words = "Solid: measured, with intervals."
        if any(one.world == "model" for one in found):
            words += " Dashed: the model. Dotted: the papers' equations."
        parts += [text(words), drawn(charts.curves(found, points, axis, label)), details("Medians", shown)]
    else:
        parts += [shown, *([drawn(charts.medians(found, label))] if found else [])]
    came = {True: "yes", False: "NO", None: ""}
    if ratios:
        shown_ratios = [
            (one.world, at_in_words(one.at), f"{one.variant} to {one.to}", number(one.median), spread(one))
            for one in ratios
        ]
        rows = [(*own, one.expected, came[one.held]) for own, one in zip(shown_ratios, ratios, strict=True)]
        parts.append(table(("world", "at", "ratio", "median", "interval of 95 %", "expected", "held"), rows))
    return parts


def overhead_parts(found: Sequence[Overhead]) -> list[Piece]:
    """Equation 5, and figure 6 of paper 000: completion times above, overheads below."""
    words = "Completion time with the variant's minimum RTO, less that with 1 ms, as a part of the latter (equation 5)."
    rows = [
        (
            *(one.study, at_in_words(one.at), one.variant, number(one.job_seconds), number(one.job_seconds_1ms)),
            *(number(one.median), spread(one), one.runs),
        )
        for one in found
    ]
    head = ("what", "at", "variant", "job, s", "with 1 ms, s", "overhead", "interval of 95 %", "runs")
    return [text(words), drawn(charts.overheads(found)), table(head, rows)]


def onset_parts(onsets: Sequence[Any]) -> list[Piece]:
    from mission_control.incast import quantities

    rows = [
        (
            f"{one.variant} {quantities.size(one.asked_bytes)}".strip(),
            one.world,
            str(one.of_goodput or "none of these"),
            str(one.senders or "none of these"),
        )
        for one in onsets
    ]
    return [table(("onset", "world", "senders, by goodput", "by the median block"), rows)] if rows else []


def shown_over_time(points: Sequence[Point]) -> dict[str, Point]:
    """Of each variant one point to look at: the first that counts at the last place."""
    shown: dict[str, Point] = {}
    for point in points:
        name = point.variant or at_in_words(point.at)
        if point.counts and point.samples.get("seconds") and (name not in shown or shown[name].at != point.at):
            shown[name] = point
    return shown


def all_points(points: Sequence[Any], measures: Mapping[str, Any]) -> Piece:
    have = [name for name in measures if any(name in point.measures for point in points)]
    rows = []
    for point in points:
        values = [number(point.measures[name].value) if name in point.measures else "" for name in have]
        place = (point.world, point.variant, at_in_words(point.at), point.repetition + 1)
        rows.append(
            (*place, *values, rto_min_in_words(getattr(point, "rto_min", None)), "yes" if point.counts else "NO")
        )
    head = ("world", "variant", "at", "repetition", *(measures[name].label for name in have), "minimum RTO", "counts")
    return table(head, rows)


def rto_min_in_words(result: dict[str, Any] | None) -> str:
    """Who gave it, and what it came to."""
    if not result or not result["won"]:
        return ""
    return f"{result['won']}: {result['observed_us'] / 1e3:.0f} ms, {result['asked'][result['won']] / 1e3:.0f} asked"


def few_sections(point: Point) -> list[Piece]:
    """A single point of so many jobs that a line for each transfer would hide the rest."""
    found = {"Checks": [checks(point)]}
    if point.ports:
        found["The lab"] = lab(point)
    return [{"title": title, "parts": parts} for title, parts in found.items()]


def checks(point: Point) -> Piece:
    rows = [(name, "yes" if held else "NO") for name, held in {**point.checks, **point.expectations}.items()]
    return table(("check", "held"), rows)


def lab(point: Point) -> list[Piece]:
    return [ports(point), *([drawn(charts.over_time({"": point}))] if point.samples else [])]


def run_sections(point: Point, records: list[dict[str, Any]]) -> list[Piece]:
    """A single point of jobs: what each transfer got and why, and what happened when."""
    series, phases = charts.Series(records), [record for record in records if record["kind"] == "phases"]
    found = {"Checks": [checks(point)], "What each transfer got, and why": [transfers(point)]}
    if series.jobs:
        found["Timeline of the transfers"] = [drawn(charts.timeline(series))]
        found["Rates"] = [text("Bytes received per second, by job."), drawn(charts.rates(series))]
        found["Shares against weights"] = [drawn(charts.shares(series))]
        found["Processors"] = [text("Cores used by each worker."), drawn(charts.processors(series))]
    if phases:
        found["Map, shuffle and reduce"] = [drawn(charts.phases_of_tasks(phases)), table_of_phases(phases)]
    if point.ports:
        found["The lab"] = lab(point)
    found["Decisions"] = [decisions(records)]
    return [{"title": title, "parts": parts} for title, parts in found.items()]


def transfers(point: Point) -> Piece:
    rows = []
    for job in point.jobs:
        for transfer in job.transfers:
            facts = transfer.transport or {}
            got = "; ".join(agreement(one) for one in facts.get("negotiated", [])) or "nothing left its worker"
            refused = "; ".join(facts.get("fallbacks", []))
            why = f"{facts.get('reason')}. Negotiated: {got}.{f' Fallbacks: {refused}.' if refused else ''}"
            weight = f"{transfer.weight:.2f}" if transfer.weight is not None else ""
            moved = (transfer.pattern, weight, transfer.flows_peak, _native.format_bytes(transfer.bytes))
            stages = f"{transfer.from_} → {transfer.to}"
            rows.append((job.name, stages, *moved, facts.get("chosen") or "none", why))
    return table(("job", "transfer", "pattern", "weight", "flows", "bytes", "transport", "why"), rows)


def agreement(found: dict[str, Any]) -> str:
    """What was negotiated, in words."""
    words = [found["transport"], found["congestion_control"], found["memory"]]
    if found["rto_min_us"] is not None:
        words.append(f"minimum RTO {found['rto_min_us'] / 1000:g} ms")
    if found["subflows"] is not None:
        words.append(f"{found['subflows']} subflow{'s' if found['subflows'] != 1 else ''}")
    if found["tls"]:
        words += [found["tls"], "certificates of the cluster" if found["authenticated"] else "no identities"]
    return ", ".join(filter(None, words))


def table_of_phases(records: list[dict[str, Any]]) -> Piece:
    """Of each job and phase: its tasks, and their seconds."""
    rows: list[tuple[Any, ...]] = []
    for job in sorted({str(record["job"]) for record in records}):
        for phase in PHASES:
            seconds = sorted(own[phase] for own in records if str(own["job"]) == job and phase in own)
            if seconds:
                shown = [f"{value:.3f}" for value in (sum(seconds), median(seconds), seconds[-1])]
                rows.append((job, phase.removesuffix("_s"), len(seconds), *shown))
    return table(("job", "phase", "tasks", "seconds together", "median", "longest"), rows)


def ports(point: Point) -> Piece:
    """What the ports counted."""
    rows = []
    for port in (port for port in point.ports if port["packets"]):
        rate = f"{port['settings']['bytes_per_second'] * 8 / 1e6:g} Mbit/s"
        queues = [_native.format_bytes(port[f"queue_bytes_{name}"]) for name in ("p50", "p95", "max")]
        counts = (_native.format_bytes(port["bytes"]), port["drops"], port["marks"])
        rows.append((f"{port['switch']} to {port['port']}", rate, *counts, *queues))
    return table(("port", "rate", "bytes", "drops", "marks", "queue p50", "p95", "max"), rows)


def decisions(records: list[dict[str, Any]]) -> Piece:
    rows: list[tuple[str, str, str]] = []
    for record in records:
        at, kind = time_of(record), record["kind"]
        if kind == "decision" and record["command"] == "weights":
            words = (
                f"{own['job']}: {own['from']} → {own['to']} {own['weight']:.2f} ({own['flows']} flows)"
                for own in record["transfers"]
            )
            rows.append((at, "weights", ", ".join(words)))
        elif kind == "decision" and record["command"] == "plan":
            words = (
                f"{leg['transport']}: {leg['reason']}"
                + (f" (not everywhere: {leg['except']})" if leg.get("except") else "")
                for leg in record["plan"]["legs"]
            )
            refused = "; ".join(f"{transport}: {why}" for transport, why in record["plan"]["refused"])
            legs = "; ".join(words) + (f". Not taken: {refused}" if refused else "")
            rows.append((at, f"plan of {record['job']}", legs))
        elif kind in ("refused", "recomputed", "worker-left"):
            shown = {key: value for key, value in record.items() if key not in ("number", "kind", "time")}
            rows.append((at, kind, json.dumps(shown)))
    return table(("time", "what", "to whom, and why"), rows[:DECISIONS_MAX])


def time_of(record: dict[str, Any]) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(record["time"]))
    return f"{clock}.{int(record['time'] * 1000) % 1000:03}"
