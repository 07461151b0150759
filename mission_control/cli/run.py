"""`mission run`, `mission report` and `mission schema`."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from mission_control import _native
from mission_control.cli.options import Json, make_folder, not_empty
from mission_control.cli.show import LiveTable, print_result
from mission_control.experiments import engine, parallel
from mission_control.experiments.points import Conditions
from mission_control.experiments.result import schema as result_schema
from mission_control.scenario import (
    BadInput,
    Scenario,
    ScenarioError,
    built_in,
    load,
    plain_lists,
    with_changes,
    with_settings,
)
from mission_control.workloads import WORKLOADS
from mission_control.workloads.incast import IN_MODEL
from mission_control.workloads.settings import Settings
from mission_control.worlds import READS

Option = typer.Option
PREFIX = "workload_"
"""Of the names of parameters that are a workload's own flags."""
PLACES = {
    "workers": "topology.hosts",
    "hosts": "topology.hosts",
    "memory_limit": "topology.memory_limit",
    "topology": "topology.kind",
    "link_rate": "topology.link_rate",
    "mtu": "topology.mtu",
    "buffer": "topology.port.buffer",
    "ecn_threshold": "topology.port.ecn_threshold",
    "policy": "control.policy",
    "priorities": "control.priorities",
    "transport": "control.transport",
    "encrypt": "control.encrypt",
    "opportunistic": "control.encrypt",
    "flows_per_host": "control.flows_per_host",
}
"""Flags that all workloads share, and the keys that they set."""


class RunCommand(TyperCommand):
    """Shows in its help the flags of the workload that is asked for, and no other workload's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = next((word for word in args if word in WORKLOADS or word.endswith(".toml")), None)
        named = named or next((word for word in args if not word.startswith("-") and Path(word).is_dir()), None)
        fields: dict[str, str] = {}
        asked: list[Any] = []
        if named is not None and "--help" in args:
            asked = [one.workload for one in scenarios_in(named).values()]
            for workload in asked:
                fields |= flags_of(type(workload))
        params: list[Any] = self.params
        for param in params:
            if param.name.startswith(PREFIX):
                param.hidden = param.name.removeprefix(PREFIX) not in fields
                param.help = fields.get(param.name.removeprefix(PREFIX))
            elif asked:
                param.hidden = not any(reads(workload, param.name) for workload in asked)
        return super().parse_args(ctx, args)


CLASSES = {"run": RunCommand}


def reads(workload: Settings, flag: str) -> bool:
    """Whether a workload has a use for a flag that several share."""
    if flag in PLACES:
        return PLACES[flag] not in workload.unread
    if flag in ("data", "keep_data"):
        return workload.reads_data
    if flag == "labs":
        return workload.side_by_side
    return flag not in ("scheduler", "install_policy") or "cluster" in workload.worlds


def flags_of(workload: Any) -> dict[str, str]:
    """A workload's own flags, by the names of its settings, with their help and default."""

    def shown(value: Any) -> str:
        words = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        return "" if value is None or words == "" else f" [{'off' if value is False else words}]"

    own = {name: field for name, field in workload.model_fields.items() if name != "kind"}
    return {name: (field.description or "") + shown(field.default) for name, field in own.items()}


def all_flags() -> Iterator[inspect.Parameter]:
    """Parameters for the flags of all workloads, each once."""
    fields = {name: field for one in WORKLOADS.values() for name, field in one.model_fields.items() if name != "kind"}
    for name, field in fields.items():
        kinds = [one.model_fields[name].annotation for one in WORKLOADS.values() if name in one.model_fields]
        flag = f"--{name.replace('_', '-')}"
        if field.annotation is bool:
            made: Any = Annotated[bool | None, Option(flag, show_default=False)]
        else:
            values = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
            metavar = "|".join(values) if values else "N" if type(field.default) is int else "VALUE"
            made = Annotated[str | None, Option(flag, metavar=metavar, show_default=False)]
        yield inspect.Parameter(PREFIX + name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=made)


def run(
    scenario: Annotated[
        str | None,
        typer.Argument(
            metavar="SCENARIO",
            callback=not_empty,
            show_default=False,
            help=f"{', '.join(WORKLOADS)} (each has flags of its own, see mission run sort --help); a file ending in "
            ".toml; or a folder of such files",
        ),
    ] = None,
    data: Annotated[Path | None, Option(metavar="DIR", help="Shared data folder [run folder]")] = None,
    keep_data: Annotated[bool, Option("--keep-data", help="Do not delete data [off]")] = False,
    world: Annotated[
        str | None,
        Option(
            "--in",
            callback=not_empty,
            metavar="WORLD",
            help="Where it runs: local, lab (root); incast: model, lab or model,lab [from file, else local]",
        ),
    ] = None,
    scheduler: Annotated[
        str | None, Option(metavar="URL", callback=not_empty, help="Run on this cluster, e.g. tcp://HOST:8786 [off]")
    ] = None,
    install_policy: Annotated[
        bool,
        Option(
            "--install-policy",
            help="Replace that cluster's policy for all of its jobs; install Mission Control where there is none [off]",
        ),
    ] = False,
    workers: Annotated[int | None, Option(metavar="N", help="Worker processes [4]")] = None,
    hosts: Annotated[int | None, Option(metavar="N", help="Lab: alias of --workers [4]")] = None,
    memory_limit: Annotated[str | None, Option(metavar="SIZE", help="Memory of each worker, e.g. 1GiB [auto]")] = None,
    policy: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help=f"Policy: {', '.join(name for name, _ in _native.policies())} or "
            "python:MODULE:FUNCTION [performance-centric]",
        ),
    ] = None,
    priorities: Annotated[
        str | None, Option(metavar="LIST", help="Priority of each job, numbers > 0, e.g. 1,2 [1 each]")
    ] = None,
    transport: Annotated[
        str | None, Option(metavar="NAME", help="Require a transport: shm, tcp, tls, mptcp, dctcp, ictcp [auto]")
    ] = None,
    encrypt: Annotated[bool, Option("--encrypt", help="Require mutually authenticated TLS [off]")] = False,
    opportunistic: Annotated[bool, Option("--opportunistic", help="Encrypt without authentication [off]")] = False,
    flows_per_host: Annotated[
        str | None, Option(metavar="N", help="Chunks that a host receives at once: N, all, auto [10]")
    ] = None,
    topology: Annotated[
        str | None, Option(metavar="NAME", help="Lab: one of star, two-rack, two-path, bonded [star]")
    ] = None,
    link_rate: Annotated[
        str | None,
        Option(metavar="RATE", help="Lab: rate of each host's link, e.g. 50Mbit/s [auto: at most 100Mbit/s]"),
    ] = None,
    buffer: Annotated[
        str | None, Option(metavar="SIZE", help="Lab: queue of each switch port, e.g. 128KiB [64KiB]")
    ] = None,
    ecn_threshold: Annotated[
        str | None,
        Option(metavar="SIZE", help="Lab: queue length that triggers ECN marks, e.g. 30KiB [off; 30kB for dctcp]"),
    ] = None,
    mtu: Annotated[int | None, Option(metavar="BYTES", help="Lab: largest packet, 576 to 9000 [1500]")] = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Set any key of the scenario, e.g. stack.rto_min=200ms; repeatable"),
    ] = None,
    compare: Annotated[
        str | None,
        Option(
            metavar="LIST", help="Compare variants of the scenario by name, or transports, e.g. tcp,auto [from file]"
        ),
    ] = None,
    repeat: Annotated[
        int | None, Option(metavar="N", min=1, help="Runs per variant; prints median, 95 % interval [1]")
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="Measure fewer points (study.quick), each variant once [off]")
    ] = False,
    resume: Annotated[
        Path | None, Option(metavar="DIR", help="Continue an interrupted run, e.g. results/ID; takes no other option")
    ] = None,
    labs: Annotated[int | None, Option(metavar="N", min=1, help="Incast: labs that measure in parallel [2]")] = None,
    results: Annotated[Path, Option(metavar="DIR", show_default=False, help="Folder of the report [results]")] = Path(
        "results"
    ),
    as_json: Json = False,
    **own: Any,
) -> int:
    """Run a scenario, explain each transfer, and write a report.

    Print what each transfer got and why. The report is results/ID/report.html. [x] is the default. Options override
    the file.
    """
    typed = {name: value for name, value in locals().items() if name in PLACES}
    given = {name: value for name, value in typed.items() if value is not None and value is not False}
    own = {name.removeprefix(PREFIX): value for name, value in own.items() if value is not None}
    notes: list[str] = []
    if scenario is None:
        if resume is None:
            raise BadInput(f"which scenario? Use {', '.join(WORKLOADS)}, a file ending in .toml, or a folder of them")
        others: dict[str, Any] = {
            "set": settings,
            "compare": compare,
            "scheduler": scheduler,
            "in": world,
            "repeat": repeat,
            "quick": quick,
        }
        others |= {"labs": labs, "data": data, "keep_data": keep_data, "install_policy": install_policy}
        if more := [*given, *own, *(name for name, value in others.items() if value)]:
            raise BadInput(f"--{more[0].replace('_', '-')}: --resume alone goes on as the run began; leave it out")
        scenarios, conditions = engine.resumed(resume)
    else:
        if encrypt and opportunistic:
            raise BadInput("--encrypt and --opportunistic exclude each other: leave one out")
        if install_policy and scheduler is None:
            raise BadInput("--install-policy is about a running cluster: give --scheduler, too")
        changes = changes_of(given, own)
        scenarios = scenarios_in(scenario)
        for name, one in scenarios.items():
            refuse_unread(one, own, data or keep_data, labs)
            try:
                changed = with_changes(with_settings(one.quick if quick else one, settings or ()), changes)
            except ScenarioError as error:
                raise BadInput(in_words_of_options(error, given, own)) from None
            scenarios[name], note = with_study(name, changed, compare, repeat)
            notes += [note] if note else []
            if quick and not one.study.quick and one.study.repeat == 1:
                notes.append(f"{name} says nothing of --quick (study.quick): all of its points are measured")
        worlds = worlds_asked(scenarios, world, scheduler)
        refuse_unread_flags(scenarios, given, worlds)
        folder = None if data is None else str(data)
        conditions = Conditions(worlds, scheduler, install_policy, folder, keep_data, quick, labs or parallel.LABS)
    if data is not None and not scheduler:
        make_folder("--data", data)
    return conduct(scenarios, conditions, results=results, resume=resume, as_json=as_json, notes=notes)


def conduct(
    scenarios: Mapping[str, Scenario],
    conditions: Conditions,
    *,
    results: Path,
    as_json: bool,
    resume: Path | None = None,
    notes: Sequence[str] = (),
) -> int:
    """Measure all points of these scenarios, and print what was found; return the exit status."""
    is_new = not results.exists()
    make_folder("--results", results)
    try:
        with LiveTable(quiet=as_json) as shown:
            for note in notes:
                shown.say(f"note: {note}")
            result = engine.conduct(scenarios, conditions, results=results, resume=resume, observer=shown)
    except BaseException:
        if is_new:
            with suppress(OSError):
                results.rmdir()  # only if nothing is in it
        raise
    if as_json:
        print(json.dumps(result.dumped()))
    else:
        print_result(result)
    if result.interrupted:
        print(f"go on with --resume {result.results}", file=sys.stderr)
        return 130
    if not result.valid:
        return 5
    return 0 if result.ok else 1


run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*list(inspect.signature(run, eval_str=True).parameters.values())[:-1], *all_flags()]
)


def scenarios_in(name: str) -> dict[str, Scenario]:
    """The scenarios of a folder, or the one that is named, each by its own name.

    Raises:
        BadInput: there is none, or one does not fit the model.
    """
    folder = Path(name)
    if not folder.is_dir() or name in built_in() or name in WORKLOADS:
        return {folder.stem: load(name)}
    found = {path.stem: load(str(path)) for path in sorted(folder.glob("*.toml"))}
    if not found:
        raise BadInput(f"{name} has no scenarios: put files that end in .toml there")
    return found


def changes_of(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What the flags change, by table and key.

    Raises:
        BadInput: priorities that are no numbers.
    """
    changes: dict[str, dict[str, Any]] = {"workload": dict(own)}
    for name, value in given.items():
        table, _, key = PLACES[name].rpartition(".")
        if name == "priorities":
            try:
                value = tuple(float(word) for word in value.split(","))
            except ValueError:
                raise BadInput(f"--priorities {value}: write numbers above 0, as in 1,2") from None
        elif name == "opportunistic":
            value = "opportunistic"
        elif name == "flows_per_host" and value.isdecimal():
            value = int(value)
        changes.setdefault(table, {})[key] = value
    return changes


def refuse_unread(scenario: Scenario, own: Mapping[str, Any], data: object, labs: int | None) -> None:
    """
    Raises:
        BadInput: a flag that the scenario's workload does not read.
    """
    workload = scenario.workload
    unread = [name for name in own if name not in type(workload).model_fields]
    unread += ["data"] if data and not reads(workload, "data") else []
    unread += ["labs"] if labs is not None and not reads(workload, "labs") else []
    if unread:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in flags_of(type(workload)))
        raise BadInput(
            f"--{unread[0].replace('_', '-')}: {workload.kind} does not read it; its own flags are {flags} "
            f"(mission run {workload.kind} --help)"
        )


def worlds_asked(scenarios: Mapping[str, Scenario], world: str | None, scheduler: str | None) -> tuple[str, ...]:
    """The worlds that the command line asks for; empty: as the scenarios say.

    Raises:
        BadInput: there is no such world, or a workload does not run there.
    """
    asked = tuple(word.strip() for word in world.split(",")) if world else ("cluster",) if scheduler else ()
    for one in scenarios.values():
        known = [name for name in one.workload.worlds if name != "cluster"]
        for name in asked:
            if name not in one.workload.worlds or (name == "cluster") != (scheduler is not None):
                more = ", or give --scheduler ADDRESS" if "cluster" in one.workload.worlds else ""
                typed = "--scheduler" if scheduler and not world else f"--in {name}"
                raise BadInput(f"{typed}: {one.workload.kind} does not run there; use {' or '.join(known)}{more}")
    return asked


def refuse_unread_flags(scenarios: Mapping[str, Scenario], given: Mapping[str, Any], worlds: tuple[str, ...]) -> None:
    """
    Raises:
        BadInput: a flag that no world reads in which the scenario runs.
    """
    for one in scenarios.values():
        for name in given:
            asked = worlds or one.workload.worlds_of(one)
            read = [path for own in asked for path in (IN_MODEL if own == "model" else READS[own])]
            if not PLACES[name].startswith(tuple(read)):
                flag = f"--{name.replace('_', '-')}"
                raise BadInput(f"{flag}: world {asked[0]} does not read it; use --in lab, or leave it out")


def in_words_of_options(error: ScenarioError, given: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """What is wrong with a value of the command line, by the option that the user typed."""
    places = {name: PLACES[name].split(".") for name in given} | {name: ["workload", name] for name in own}
    for name, place in places.items():
        if list(error.where[: len(place)]) == place:
            option, value = f"--{name.replace('_', '-')}", own.get(name, given.get(name))
            return f"{option}: {error.why}" if str(value) in error.why else f"{option} {value}: {error.why}"
    return str(error)


def with_study(name: str, scenario: Scenario, compare: str | None, repeat: int | None) -> tuple[Scenario, str]:
    """Return the scenario with the variants and repetitions of the command line, and a note on them (empty: none).

    Raises:
        BadInput: ``--compare`` names something that is neither a variant of the scenario nor a transport.
    """
    changes: dict[str, Any] = {"repeat": repeat}
    if compare is None:
        return with_changes(scenario, {"study": changes}), ""
    own = {variant.name: variant for variant in scenario.study.compare}
    chosen = variants_in(compare, own)
    words = chosen or [word.strip() for word in compare.split(",") if word.strip()]
    judged = [variant for variant in own.values() if variant.ratio_min or variant.ratio_max]
    note = ""
    if not words or len(set(words)) < len(words):
        raise BadInput(f"--compare {compare!r}: name each variant once, as in tcp,auto")
    if chosen:
        # Expected ratios are relative to the scenario's first variant.
        keep = words[0] == next(iter(own))
        unset: set[str] = set() if keep else {"ratio_min", "ratio_max"}
        changes["compare"] = [own[word].model_dump(exclude_none=True, exclude=unset) for word in words]
        if judged and not keep:
            note = f"--compare begins with {words[0]}: the ratios that {name} expects are relative to {next(iter(own))}"
            note += " and do not apply"
    else:
        known = ["auto", *_native.transports()]
        for word in sorted(words, key=own.__contains__):
            of = f"a variant of {name} ({'; '.join(own)})" if own else f"a variant ({name} has none)"
            if word not in known and word not in own:
                raise BadInput(f"--compare {word}: neither {of} nor a transport ({', '.join(known)})")
            if word not in known:
                raise BadInput(f"--compare {compare}: {word} is {of}; name variants alone, or transports alone")
        changes["compare"] = [{"name": word, "set": {"control.transport": word}} for word in words]
        if judged:
            note = f"--compare takes the place of the variants of {name}: what they expect does not apply"
    return with_changes(scenario, {"study": changes}), note


def variants_in(text: str, names: Iterable[str]) -> list[str]:
    """Split a list of names of variants, which may have commas in them; empty: the text is none.

    Args:
        names: All names; of two that fit the longer one is taken.
    """
    longest_first = sorted((name for name in names if name), key=len, reverse=True)
    found, rest = [], text.strip()
    while rest:
        name = next((name for name in longest_first if rest == name or rest.startswith(f"{name},")), None)
        if name is None:
            return []
        found.append(name)
        rest = rest[len(name) :].lstrip(",").strip()
    return found


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the run, e.g. results/ID")],
    as_json: Json = False,
) -> None:
    """Write the report of a run again.

    The report is drawn from the files that the run has left. Print its path.
    """
    from mission_control.experiments.report import write

    path = write(folder)
    print(json.dumps({"report": str(path)}) if as_json else path)


def schema(
    what: Annotated[str, typer.Argument(metavar="[result]", help="result: what mission run --json prints")] = "result",
) -> None:
    """Print the JSON Schema of a result."""
    if what != "result":
        raise BadInput(f"schema {what}: unknown. Use result.")
    print(json.dumps(plain_lists(result_schema()), indent=1))
