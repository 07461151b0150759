"""What a person sees: the live table of a run, and its result."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mission_control import _native
from mission_control.incast.report import curve_name
from mission_control.lab import picture
from mission_control.report import agreement
from mission_control.runs import Observer, Progress
from mission_control.study_report import UNITS, at_in_words, invalid_reasons, number, ratio_in_words, spread

LINE_EVERY_S = 5
"""Where there is no terminal, a line is enough, and seldom."""


class LiveTable(Observer):
    """Jobs, transfers, pattern, weight, flows, transport, bytes, rate and progress, while a run goes on."""

    def __init__(self, quiet: bool = False):
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, refresh_per_second=4, transient=True)
        self.quiet = quiet
        self.drawn = self.console.is_terminal and not quiet
        self.before: dict[tuple[str, str, str], tuple[float, int]] = {}
        self.rates: dict[tuple[str, str, str], float] = {}
        self.said: dict[str, str] = {}
        self.said_at = 0.0

    def __enter__(self) -> LiveTable:
        if self.drawn:
            self.live.start()
            self.live.update(Text("starts the cluster"))
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.drawn:
            self.live.stop()

    def show(self, progress: Progress) -> None:
        if self.drawn:
            self.live.update(self.draw(progress))
        elif not self.quiet:
            self.say(progress)

    def say(self, progress: Progress) -> None:
        for job, step in progress.steps.items():
            if self.said.get(job) != step:
                self.said[job] = step
                print(f"{job}: {step}", file=sys.stderr, flush=True)
        if time.monotonic() - self.said_at >= LINE_EVERY_S:
            self.said_at = time.monotonic()
            for job in progress.status.get("jobs", []):
                for transfer in job["transfers"]:
                    part = transfer["served_bytes"] / transfer["asked_bytes"] if transfer["asked_bytes"] else 0
                    moved = _native.format_bytes(transfer["served_bytes"])
                    stages = f"{transfer['from']} -> {transfer['to']}"
                    print(f"{job['job']}: {stages} {moved}, {part:.0%} of what was asked for", file=sys.stderr)

    def draw(self, progress: Progress) -> Group:
        table = Table(box=None, header_style="bold")
        for name in ("job", "transfer", "pattern", "weight", "flows", "transport", "bytes", "rate", "progress"):
            table.add_column(name, justify="right" if name in ("weight", "flows", "bytes", "rate") else "left")
        for job in progress.status.get("jobs", []):
            for transfer in job["transfers"]:
                if transfer["asked_bytes"]:
                    table.add_row(*map(Text, self.row(progress.status["time"], job, transfer)))  # names are no markup
        if progress.status.get("hidden"):
            table.add_row(Text(f"and {progress.status['hidden']} more", style="dim"))
        steps = [Text(f"{job}: {step}", style="dim") for job, step in progress.steps.items()]
        return Group(*steps, table)

    def row(self, now: float, job: dict[str, Any], own: dict[str, Any]) -> list[str]:
        key = (job["job"], own["from"], own["to"])
        then, served = self.before.get(key, (now, own["served_bytes"]))
        if now - then >= 0.5 or key not in self.before:
            self.before[key] = (now, own["served_bytes"])
            self.rates[key] = (own["served_bytes"] - served) / (now - then) if now > then else 0.0
        part = own["served_bytes"] / own["asked_bytes"]
        return [
            job["job"],
            f"{own['from']} → {own['to']}",
            own["pattern"],
            f"{own['weight']:.2f}" if own["weight"] is not None else "",
            f"{own['flows_now']}/{own['flows']}" if own["flows"] is not None else str(own["flows_now"]),
            own["transport"]["chosen"] or "",
            _native.format_bytes(own["served_bytes"]),
            f"{_native.format_bytes(int(self.rates[key]))}/s",
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
        print(f"  {transfer['from']} -> {transfer['to']}: {progress_of(transfer)}{share_of(transfer)}, {now}")
        print(f"    pattern: {transfer['pattern']} ({transfer['evidence']})")
        if not transfer["asked_bytes"]:
            continue
        print_facts(facts)
        print_peers(transfer)
    for shuffle in job.get("shuffles", ()):
        print(f"  shuffle {shuffle['shuffle']}: {rows_of(shuffle)}")


def rows_of(shuffle: dict[str, Any]) -> str:
    """Who carries one of the engine's own shuffles, and whether all rows came out."""
    counted = shuffle["counted"]
    if shuffle["engine"] != "mission":
        return f"by Dask, because {shuffle['why']}; nobody counts its {counted}"
    if shuffle["rows_in"] is None:
        return "by Mission Control; not all partitions are added yet"
    rows = f"{shuffle['rows_in']:,} {counted} in, {shuffle['rows_out']:,} out"
    done = f"{shuffle['outputs_done']} of {shuffle['outputs']} output partitions joined, each with all of its {counted}"
    again = f", run {shuffle['runs']} times" if shuffle["runs"] > 1 else ""
    unwanted = f", {shuffle['rows_unwanted']:,} not wanted" if shuffle["rows_unwanted"] else ""
    return f"by Mission Control; {rows}{unwanted} ({done}){again}"


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


def print_study(result: dict[str, Any]) -> None:
    """Medians, ratios and whether they were expected, and where the report lies."""
    for median in result["medians"]:
        labels = ", ".join(filter(None, [median["study"], at_in_words(median["at"]), median["variant"]]))
        print(
            f"{labels}: {UNITS[median['measure']]} {number(median['median'])}, {spread(median)}, {median['runs']} runs"
        )
    for ratio in result["ratios"]:
        mark = {True: "ok", False: "FAILED", None: ""}[ratio["held"]]
        wanted = f", expected {ratio['expected']}" if ratio["expected"] else ""
        print(f"{mark:>6}  {ratio['study']}, {ratio_in_words(ratio)}, {spread(ratio)}{wanted}")
    for entry in result["results"]:
        if why := invalid_reasons(entry):
            labels = ", ".join(filter(None, [entry["study"], at_in_words(entry["at"]), entry["variant"]]))
            print(f"{labels}, repetition {entry['repetition'] + 1}: {why[:300]}")
    print(f"report: {result['folder']}/report.html")


def print_result(result: dict[str, Any]) -> None:
    """What each transfer got and why, the checks, and where the report lies."""
    for job in result["jobs"]:
        took = f"{job['seconds']:.2f} s" if job["seconds"] is not None else "not finished"
        again = f", {job['recomputed']} recomputed" if job["recomputed"] else ""
        print(f"{job['name']}: {took}{share_of(job)}{again}")
        for transfer in job["transfers"]:
            facts = transfer["transport"]
            moved, stayed = _native.format_bytes(transfer["bytes"]), _native.format_bytes(transfer["local_bytes"])
            stages = f"{transfer['from']} -> {transfer['to']}"
            print(f"  {stages}: {transfer['pattern']}, {moved} ({stayed} stayed local){share_of(transfer)}")
            print_facts(facts)
            print_peers(transfer)
            if transfer["refetches"] or transfer["resumed"]:
                print(f"    {transfer['refetches']} ranges fetched again, {transfer['resumed']} resumed")
    for job, error in result["errors"].items():
        print(f"{job} failed: {error}")
    passed = [check for check, held in result["checks"].items() if held]
    if passed:
        print(f"ok  {', '.join(passed)}")
    for check, held in result["checks"].items():
        if not held:
            print(f"FAILED  {check}")
    if result.get("ports"):
        print(picture.table(result["ports"]))
    for why in result.get("invalid_because", ()):
        print(f"INVALID: {why}")
    print(f"report: {result['results']}/report.html")


def one_line(text: str) -> None:
    """Progress that takes the place of what it said before."""
    # A line that is wider than the terminal would not be taken back.
    columns = os.get_terminal_size(sys.stderr.fileno()).columns
    print(f"\r{text[: columns - 1]}\x1b[K", end="", file=sys.stderr, flush=True)


def quiet(_: str) -> None:
    """Nobody looks."""


def print_incast(result: dict[str, Any]) -> None:
    """Goodput of every point, the worlds side by side; onsets; how far the worlds are apart."""
    points = result["points"]
    worlds = list(dict.fromkeys(point["world"] for point in points))
    places = list(dict.fromkeys((curve_name(point), point["senders"]) for point in points))
    found = {(point["world"], curve_name(point), point["senders"]): point for point in points}
    width = max([len("fragment"), *(len(name) for name, _ in places)])
    print(result["study"]["title"] or "goodput", "in Mbit/s")
    print(f"{'fragment':>{width}} {'senders':>7}" + "".join(f" {world:>24}" for world in worlds))
    for name, senders in places:
        cells = (goodput(found.get((world, name, senders))) for world in worlds)
        print(f"{name:>{width}} {senders:7}" + "".join(f" {cell:>24}" for cell in cells))
    for entry in result["onset"]:
        print(f"onset of {curve_name(entry)}, {entry['world']}: {entry['senders'] or 'none of these'}")
    for why in result["invalid_because"]:
        print(f"INVALID  {why}")
    for name, held in result["checks"].items():
        if not held:
            print(f"FAILED   {name}")


def goodput(own: dict[str, Any] | None) -> str:
    if own is None or own["goodput_mbit"] is None:
        return "-"
    if "interval95" not in own:
        return f"{own['goodput_mbit']:.1f}"
    low, high = own["interval95"]
    return f"{own['goodput_mbit']:.1f} ({low:.1f} to {high:.1f})"
