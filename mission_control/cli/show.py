"""What a person sees: the live table of a run, and its result."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mission_control import _native
from mission_control.experiments.charts import curve_name
from mission_control.experiments.compare import number, spread
from mission_control.experiments.engine import Observer
from mission_control.experiments.report import in_words
from mission_control.experiments.report_of_run import agreement
from mission_control.experiments.result import Result
from mission_control.incast import quantities
from mission_control.lab import picture

LINE_EVERY_S = 5
"""Seconds between lines of progress where there is no terminal."""
CHAINS_SHOWN = 10
"""Most chains of a job that are printed."""


class LiveTable(Observer):
    """How far a run is and how long the rest may take; jobs, transfers, pattern, weight, flows, transport, bytes, rate.

    Args:
        quiet: lines on points and what is worth one, and no table.
    """

    def __init__(self, quiet: bool = False):
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, refresh_per_second=4, transient=True)
        self.quiet = quiet
        # Where the environment asks for colours (FORCE_COLOR) a file is still no place for a table that moves.
        self.drawn = (
            sys.stderr.isatty() and self.console.is_terminal and not self.console.is_dumb_terminal and not quiet
        )
        self.before: dict[tuple[str, str, str], tuple[float, int]] = {}
        self.rates: dict[tuple[str, str, str], float] = {}
        self.line = self.doing = ""
        self.said_at = self.moved_at = 0.0

    def __enter__(self) -> LiveTable:
        if self.drawn:
            self.live.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.drawn:
            self.live.stop()

    def show(self, line: str, doing: str, status: Mapping[str, Any]) -> None:
        if self.drawn:
            self.live.update(self.draw(line, doing, status))
            return
        if line and line != self.line and time.monotonic() - self.said_at >= LINE_EVERY_S:
            self.said_at, self.line = time.monotonic(), line
            self.say(line)
        if not self.quiet:
            self.say_doing(doing, status)

    def say(self, line: str) -> None:
        if self.drawn:
            self.console.print(Text(line))
        else:
            print(line, file=sys.stderr, flush=True)

    def say_doing(self, doing: str, status: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if not status or now - self.moved_at < LINE_EVERY_S:
            if doing != self.doing and status:
                self.doing = doing
                print(doing, file=sys.stderr, flush=True)
            return
        self.moved_at = now
        for job in status.get("jobs", []):
            for transfer in job["transfers"]:
                part = transfer["served_bytes"] / transfer["asked_bytes"] if transfer["asked_bytes"] else 0
                moved = _native.format_bytes(transfer["served_bytes"])
                stages = f"{transfer['from']} -> {transfer['to']}"
                print(f"{job['job']}: {stages} {moved}, {part:.0%} of what was asked for", file=sys.stderr)

    def draw(self, line: str, doing: str, status: Mapping[str, Any]) -> Group:
        table = Table(box=None, header_style="bold")
        for name in ("job", "transfer", "pattern", "weight", "flows", "transport", "bytes", "rate", "progress"):
            table.add_column(name, justify="right" if name in ("weight", "flows", "bytes", "rate") else "left")
        for job in status.get("jobs", []):
            for transfer in job["transfers"]:
                if transfer["asked_bytes"]:
                    table.add_row(*map(Text, self.row(status["time"], job, transfer)))  # names are no markup
        if status.get("hidden"):
            table.add_row(Text(f"and {status['hidden']} more", style="dim"))
        steps = [Text(text, style="dim") for text in (line, doing) if text]
        return Group(*steps, *([table] if status else []))

    def row(self, now: float, job: dict[str, Any], own: dict[str, Any]) -> list[str]:
        key = (job["job"], own["from"], own["to"])
        then, served = self.before.get(key, (now, own["served_bytes"]))
        if now - then >= 0.5 or key not in self.before:
            self.before[key] = (now, own["served_bytes"])
            self.rates[key] = (own["served_bytes"] - served) / (now - then) if now > then else 0.0
        part = min(1.0, own["served_bytes"] / own["asked_bytes"]) if own["asked_bytes"] else 0.0
        rate = own.get("rate", self.rates[key])
        return [
            job["job"],
            f"{own['from']} → {own['to']}",
            own["pattern"],
            f"{own['weight']:.2f}" if own["weight"] is not None else "",
            f"{own['flows_now']}/{own['flows']}" if own["flows"] is not None else str(own["flows_now"]),
            own["transport"]["chosen"] or "",
            _native.format_bytes(own["served_bytes"]),
            f"{_native.format_bytes(max(0, int(rate)))}/s",
            f"{'█' * int(10 * part):<10} {part:4.0%}",
        ]


def print_jobs(status: dict[str, Any]) -> None:
    """The jobs of a cluster, a line each, and a line for each transfer."""
    print(f"policy {status['policy']}, {len(status['workers'])} workers, {status['objects']} objects")
    if status["policy_error"]:
        print(status["policy_error"])
    print_problems(status)
    for job in status["jobs"]:
        demands = job["demands"]["transport"] or "auto"
        state = job["refused"] or ("active" if job["active"] else "idle")
        print(f"{job['job']}: priority {job['priority']:g}, transport {demands}, {state}{share_of(job)}")
        print_chains(job)
        for transfer in job["transfers"]:
            if transfer["asked_bytes"]:
                print(f"  {transfer['from']} -> {transfer['to']}: {progress_of(transfer)}")


def print_problems(status: dict[str, Any]) -> None:
    """Print what each worker cannot do, and why."""
    for worker, why in status["without"].items():
        print(f"{worker} has no data plane: {why}")
    for worker, facts in status["workers"].items():
        for problem in facts["problems"]:
            print(f"{worker}: {problem}")
    for own in status["off"]:
        print(f"{own['where']}: off, Dask goes on without it: {own['part']}: {own['why']}")


def print_explanation(job: dict[str, Any], policy: str) -> None:
    """Of each transfer of a job what it gets, and why."""
    print(f"{job['job']}: priority {job['priority']:g}, policy {policy}{share_of(job)}")
    if "ended" in job:
        print(f"  it was over at {time.strftime('%H:%M:%S', time.localtime(job['ended']))}")
    if job["refused"]:
        print(f"  refused: {job['refused']}")
        return
    for place, leg in enumerate(job["plan"]["legs"]):
        where = "on the same host" if leg["reach"] == "same-host" else "anywhere"
        where = f"where it can be had, {leg['except']}" if leg["except"] else where
        print(f"  {'first' if place == 0 else 'else'} {leg['transport']} ({where}): {leg['reason']}")
    for transport, why in job["plan"]["refused"]:
        print(f"  not {transport}: {why}")
    for transfer in job["transfers"]:
        facts = transfer["transport"]
        now = f"{transfer['flows_now']} flows now"
        if not transfer["asked_bytes"]:
            print(f"  {transfer['from']} -> {transfer['to']}: nothing moved")
            print(f"    pattern: {transfer['pattern']} ({transfer['evidence']})")
            continue
        print(f"  {transfer['from']} -> {transfer['to']}: {progress_of(transfer)}{share_of(transfer)}, {now}")
        print(f"    pattern: {transfer['pattern']} ({transfer['evidence']})")
        print_facts(facts)
        print_peers(transfer)
    if (earlier := job.get("earlier", {"transfers": 0}))["transfers"]:
        moved = _native.format_bytes(earlier["served_bytes"])
        print(f"  and {earlier['transfers']:,} earlier transfers, which moved {moved}")
    for shuffle in job.get("shuffles", ()):
        print(f"  shuffle {shuffle['shuffle']}: {rows_of(shuffle)}")
    print_chains(job)


def print_rows(job: dict[str, Any], rows: list[dict[str, Any]], policy: str) -> None:
    """Of each active transfer of a service's job what it gets, and why."""
    weight = "nothing of it is active" if job["weight"] is None else f"weight {job['weight']:.3f} of its hosts' bytes"
    print(f"{job['cluster']}/{job['job']}: priority {job['priority']:g}, policy {policy}, {weight}")
    for row in rows:
        weight = "" if row["weight"] is None else f", weight {row['weight']:.3f}"
        speed = f"{_native.format_bytes(int(row['bytes_per_sec']))}/s"
        print(f"  {row['from']} -> {row['to']}: {progress_of(row)}{weight}, {row['flows']} flows now, {speed}")
        print(f"    pattern: {row['pattern']} ({row['evidence']})")
        print_facts(
            {
                "chosen": row["transport"],
                "reason": row["reason"],
                "negotiated": row["negotiated"],
                "bytes": {},
                "fallbacks": row["fallbacks"],
            }
        )


def print_chains(job: dict[str, Any]) -> None:
    """Of each task that has handed its result on how far it is."""
    for chain in job.get("chains", ())[:CHAINS_SHOWN]:
        again = f", begun again {chain['again']} times" if chain["again"] else ""
        print(f"  {chain['key']} has delegated {chain['steps']} times{again}")
    if (more := len(job.get("chains", ())) - CHAINS_SHOWN) > 0:
        print(f"  and {more} more tasks that have delegated")


def rows_of(shuffle: dict[str, Any]) -> str:
    """Who carries one of the engine's own shuffles, and whether all rows came out."""
    counted = shuffle["counted"]
    if shuffle["engine"] != "mission":
        return f"by Dask, because {shuffle['why']}; nobody counts its {counted}"
    carrier = f"by Mission Control ({shuffle['why']})" if shuffle["why"] else "by Mission Control"
    if shuffle["rows_in"] is None:
        return f"{carrier}; not all partitions are added yet"
    rows = f"{shuffle['rows_in']:,} {counted} in, {shuffle['rows_out']:,} out"
    done = f"{shuffle['outputs_done']} of {shuffle['outputs']} output partitions joined, each with all of its {counted}"
    again = f", run {shuffle['runs']} times" if shuffle["runs"] > 1 else ""
    unwanted = f", {shuffle['rows_unwanted']:,} not wanted" if shuffle["rows_unwanted"] else ""
    return f"{carrier}; {rows}{unwanted} ({done}){again}"


def share_of(own: dict[str, Any]) -> str:
    """Of a job or a transfer, in words."""
    return f", weight {own['weight']:.2f}, {own['flows']} flows of a host" if own["weight"] is not None else ""


def progress_of(own: dict[str, Any]) -> str:
    part = own["served_bytes"] / own["asked_bytes"] if own["asked_bytes"] else 0.0
    return f"{own['pattern']}, {_native.format_bytes(own['served_bytes'])}, {part:.0%} of what was asked for"


def print_facts(facts: dict[str, Any]) -> None:
    """Print the transport and its reason, what was negotiated, what each transport carried, and the fallbacks."""
    agreed = "; ".join(agreement(one).removeprefix(f"{facts['chosen']}, ") for one in facts["negotiated"])
    print(f"    transport: {facts['chosen'] or 'none'} ({facts['reason']})" + (f"; {agreed}" if agreed else ""))
    if len(facts["bytes"]) > 1:
        carried = (f"{_native.format_bytes(count)} by {transport}" for transport, count in facts["bytes"].items())
        print("    carried: " + ", ".join(carried))
    for fallback in facts["fallbacks"]:
        print(f"    fallback: {fallback}")


def print_peers(transfer: dict[str, Any]) -> None:
    if transfer["peer_bytes"]:
        print(f"    {_native.format_bytes(transfer['peer_bytes'])} of it served by other receivers, not by the owner")


def print_result(result: Result) -> None:
    """What was measured, whether it is as expected, and where the report lies."""
    from mission_control.workloads import WORKLOADS

    single = len(result.points) == 1 and bool(result.points[0].jobs)
    if single:
        (study,) = result.studies.values()
        if (lines := WORKLOADS[study["kind"]].lines(result.points[0])) is not None:
            print(*lines, sep="\n")
        else:
            print_jobs_of(result)
    else:
        print_summary(result)
    for place in result.onset:
        curve = f"{place.variant} {quantities.size(place.asked_bytes)}".strip()
        by_block = f"of the median block {place.senders or 'none of these'}"
        print(f"onset of {curve}, {place.world}: {place.of_goodput or 'none of these'} senders, {by_block}")
    for one in result.comparisons:
        mark = {True: "ok", False: "FAILED", None: ""}[one.held]
        wanted = f", expected {one.expected}" if one.expected else ""
        print(f"{mark:>6}  {one.study}, {in_words(one)}: {number(one.median)}, {spread(one)}{wanted}")
    for over in result.overheads:
        print(f"incast overhead, {over.study}, {in_words(over)}: {number(over.median)}, {spread(over)}")
    for job, error in result.errors.items():
        print(f"{job} failed: {error}")
    passed = [check for check, held in result.checks.items() if held]
    if passed and single:
        print(f"ok  {', '.join(passed)}")
    for check, held in result.checks.items():
        if not held:
            print(f"FAILED  {check}")
    if result.ports:
        print(picture.table(result.ports))
    for why in result.invalid_because:
        print(f"INVALID: {why}")
    print(f"report: {result.results}/report.html")


def print_jobs_of(result: Result) -> None:
    """What each transfer got and why."""
    for job in result.jobs:
        took = f"{job.seconds:.2f} s" if job.seconds is not None else "not finished"
        again = f", {job.recomputed} recomputed" if job.recomputed else ""
        got = f", got {job.share:.0%} of the bytes" if job.share is not None and len(result.jobs) > 1 else ""
        print(f"{job.name}: {took}{share_of(vars(job))}{got}{again}")
        for transfer in job.transfers:
            moved, stayed = _native.format_bytes(transfer.bytes), _native.format_bytes(transfer.local_bytes)
            stages = f"{transfer.from_} -> {transfer.to}"
            print(f"  {stages}: {transfer.pattern}, {moved} ({stayed} stayed local){share_of(vars(transfer))}")
            if transfer.transport is not None:
                print_facts(transfer.transport)
            print_peers(vars(transfer))
            if transfer.refetches or transfer.resumed:
                print(f"    {transfer.refetches} ranges fetched again, {transfer.resumed} resumed")


def print_summary(result: Result) -> None:
    """Medians with intervals: a line each, or a table of the worlds side by side where they are points of curves."""
    from mission_control.workloads import WORKLOADS

    for name, study in result.studies.items():
        workload = WORKLOADS[study["kind"]]
        for measure in study["measure"]:
            own = [one for one in result.summary if (one.study, one.measure) == (name, measure)]
            label = workload.measures[measure].label
            if not workload.axis:
                for one in own:
                    words = f"{in_words(one)}, {label}: {number(one.median)}, {spread(one)}, {one.runs} runs"
                    print(f"{name}, {words}" if len(result.studies) > 1 else words)
                continue
            worlds = list(dict.fromkeys(one.world for one in own))
            rows: dict[tuple[str, Any], dict[str, str]] = {}
            for one in own:
                ends = f" ({number(one.low)} to {number(one.high)})" if one.low != one.high else ""
                place = (curve_name(one.variant, one.at, workload.axis), one.at[workload.axis])
                rows.setdefault(place, {})[one.world] = f"{number(one.median)}{ends}"
            width = max([8, *(len(curve) for curve, _ in rows)])
            print(study["title"] or name, label, sep=": ")
            axis = workload.axis.rpartition(".")[2]
            print(f"{'':>{width}} {axis:>7}" + "".join(f" {world:>24}" for world in worlds))
            for (curve, place), cells in rows.items():
                shown = "".join(f" {cells.get(world, '-'):>24}" for world in worlds)
                print(f"{curve:>{width}} {place:7}{shown}")
