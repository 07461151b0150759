"""`mission run` and `mission report`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mission_control import _native, study
from mission_control import runs as runner
from mission_control.cli.show import LiveTable, one_line, print_incast, print_result, print_study, quiet
from mission_control.incast import folder as incast_folder
from mission_control.incast import run as incast
from mission_control.scenario import BadInput, Scenario, ScenarioError, with_changes, with_settings
from mission_control.worlds import WORLDS

Option = typer.Option


def run(
    scenario: Annotated[
        str,
        typer.Argument(
            metavar="SCENARIO", help="sort, kmeans, wordcount, mix, a file ending in .toml, or a folder of them"
        ),
    ],
    size: Annotated[str | None, Option(metavar="SIZE", help="Input per job (sort, wordcount) [1GiB]")] = None,
    points: Annotated[int | None, Option(metavar="N", help="Points per job (kmeans) [2000000]")] = None,
    k: Annotated[int | None, Option("--k", metavar="N", help="Clusters (kmeans) [100]")] = None,
    dimensions: Annotated[int | None, Option(metavar="N", help="Coordinates per point (kmeans) [8]")] = None,
    jobs: Annotated[int | None, Option(metavar="N", help="Concurrent jobs [1]")] = None,
    partitions: Annotated[int | None, Option(metavar="N", help="Map tasks per job (sort: and reduce) [auto]")] = None,
    engine: Annotated[
        str | None, Option(metavar="NAME", help="What tasks are of (sort, kmeans): python, java, mapreduce [python]")
    ] = None,
    seed: Annotated[int | None, Option(metavar="N", help="Input seed [1]")] = None,
    data: Annotated[Path | None, Option(metavar="DIR", help="Shared data folder [run folder]")] = None,
    keep_data: Annotated[bool, Option("--keep-data", help="Do not delete data [off]")] = False,
    world: Annotated[
        str | None,
        Option("--in", metavar="WORLD", help="local, lab (root), cluster; incast: model, lab [from file]"),
    ] = None,
    scheduler: Annotated[str | None, Option(metavar="URL", help="Running cluster, e.g. tcp://HOST:8786")] = None,
    workers: Annotated[int | None, Option(metavar="N", help="Worker processes [4]")] = None,
    hosts: Annotated[int | None, Option(metavar="N", help="Lab: alias of --workers [4]")] = None,
    memory_limit: Annotated[str | None, Option(metavar="SIZE", help="Per worker, e.g. 1GiB [auto]")] = None,
    policy: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=f"{', '.join(name for name, _ in _native.policies())} or python:MODULE:FUNCTION [performance-centric]",
        ),
    ] = None,
    priorities: Annotated[str | None, Option(metavar="LIST", help="One number > 0 per job, e.g. 1,2")] = None,
    transport: Annotated[
        str | None, Option(metavar="NAME", help="Require shm, tcp, tls, mptcp, dctcp, ictcp [auto]")
    ] = None,
    encrypt: Annotated[bool, Option("--encrypt", help="Require mutually authenticated TLS [off]")] = False,
    opportunistic: Annotated[bool, Option("--opportunistic", help="Encrypt without authentication [off]")] = False,
    flows_per_host: Annotated[
        str | None, Option(metavar="N", help="Concurrent chunks received: N, all, auto [10]")
    ] = None,
    topology: Annotated[str | None, Option(metavar="NAME", help="Lab: star, two-rack, two-path, bonded [star]")] = None,
    link_rate: Annotated[str | None, Option(metavar="RATE", help="Lab: per host [auto: at most 100Mbit/s]")] = None,
    buffer: Annotated[str | None, Option(metavar="SIZE", help="Lab: per switch port [64KiB]")] = None,
    ecn_threshold: Annotated[
        str | None,
        Option(metavar="SIZE", help="Lab: queue length that triggers ECN marks, e.g. 30KiB [off; 30kB for dctcp]"),
    ] = None,
    mtu: Annotated[int | None, Option(metavar="BYTES", help="Lab: 576 to 9000 [1500]")] = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Any key, e.g. stack.rto_min=200ms; repeatable"),
    ] = None,
    compare: Annotated[str | None, Option(metavar="LIST", help="Compare transports, e.g. tcp,auto")] = None,
    repeat: Annotated[
        int | None, Option(metavar="N", min=1, help="Runs per variant; prints median, 95 % interval [1]")
    ] = None,
    resume: Annotated[Path | None, Option(metavar="DIR", help="Continue an interrupted study")] = None,
    labs: Annotated[
        int, Option(metavar="N", min=1, show_default=False, help="Incast scenarios run in parallel [2]")
    ] = incast_folder.LABS,
    results: Annotated[Path, Option(metavar="DIR", show_default=False, help="Output folder [results]")] = Path(
        "results"
    ),
    as_json: Annotated[bool, Option("--json", help="Print JSON")] = False,
) -> int:
    """Run a scenario, print what each transfer got and why, and write results/<id>/report.html.

    [x] is the default. Options override the file.
    """
    try:
        ranks = tuple(float(word) for word in priorities.split(",")) if priorities else None
    except ValueError:
        raise BadInput(f"--priorities {priorities}: write numbers above 0, as in 1,2") from None
    if encrypt and opportunistic:
        raise BadInput("--encrypt and --opportunistic exclude each other: leave one out")
    changes: dict[str, dict[str, Any]] = {
        "topology": {
            "kind": topology,
            "hosts": hosts if workers is None else workers,
            "memory_limit": memory_limit,
            "link_rate": link_rate,
            "mtu": mtu,
        },
        "topology.port": {"buffer": buffer, "ecn_threshold": ecn_threshold},
        "workload": {
            "size": size,
            "points": points,
            "k": k,
            "dimensions": dimensions,
            "jobs": jobs,
            "partitions": partitions,
            "engine": engine,
            "seed": seed,
        },
        "control": {
            "policy": policy,
            "priorities": ranks,
            "transport": transport,
            "encrypt": True if encrypt else "opportunistic" if opportunistic else None,
            "flows_per_host": int(flows_per_host) if flows_per_host and flows_per_host.isdecimal() else flows_per_host,
        },
    }
    scenarios = study.scenarios_in(scenario)
    for name, entry in scenarios.items():
        with_set = with_settings(entry, settings or ())
        try:
            changed = with_changes(with_set, changes)
        except ScenarioError as error:
            raise BadInput(in_words_of_options(error, changes, "--hosts" if workers is None else "--workers")) from None
        scenarios[name] = with_study(changed, compare, repeat)
    incasts = [entry for entry in scenarios.values() if entry.workload.kind == "incast"]
    if len(incasts) == len(scenarios):
        return incast_of(scenarios, world, results, resume, labs, as_json)
    if incasts:
        raise BadInput(f"{scenario} has scenarios of incast and of jobs: run them apart")
    worlds = {entry.world for entry in scenarios.values()}
    if world is None and scheduler is None and len(worlds) > 1:
        raise BadInput(f"the scenarios of {scenario} run in several worlds: choose one with --in")
    world = world or ("cluster" if scheduler else min(worlds))
    if world not in WORLDS or (world == "cluster") != (scheduler is not None):
        raise BadInput(f"--in {world}: unknown world. Use local, lab or --scheduler ADDRESS.")
    # A single variant is not the scenario itself.
    varied = any(entry.study.compare or len(study.runs_of(name, entry)) > 1 for name, entry in scenarios.items())
    for option, folder in (("--results", results), ("--data", data if world != "cluster" else None)):
        try:
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{option} {folder}: cannot be written ({error.strerror}); choose another folder") from None
    if len(scenarios) > 1 or resume or varied:
        if data or keep_data:
            raise BadInput("--data and --keep-data are for one run: leave them out of a study")
        return study_of(scenarios, world, scheduler, results, resume, as_json)
    (changed,) = scenarios.values()
    with LiveTable(quiet=as_json) as table:
        result = runner.run(
            changed,
            world=world,
            scheduler=scheduler,
            results=results,
            data=data,
            keep_data=keep_data,
            observer=table,
        )
    if as_json:
        print(json.dumps(result))
    else:
        print_result(result)
    if result["interrupted"]:
        return 130
    if not result.get("valid", True):
        return 5
    return 0 if result["ok"] else 1


def in_words_of_options(error: ScenarioError, changes: dict[str, dict[str, Any]], hosts: str) -> str:
    """What is wrong with a value of the command line, by the option that the user typed."""
    for part, change in changes.items():
        for key, value in change.items():
            place = (*part.split("."), key)
            if value is None or error.where[: len(place)] != place:
                continue
            option = {"hosts": hosts, "kind": "--topology"}.get(key, f"--{key.replace('_', '-')}")
            typed = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            return f"{option}: {error.why}" if repr(typed) in error.why else f"{option} {typed}: {error.why}"
    return str(error)


def with_study(scenario: Scenario, compare: str | None, repeat: int | None) -> Scenario:
    """With the variants and repetitions of the command line in place of its own."""
    changes: dict[str, Any] = {"repeat": repeat}
    if compare is not None:
        transports = [word.strip() for word in compare.split(",")]
        changes["compare"] = [{"name": transport, "set": {"control.transport": transport}} for transport in transports]
    return with_changes(scenario, {"study": changes})


def study_of(
    scenarios: dict[str, Scenario],
    world: str,
    scheduler: str | None,
    results: Path,
    resume: Path | None,
    as_json: bool,
) -> int:
    """Runs a study and says what came out."""

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    result = study.conduct(scenarios, world=world, scheduler=scheduler, results=results, resume=resume, say=say)
    if as_json:
        print(json.dumps(result))
    else:
        print_study(result)
    if result["interrupted"]:
        say(f"go on with --resume {result['folder']}")
        return 130
    if not result["valid"]:
        return 5
    return 0 if result["ok"] else 1


def incast_of(
    scenarios: dict[str, Scenario], worlds: str | None, results: Path, resume: Path | None, labs: int, as_json: bool
) -> int:
    """Measures grids of synchronized reads and says what came out."""
    asked = [word.strip() for word in worlds.split(",")] if worlds else None
    progress = quiet if as_json or not sys.stderr.isatty() else one_line
    if len(scenarios) > 1:
        result = incast_folder.conduct_all(scenarios, asked, results=results, folder=resume, labs=labs, say=progress)
        shown = list(result["studies"].values())
    else:
        (scenario,) = scenarios.values()
        result = incast.conduct(
            scenario, asked or incast.worlds_of(scenario), results=results, folder=resume, say=progress
        )
        shown = [result]
    progress("")
    if as_json:
        print(json.dumps(result))
    else:
        for entry in shown:
            print_incast(entry)
        print(f"report: {result['results']}/report.html")
    if result["interrupted"]:
        print(f"go on with --resume {result['results']}", file=sys.stderr)
        return 130
    if not result["valid"]:
        return 5
    return 0 if result["ok"] else 1


def report(folder: Annotated[Path, typer.Argument(help="of a run or a study: results/<id>")]) -> None:
    """Draws the report of a run or of a study again, from what it has left."""
    from mission_control import report, study_report
    from mission_control.incast import report as incast_report

    write = report.write
    if (folder / study_report.STUDY).exists():
        write = study_report.write
    elif (folder / incast.POINTS).exists():
        write = incast_report.write
    elif any(folder.glob(f"*/{incast.POINTS}")):
        write = incast_report.write_all
    try:
        print(write(folder))
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder} has no records to draw: name a folder results/<id> ({error})") from None
