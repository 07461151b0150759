"""`mission run` and `mission report`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mission_control import run as runner
from mission_control import study
from mission_control.cli.show import LiveTable, one_line, print_incast, print_result, print_study, quiet
from mission_control.incast import folder as incast_folder
from mission_control.incast import run as incast
from mission_control.scenario import BadInput, Scenario, with_changes, with_settings
from mission_control.worlds import WORLDS

Option = typer.Option


def run(
    scenario: Annotated[
        str, typer.Argument(help="a built-in scenario (sort, kmeans), a file that ends in .toml, or a folder of them")
    ],
    size: Annotated[str | None, Option(help="sort: input of each job, as in 1GiB")] = None,
    points: Annotated[int | None, Option(help="kmeans: points of each job")] = None,
    k: Annotated[int | None, Option("--k", help="kmeans: centres")] = None,
    dimensions: Annotated[int | None, Option(help="kmeans: of each point")] = None,
    workers: Annotated[int | None, Option(help="worker processes to start")] = None,
    jobs: Annotated[int | None, Option(help="jobs at once")] = None,
    policy: Annotated[str | None, Option(help="see mission weights --help")] = None,
    priorities: Annotated[str | None, Option(help="of the jobs in order, as in 1,2")] = None,
    transport: Annotated[str | None, Option(help="auto, tcp, tls, ...: every job demands it")] = None,
    encrypt: Annotated[bool, Option("--encrypt", help="authenticated TLS, or the job is refused")] = False,
    opportunistic: Annotated[bool, Option("--opportunistic", help="encrypted, without identities")] = False,
    flows_per_host: Annotated[
        str | None, Option(help="receiving slots of a host: a number, all, or auto: found by trial")
    ] = None,
    memory_limit: Annotated[str | None, Option(help="memory of each worker, as in 1GiB")] = None,
    partitions: Annotated[int | None, Option(help="map and reduce tasks of each job")] = None,
    seed: Annotated[int | None, Option(help="the same seed makes the same input")] = None,
    world: Annotated[
        str | None,
        Option(
            "--in",
            help="local, lab (a data centre made for it; needs root), cluster; incast: model, lab; else as it says",
        ),
    ] = None,
    topology: Annotated[str | None, Option(help="lab: star, two-rack, two-path, bonded")] = None,
    hosts: Annotated[int | None, Option(help="lab: how many, with a worker on each")] = None,
    link_rate: Annotated[str | None, Option(help="lab: of every host's link, as in 100Mbit/s")] = None,
    buffer: Annotated[str | None, Option(help="lab: of a switch port, as in 64KiB")] = None,
    ecn_threshold: Annotated[str | None, Option(help="lab: packets that find more in a port are marked")] = None,
    mtu: Annotated[int | None, Option(help="lab: bytes of a packet")] = None,
    settings: Annotated[
        list[str] | None, Option("--set", help="any key of the scenario, as in stack.rto_min=200ms; may be repeated")
    ] = None,
    scheduler: Annotated[str | None, Option(help="of a Dask cluster that is running, as in tcp://HOST:8786")] = None,
    data: Annotated[Path | None, Option(help="folder for input and output, seen by all workers")] = None,
    keep_data: Annotated[bool, Option("--keep-data", help="leave input and output there")] = False,
    compare: Annotated[str | None, Option(help="run with each of these transports in turn, as in tcp,dctcp")] = None,
    repeat: Annotated[int | None, Option(min=1, help="times; gives medians and 95 % intervals")] = None,
    resume: Annotated[Path | None, Option(help="go on with a study that was interrupted: its folder")] = None,
    labs: Annotated[
        int,
        Option(
            min=1,
            help="incast: scenarios of a folder that run side by side; who expects something of the goodput runs alone",
        ),
    ] = incast_folder.LABS,
    results: Annotated[Path, Option(help="folder for what runs leave")] = Path("results"),
    as_json: Annotated[bool, Option("--json", help="for programs")] = False,
) -> int:
    """Runs a scenario; shows what each transfer gets and why; leaves results/<id>/ with a report."""
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
    for name, own in scenarios.items():
        changed = with_changes(with_settings(own, settings or ()), changes)
        scenarios[name] = with_study(changed, compare, repeat)
    incasts = [own for own in scenarios.values() if own.workload.kind == "incast"]
    if len(incasts) == len(scenarios):
        return incast_of(scenarios, world, results, resume, labs, as_json)
    if incasts:
        raise BadInput(f"{scenario} has scenarios of incast and of jobs: run them apart")
    worlds = {own.world for own in scenarios.values()}
    if world is None and scheduler is None and len(worlds) > 1:
        raise BadInput(f"the scenarios of {scenario} run in several worlds: choose one with --in")
    world = world or ("cluster" if scheduler else min(worlds))
    if world not in WORLDS or (world == "cluster") != (scheduler is not None):
        raise BadInput(f"--in {world}: use local or lab, or give --scheduler")
    if len(scenarios) > 1 or resume or any(len(study.runs_of(name, own)) > 1 for name, own in scenarios.items()):
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


def with_study(scenario: Scenario, compare: str | None, repeat: int | None) -> Scenario:
    """With the variants and repetitions of the command line in place of its own."""
    changes: dict[str, Any] = {"repeat": repeat}
    if compare is not None:
        transports = [word.strip() for word in compare.split(",")]
        changes["compare"] = [{"name": own, "set": {"control.transport": own}} for own in transports]
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

    told = study.conduct(scenarios, world=world, scheduler=scheduler, results=results, resume=resume, say=say)
    if as_json:
        print(json.dumps(told))
    else:
        print_study(told)
    if told["interrupted"]:
        say(f"go on with --resume {told['folder']}")
        return 130
    if not told["valid"]:
        return 5
    return 0 if told["ok"] else 1


def incast_of(
    scenarios: dict[str, Scenario], worlds: str | None, results: Path, resume: Path | None, labs: int, as_json: bool
) -> int:
    """Measures grids of synchronized reads and says what came out."""
    asked = [word.strip() for word in worlds.split(",")] if worlds else None
    progress = quiet if as_json or not sys.stderr.isatty() else one_line
    if len(scenarios) > 1:
        told = incast_folder.conduct_all(scenarios, asked, results=results, folder=resume, labs=labs, say=progress)
        shown = list(told["studies"].values())
    else:
        (scenario,) = scenarios.values()
        told = incast.conduct(
            scenario, asked or incast.worlds_of(scenario), results=results, folder=resume, say=progress
        )
        shown = [told]
    progress("")
    if as_json:
        print(json.dumps(told))
    else:
        for own in shown:
            print_incast(own)
        print(f"report: {told['results']}/report.html")
    if told["interrupted"]:
        print(f"go on with --resume {told['results']}", file=sys.stderr)
        return 130
    if not told["valid"]:
        return 5
    return 0 if told["ok"] else 1


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
