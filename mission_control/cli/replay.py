"""`mission replay`: the workload `replay` of `mission run`, by a shorter command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mission_control import _native
from mission_control.cli.options import Json, finite, not_empty
from mission_control.cli.run import changes_of, conduct, in_words_of_options, refuse_unread_flags, worlds_asked
from mission_control.errors import BadInput
from mission_control.experiments.points import Conditions
from mission_control.scenario import Scenario, ScenarioError, load, with_changes, with_settings
from mission_control.traces import swim
from mission_control.workloads.replay import ReplaySettings

Option = typer.Option
FIELDS = ReplaySettings.model_fields
POLICIES = [name for name, _ in _native.policies()]


def of(name: str) -> str:
    """Help of an option that is a setting of the workload."""
    return f"{FIELDS[name].description} [{FIELDS[name].default}]"


def replay(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", callback=not_empty, help="Trace in SWIM's format, or sample (synthesised, 2 hours)"
        ),
    ],
    scale: Annotated[str | None, Option(metavar="X", help=of("scale"), show_default=False)] = None,
    hosts: Annotated[int | None, Option(metavar="N", help="Worker processes; lab: hosts [4]")] = None,
    trace_hosts: Annotated[str | None, Option(metavar="N", help=of("trace_hosts"))] = None,
    world: Annotated[
        str | None, Option("--in", metavar="WORLD", callback=not_empty, help="Where it runs: local, lab (root) [local]")
    ] = None,
    scheduler: Annotated[
        str | None, Option(metavar="URL", callback=not_empty, help="Run on this cluster, e.g. tcp://HOST:8786 [off]")
    ] = None,
    start: Annotated[str | None, Option(metavar="H", help=of("start"))] = None,
    hours: Annotated[str | None, Option(metavar="H", help=of("hours"))] = None,
    minutes: Annotated[
        float | None, Option(metavar="M", callback=finite, help="Minutes of the trace to replay, in place of --hours")
    ] = None,
    speed: Annotated[str | None, Option(metavar="X", help=of("speed"))] = None,
    at_once: Annotated[str | None, Option(metavar="N", help=of("at_once"))] = None,
    block: Annotated[str | None, Option(metavar="SIZE", help=of("block"))] = None,
    job_limit: Annotated[str | None, Option(metavar="SIZE", help=of("job_limit"))] = None,
    seed: Annotated[str | None, Option(metavar="N", help="Seed of the jobs' content and hosts [1]")] = None,
    policy: Annotated[
        str | None,
        Option(metavar="NAME", help=f"Policy: {', '.join(POLICIES)} or python:MODULE:FUNCTION [performance-centric]"),
    ] = None,
    flows_per_host: Annotated[
        str | None, Option(metavar="N", help="Chunks that a host receives at once: N, all, auto [10]")
    ] = None,
    transport: Annotated[
        str | None, Option(metavar="NAME", help="Require a transport: shm, tcp, tls, mptcp, dctcp, ictcp [auto]")
    ] = None,
    link_rate: Annotated[
        str | None,
        Option(metavar="RATE", help="Lab: rate of each host's link, e.g. 50Mbit/s [auto: at most 100Mbit/s]"),
    ] = None,
    memory_limit: Annotated[str | None, Option(metavar="SIZE", help="Memory of each worker, e.g. 1GiB [auto]")] = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Set any key of a scenario, e.g. stack.rto_min=200ms; repeatable"),
    ] = None,
    compare: Annotated[
        str | None,
        Option(
            metavar="LIST",
            help="Replay once with each policy or number of flows per host, e.g. fair,fifo or 10,all [off]",
        ),
    ] = None,
    repeat: Annotated[int | None, Option(metavar="N", min=1, help="Replays of each variant [1]")] = None,
    results: Annotated[Path, Option(metavar="DIR", show_default=False, help="Folder of the report [results]")] = Path(
        "results"
    ),
    as_json: Json = False,
) -> int:
    """Replay the jobs of a trace, scaled, each at its time.

    Print job times and what scaling distorts. Continue an interrupted replay with mission run --resume results/ID.
    [x] is the default.
    """
    if minutes is not None:
        if hours is not None:
            raise BadInput("--hours and --minutes exclude each other: leave one out")
        hours = str(minutes / 60)
    if trace not in swim.samples():
        trace = str(swim.find(trace).resolve())  # so that --resume finds it from another folder
    typed = {name: value for name, value in locals().items() if value is not None}
    own = {name: value for name, value in typed.items() if name in FIELDS}
    given = {name: value for name, value in typed.items() if name in SHARED}
    try:
        scenario = with_changes(with_settings(load("replay"), settings or ()), changes_of(given, own))
    except ScenarioError as error:
        raise BadInput(as_typed(error, given, own, minutes)) from None
    scenario = with_variants(scenario, compare, repeat)
    # Here, where the whole trace is to be replayed, and not once a cluster is there.
    workload: Any = scenario.workload
    workload.scaled(scenario.topology.hosts)
    worlds = worlds_asked({"replay": scenario}, world, scheduler)
    refuse_unread_flags({"replay": scenario}, given, worlds)
    conditions = Conditions(worlds, scheduler)
    return conduct({"replay": scenario}, conditions, results=results, as_json=as_json)


SHARED = ("hosts", "policy", "flows_per_host", "transport", "link_rate", "memory_limit")
"""Options that other workloads have, too."""


def as_typed(error: ScenarioError, given: dict[str, Any], own: dict[str, Any], minutes: float | None) -> str:
    """What is wrong with a value, by the option that the user typed."""
    if error.where[:2] == ("workload", "trace"):
        return error.why
    if error.where[:2] == ("workload", "hours") and minutes is not None:
        return f"--minutes {minutes:g}: use a number above 0"
    return in_words_of_options(error, given, own)


def with_variants(scenario: Scenario, compare: str | None, repeat: int | None) -> Scenario:
    """With what the command line compares: policies, or numbers of flows per host.

    Raises:
        BadInput: a word is neither, or comes twice.
    """
    variants: list[dict[str, Any]] = []
    for word in (word.strip() for word in (compare or "").split(",") if word.strip()):
        if (word.isdecimal() and int(word)) or word in ("all", "auto"):
            flows = int(word) if word.isdecimal() else word
            variants.append({"name": f"{word} flows", "set": {"control.flows_per_host": flows}})
        elif word in POLICIES or word.startswith("python:"):
            variants.append({"name": word, "set": {"control.policy": word}})
        else:
            raise BadInput(
                f"--compare {word}: neither a policy ({', '.join(POLICIES)}, python:MODULE:FUNCTION) nor a number of "
                "flows per host (N, all, auto)"
            )
    if compare is not None and not variants:
        raise BadInput("--compare: names nothing; write a list, as in fair,fifo or 10,all")
    try:
        return with_changes(scenario, {"study": {"compare": variants or None, "repeat": repeat}})
    except ScenarioError as error:
        raise BadInput(f"--compare {compare}: {error.why}") from None
