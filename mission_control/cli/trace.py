"""`mission trace`: traces of jobs in SWIM's format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from mission_control import _native
from mission_control.errors import BadInput
from mission_control.traces import swim, synthesise
from mission_control.traces.describe import QUANTILES, describe

HOSTS = 600
"""Of the cluster that Facebook's traces of 2009 are of (SWIM's wiki)."""
HOURS_MAX = 10_000

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Describe a trace of jobs, or synthesise one.",
)
Option = typer.Option
Json = Annotated[bool, Option("--json", help="Print JSON")]


@app.command()
def info(
    file: Annotated[str, typer.Argument(metavar="FILE", help="In SWIM's format; or sample, which is in the package")],
    as_json: Json = False,
) -> None:
    """Print how many jobs a trace has, and quantiles of their bytes."""
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
        cells = (_native.format_bytes(found[quantity][name]) for name in (*QUANTILES, "total"))
        lines.append(f"{quantity.removesuffix('_bytes'):8}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


@app.command()
def synth(
    out: Annotated[Path, Option(metavar="FILE", help="Where to write it", show_default=False)],
    source: Annotated[
        str | None, Option("--from", metavar="FILE", help="Sample windows of this trace, as SWIM does")
    ] = None,
    shape: Annotated[
        str | None, Option(metavar="NAME", help=f"Draw jobs from a shape: {', '.join(synthesise.shapes())} [fb-2009]")
    ] = None,
    hours: Annotated[float, Option(metavar="H", help="Hours of the new trace [1]", show_default=False)] = 1.0,
    hosts: Annotated[
        int | None, Option(metavar="N", min=1, help="Hosts that it is for: bytes change in proportion [as the source]")
    ] = None,
    seed: Annotated[int, Option(metavar="N", min=0, help="The same seed makes the same trace [1]")] = 1,
    window: Annotated[float, Option(metavar="H", help="--from: hours of a window [1]", show_default=False)] = 1.0,
    source_hosts: Annotated[
        int | None, Option(metavar="N", min=1, help=f"--from: hosts of the cluster that it is of [{HOSTS}]")
    ] = None,
) -> None:
    """Write a new trace: windows of another one, or jobs drawn from a shape."""
    for option, value in (("--hours", hours), ("--window", window)):
        if not (math.isfinite(value) and 0 < value <= HOURS_MAX):
            raise BadInput(f"{option} {value:g}: use a number of hours above 0, at most {HOURS_MAX}")
    if source is not None and shape is not None:
        raise BadInput("--from and --shape exclude each other: leave one out")
    if source is None:
        if source_hosts is not None:
            raise BadInput("--source-hosts is about --from: a shape has its own number of hosts; leave it out")
        chosen = synthesise.load_shape(shape or "fb-2009")
        jobs, of = synthesise.from_shape(chosen, hours, seed), chosen["hosts"]
    else:
        jobs = synthesise.from_windows(swim.read(swim.find(source)), hours, seed, window)
        of = source_hosts or HOSTS
    if hosts is not None and hosts != of:
        jobs = synthesise.for_hosts(jobs, hosts, of)
    swim.write(out, jobs)
    print(f"{out}: {in_words(describe(jobs))}")
