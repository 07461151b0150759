"""`mission trace`: traces of jobs in SWIM's format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from mission_control import _native
from mission_control.cli.options import Json, not_empty
from mission_control.errors import BadInput
from mission_control.traces import swim, synthesise
from mission_control.traces.describe import QUANTILES, describe

HOSTS = 600
"""Of the cluster that Facebook's traces of 2009 are of (SWIM's wiki)."""
HOURS_MAX = 10_000
HOSTS_MAX = 1_000_000

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Describe a trace of jobs, or synthesise one.",
)
Option = typer.Option


@app.command()
def info(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", callback=not_empty, help="Trace in SWIM's format, or sample (comes with the package)"
        ),
    ],
    as_json: Json = False,
) -> None:
    """Print the number of jobs of a trace, and quantiles of their bytes."""
    found = describe(swim.read(swim.find(file)))
    print(json.dumps(found) if as_json else in_words(found))


def in_words(found: dict[str, Any]) -> str:
    """A description as a table."""
    counts = sorted(found["jobs_per_hour"])
    lines = [
        f"{found['jobs']} jobs in {found['hours']:.2f} h, {found['map_only']} of them shuffle nothing",
        f"jobs per hour: {counts[0]} to {counts[-1]}, median {counts[len(counts) // 2]}",
        f"{'':8}" + "".join(f"{name:>12}" for name in (*QUANTILES, "total")),
    ]
    for quantity in swim.QUANTITIES:
        cells = (size_of(found[quantity][name]) for name in (*QUANTILES, "total"))
        lines.append(f"{quantity.removesuffix('_bytes'):8}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def size_of(count: int) -> str:
    """Format bytes; all jobs of a trace may have more than fits 64 bits."""
    try:
        return _native.format_bytes(count)
    except OverflowError:
        return f"{count / (1 << 60):.1f} EiB"


@app.command()
def synth(
    out: Annotated[Path, Option(metavar="FILE", help="File to write, e.g. new.tsv", show_default=False)],
    source: Annotated[
        str | None, Option("--from", metavar="FILE", help="Sample windows of this trace, as SWIM does [off]")
    ] = None,
    shape: Annotated[
        str | None,
        Option(metavar="NAME", help=f"Generate jobs from a shape: {', '.join(synthesise.shapes())} [fb-2009]"),
    ] = None,
    hours: Annotated[
        float, Option(metavar="H", help="Length of the new trace in hours, e.g. 0.5 [1]", show_default=False)
    ] = 1.0,
    hosts: Annotated[
        int | None,
        Option(
            metavar="N",
            min=1,
            max=HOSTS_MAX,
            help="Hosts of the target cluster; bytes change in proportion [hosts of the source]",
        ),
    ] = None,
    seed: Annotated[
        int, Option(metavar="N", min=0, help="Seed; the same seed makes the same trace [1]", show_default=False)
    ] = 1,
    window: Annotated[
        float | None, Option(metavar="H", help="--from: length of a window in hours [1]", show_default=False)
    ] = None,
    source_hosts: Annotated[
        int | None, Option(metavar="N", min=1, max=HOSTS_MAX, help=f"--from: hosts of the traced cluster [{HOSTS}]")
    ] = None,
    force: Annotated[bool, Option("--force", help="Overwrite the file of --out [off]")] = False,
    as_json: Json = False,
) -> None:
    """Write a new trace: windows of another one, or jobs generated from a shape.

    With --json print the description that mission trace info prints.
    """
    for option, value in (("--hours", hours), ("--window", window)):
        if value is not None and not (math.isfinite(value) and 0 < value <= HOURS_MAX):
            raise BadInput(f"{option} {value:g}: use a number of hours above 0, at most {HOURS_MAX}")
    if source is not None and shape is not None:
        raise BadInput("--from and --shape exclude each other: leave one out")
    if out.exists() and not force:
        raise BadInput(f"--out {out}: the file exists; choose another name, or give --force to overwrite it")
    if source is None:
        if source_hosts is not None:
            raise BadInput("--source-hosts is about --from: a shape has its own number of hosts; leave it out")
        if window is not None:
            raise BadInput("--window is about --from: a shape has no windows; leave it out")
        chosen = synthesise.load_shape(shape or "fb-2009")
        jobs, of = synthesise.from_shape(chosen, hours, seed), chosen["hosts"]
    else:
        jobs = synthesise.from_windows(swim.read(swim.find(source)), hours, seed, 1.0 if window is None else window)
        of = source_hosts or HOSTS
    if hosts is not None and hosts != of:
        jobs = synthesise.for_hosts(jobs, hosts, of)
    found = describe(jobs)
    swim.write(out, jobs)
    print(json.dumps({"file": str(out), **found}) if as_json else f"{out}: {in_words(found)}")
