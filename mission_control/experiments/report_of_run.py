"""The report of a single run of jobs: who got what and why, where the time went, and what was decided."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from mission_control import _native
from mission_control.experiments import charts
from mission_control.experiments.pieces import Piece, bar, details, drawn, facts, table, text
from mission_control.experiments.result import JobResult, Point, Transfer
from mission_control.map_reduce.phases import PHASES

DECISIONS_MAX = 500
CURVE_S = 1.0
Record = dict[str, Any]
Section = dict[str, Any]


def sections(point: Point, records: list[Record]) -> list[Section]:
    """Make the sections below the verdict, without those that have nothing to show."""
    series = charts.Series(records)
    found = {
        "Who got what": who_got_what(point, series),
        "Which transport, and why": transports(point),
        "Where the time went": where_time_went(point, series, records),
        "The lab": lab(point) if point.ports else [],
        "Decisions": decisions(records, series.start),
    }
    return [{"title": title, "parts": parts} for title, parts in found.items() if parts]


def by_weight(point: Point) -> list[tuple[JobResult, Transfer]]:
    """Return all transfers, those of the heaviest job first."""
    jobs = sorted(point.jobs, key=lambda job: (-(job.weight or 0), job.name))
    return [(job, transfer) for job in jobs for transfer in job.transfers]


def who_got_what(point: Point, series: charts.Series) -> list[Piece]:
    """Make the table of transfers. Weights and shares are in it where several transfers were active at once."""
    every = by_weight(point)
    shared = any(transfer.share is not None and transfer.share < 1 for _, transfer in every)
    several, many = len(point.jobs) > 1, len(every) > len(point.jobs)
    rows = []
    for job, transfer in every:
        stages = f"{transfer.from_} → {transfer.to}"
        name = (job.name, stages if many else "") if several else (stages, "")
        weight = f"{transfer.weight:.0%}" if shared and transfer.weight is not None else ""
        share = "" if not shared or transfer.share is None else bar(transfer.share, transfer.weight)
        seconds = "" if transfer.seconds is None else f"{transfer.seconds:.2f} s"
        sizes = [_native.format_bytes(size) if size else "" for size in (transfer.local_bytes, transfer.peer_bytes)]
        moved = (seconds, _native.format_bytes(transfer.bytes), *sizes, transfer.flows_peak)
        rows.append((*name, weight, share, *moved, transfer.pattern))
    # On a phone the first columns are in sight.
    moved_head = ("fetched for", "bytes", "local bytes", "bytes from peers", "peak flows")
    first = "job" if several else "transfer"
    head = (first, "transfer", "weight", "share", *moved_head, "pattern")
    words = "Share: fraction of the bytes while all of them fetched. The line in each bar is the weight."
    found = [table(head, rows, words if shared else "")] if rows else []
    if shared and series.shared and series.moved and series.end >= CURVE_S:
        found.append(drawn(charts.shares(series), "Shares of the bytes over time, against weights"))
    return found


def transports(point: Point) -> list[Piece]:
    """Make a table of transports: transfers with the same one, for the same reason, are in one row."""
    named: dict[tuple[str, str, str, str], list[str]] = {}
    several = len(point.jobs) > 1
    for job, transfer in by_weight(point):
        facts = transfer.transport or {}
        agreed = (agreement(one).removeprefix(f"{facts.get('chosen')}, ") for one in facts.get("negotiated", []))
        proof = "; ".join(agreed) or "nothing left its worker"
        key = (facts.get("chosen") or "none", facts.get("reason") or "", proof, "; ".join(facts.get("fallbacks", [])))
        stages = f"{transfer.from_} → {transfer.to}"
        named.setdefault(key, []).append(f"{job.name}: {stages}" if several else stages)
    rows = [(*key, "; ".join(names)) for key, names in named.items()]
    return [table(("transport", "why", "negotiated", "fallbacks", "of"), rows)] if rows else []


def agreement(found: dict[str, Any]) -> str:
    """Describe what was negotiated."""
    words = [found["transport"], found["congestion_control"], found["memory"]]
    if found["rto_min_us"] is not None:
        words.append(f"minimum RTO {found['rto_min_us'] / 1000:g} ms")
    if found["subflows"] is not None:
        words.append(f"{found['subflows']} subflow{'s' if found['subflows'] != 1 else ''}")
    if found["tls"]:
        words += [found["tls"], "certificates of the cluster" if found["authenticated"] else "no identities"]
    elif found["memory"] is None:
        words.append("not encrypted")
    return ", ".join(filter(None, words))


def where_time_went(point: Point, series: charts.Series, records: list[Record]) -> list[Piece]:
    found: list[Piece] = []
    if len(point.jobs) > 1 or any(job.recomputed for job in point.jobs):
        found.append(facts([(job.name, time_of(job)) for job in sorted(point.jobs, key=lambda job: job.name)]))
    if phases := [record for record in records if record["kind"] == "phases"]:
        found += [drawn(charts.phases_of_tasks(phases), "Map, shuffle and reduce, by worker"), table_of_phases(phases)]
    if len(series.stages) > 1:
        found.append(drawn(charts.timeline(series), "When each transfer was active"))
    # Fewer reports of workers than in a second make no curve.
    if series.moved and series.end >= CURVE_S:
        found.append(drawn(charts.rates(series), "Bytes from other workers, per second"))
    if series.end >= CURVE_S and any(points[-1][1] > points[0][1] for points in series.cpu.values()):
        found.append(drawn(charts.processors(series), "CPU cores that each worker used"))
    return found


def time_of(job: JobResult) -> str:
    again = f", {job.recomputed} tasks computed again" if job.recomputed else ""
    return ("not finished" if job.seconds is None else f"{job.seconds:.2f} s") + again


def table_of_phases(records: list[Record]) -> Piece:
    """Make the table of each job's phases: the number of tasks, and their seconds."""
    rows: list[tuple[Any, ...]] = []
    jobs = sorted({str(record["job"]) for record in records})
    for job in jobs:
        for phase in PHASES:
            seconds = sorted(own[phase] for own in records if str(own["job"]) == job and phase in own)
            if seconds:
                times = [f"{value:.3f}" for value in (sum(seconds), median(seconds), seconds[-1])]
                rows.append((job if len(jobs) > 1 else "", phase.removesuffix("_s"), len(seconds), *times))
    head = ("job", "phase", "tasks", "all together, s", "median, s", "longest, s")
    return table(head, rows, "Seconds that tasks spent in each phase")


def lab(point: Point) -> list[Piece]:
    return [ports(point), *([drawn(charts.over_time({"": point}), "Over time")] if point.samples else [])]


def ports(point: Point) -> Piece:
    """Make the table of what the switch ports counted."""
    rows = []
    for port in (port for port in point.ports if port["packets"]):
        rate = f"{port['settings']['bytes_per_second'] * 8 / 1e6:g} Mbit/s"
        queues = [_native.format_bytes(port[f"queue_bytes_{name}"]) for name in ("p50", "p95", "max")]
        counts = (_native.format_bytes(port["bytes"]), port["drops"], port["marks"])
        rows.append((f"{port['switch']} to {port['port']}", rate, *counts, *queues))
    head = ("port", "rate", "bytes", "drops", "marks", "queue p50", "queue p95", "queue max")
    return table(head, rows, "Counters of the switch ports")


def decisions(records: list[Record], start: float) -> list[Piece]:
    """Make the tables of decisions. What was decided several times is one row, with its number and first time."""
    plans: dict[str, list[tuple[float, str]]] = {}
    others: dict[tuple[str, str], list[float]] = {}
    for record in records:
        at, kind = round(record["time"] - start, 2) + 0.0, record["kind"]
        if kind == "decision" and record["command"] == "plan":
            plans.setdefault(plan_in_words(record["plan"]), []).append((at, record["job"]))
        elif kind == "decision" and record["command"] == "weights":
            others.setdefault(("weights", weights_in_words(record["transfers"])), []).append(at)
        elif kind in ("refused", "recomputed", "worker-left"):
            shown = {key: value for key, value in record.items() if key not in ("number", "kind", "time")}
            others.setdefault((kind, json.dumps(shown)), []).append(at)
    rows = [
        ("plan", words, len(times), f"{times[0][0]:.2f}", ", ".join(unique(job for _, job in times)))
        for words, times in plans.items()
    ]
    rows += [(what, words, len(times), f"{times[0]:.2f}", "") for (what, words), times in others.items()]
    if not rows:
        return []
    count = sum(row[2] for row in rows)
    shown_rows = table(
        ("what", "content", "times", "first at, s", "jobs"),
        rows[:DECISIONS_MAX],
        "Seconds as in the plots; before 0 no task fetched",
    )
    more = [text(f"{len(rows) - DECISIONS_MAX} more are in records.jsonl.")] if len(rows) > DECISIONS_MAX else []
    return [details(f"{count} decisions, {len(rows)} of them different", shown_rows, *more)]


def plan_in_words(plan: dict[str, Any]) -> str:
    """Describe the transports of a plan, and those that are not in it by the reason."""
    legs = (
        f"{leg['transport']}: {leg['reason']}" + (f" (not everywhere: {leg['except']})" if leg.get("except") else "")
        for leg in plan["legs"]
    )
    refused: dict[str, list[str]] = {}
    for transport, why in plan["refused"]:
        refused.setdefault(why, []).append(transport)
    reasons = (f"{', '.join(names)}: {why}" for why, names in refused.items())
    return "; ".join(legs) + (f". Not taken: {'; '.join(reasons)}" if refused else "")


def weights_in_words(transfers: Sequence[Record]) -> str:
    return ", ".join(
        f"{own['job']}: {own['from']} → {own['to']} {own['weight']:.2f} ({own['flows']} flows)" for own in transfers
    )


def unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
