"""`mission demo`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mission_control import _native
from mission_control import demo as parts
from mission_control.cli.options import Json, make_folder
from mission_control.cli.show import LiveTable
from mission_control.experiments.report_of_run import agreement
from mission_control.experiments.result import Result


def demo(
    results: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the report [results]", show_default=False)
    ] = Path("results"),
    as_json: Json = False,
) -> int:
    """Show in about a minute what Mission Control does.

    It needs no root, no cluster and no other program. First it runs an unchanged Dask program, with Dask alone and
    with Mission Control. Then it runs two encrypted jobs at once, with priorities 7 and 3.
    """
    make_folder("--results", results)
    say = say_nothing if as_json else print_step
    say("1  An unchanged Dask program")
    program = parts.unchanged_program(lambda line: print(f"   {line}", file=sys.stderr, flush=True))
    if not as_json:
        print_program(program)
    say("\n2  Two jobs at once, with priorities 7 and 3; their bytes encrypted")
    with LiveTable(quiet=as_json) as shown:
        result = parts.two_jobs(results, shown)
    Path(result.results, "program.json").write_text(json.dumps(program, indent=1))
    if as_json:
        print(json.dumps({"program": program, "jobs": result.dumped()}))
    else:
        print_jobs(result)
    held = result.ok and result.valid and not result.interrupted
    if held and not as_json:
        print_end(program, result)
    return 0 if held else 130 if result.interrupted else 1


def say_nothing(line: str) -> None:
    """Take the place of :func:`print_step` where only JSON may be printed."""


def print_step(line: str) -> None:
    print(line, flush=True)


def print_program(program: dict[str, Any]) -> None:
    """Print both times, and what makes them comparable."""
    count = f"{program['items']:,} {program['counted']}"
    print(
        f"   {program['program']} of {_native.format_bytes(program['bytes'])}, {count}, on 4 workers; one sample each:"
    )
    print(f"     Dask alone, on disk as is its default  {program['dask_s']:6.2f} s")
    print(f"     the same with Mission Control          {program['mission_control_s']:6.2f} s  {speed_of(program)}")
    by = "Mission Control carried the shuffle" if program["carrier"] == "mission" else "Dask carried the shuffle"
    print(f"   {by}; both results have the same {program['counted']} and the same checksum")


def speed_of(program: dict[str, Any]) -> str:
    return f"{program['ratio']:.1f} times as fast"


def print_jobs(result: Result) -> None:
    """Print what each job got, and the proof of how it travelled."""
    print("   While both fetched; each worker sends at most 150 Mbit/s, since loopback has no rate of its own:")
    jobs = sorted(result.jobs, key=lambda job: -(job.weight or 0))
    for job in jobs:
        due = "no weight" if job.weight is None else f"due {job.weight:.0%} of the bytes"
        share = "too short to tell" if job.share is None else f"got {job.share:.0%}"
        took = "not finished" if job.seconds is None else f"{job.seconds:.1f} s"
        print(f"     {job.name}  {due}, {share}; {took}")
    facts = [own.transport for job in jobs for own in job.transfers if own.transport]
    for reason in dict.fromkeys(str(one["reason"]) for one in facts):
        agreed = (agreement(own) for one in facts if one["reason"] == reason for own in one["negotiated"])
        print(f"   Why this transport: {reason}\n   Negotiated: {'; '.join(dict.fromkeys(agreed))}")
    for job_name, error in result.errors.items():
        print(f"   {job_name} failed: {error}")
    if held := [check for check, held in result.checks.items() if held]:
        print(f"   ok  {', '.join(held)}")
    for check in (check for check, held in result.checks.items() if not held):
        print(f"   FAILED  {check}")


def print_end(program: dict[str, Any], result: Result) -> None:
    """Print what happened, where the report is, and what to try next: a line each."""
    shares = " to ".join(
        f"{job.share:.0%}" for job in sorted(result.jobs, key=lambda job: -(job.weight or 0)) if job.share
    )
    got = f"jobs at 7 to 3 got {shares} of the network" if shares else "the two jobs did not fetch at the same time"
    print(f"\nWhat happened: an unchanged program ran {speed_of(program)}, and {got}, encrypted.")
    print(f"The report of the two jobs: {result.results}/report.html")
    print("Try next: your program on your cluster: start scheduler and workers with --preload mission_control.dask")
