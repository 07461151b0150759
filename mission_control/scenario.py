"""A scenario: one file that says what is run, how it is controlled and what is expected; every world reads the same.

The model below is the only description of it: the file is checked against it, and docs/reference/scenario.md
is drawn from it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, SerializeAsAny, Tag, ValidationError, model_validator

from mission_control import _native
from mission_control.errors import BadInput as BadInput
from mission_control.errors import EnvironmentFailed as EnvironmentFailed
from mission_control.errors import PrerequisiteMissing as PrerequisiteMissing
from mission_control.jobs import specification
from mission_control.workloads import WORKLOADS
from mission_control.workloads.settings import Bytes, Microseconds, Milliseconds, Part, Rate
from mission_control.workloads.sort import SortSettings

BUILT_IN = Path(__file__).parent / "scenarios"

Flows = Annotated[int, Field(ge=1)] | Literal["all", "auto"]


class Port(Part):
    """World `lab`: how every switch port behaves."""

    switch: Literal["plain", "paper-003"] = Field(
        "plain",
        description="paper-003: its 48-port switch, 786,432 B shared by each 12 ports, at most a sixth for each",
    )
    buffer: Bytes = Field("64 KiB", validate_default=True, ge=1600, description="plain: most that a port may hold")
    ecn_threshold: Bytes | None = Field(
        None, description="a packet that finds more is marked; absent: none is, unless every job demands dctcp: 30 kB"
    )
    shared_buffer: Bytes | None = Field(None, description="plain: of each 12 ports together; absent: each its own")
    alpha: float = Field(1.0, gt=0, description="of a shared buffer a port may hold this many times what is free")


class Link(Part):
    """World `lab`, kind `custom`: one link."""

    a: str = Field(description="a node: s and a number is a switch, all others are hosts")
    b: str = Field(description="the other")
    rate: Rate = Field("100 Mbit/s", validate_default=True, ge=10**6, description="in both directions")
    path: int = Field(0, ge=0, le=7, description="of several ways between two hosts, each with addresses of its own")


class Event(Part):
    """World `lab`: what happens to the network while the jobs run."""

    after: Milliseconds = Field(ge=0, description="since the jobs began")
    do: Literal["cut", "mend", "rate", "buffer", "mark", "die"] = Field(
        description="cut, mend: a host's link; rate: gives it another; buffer: gives every port another; mark: at "
        "every port, from another queue on; die: a host's programs end and its links are cut"
    )
    host: str = Field("", description="as in h3; not for buffer and mark")
    path: int = Field(0, ge=0, le=7, description="of several links of a host")
    rate: Rate | None = Field(None, ge=10**6, description="for rate")
    buffer: Bytes | None = Field(None, ge=1600, description="for buffer")
    ecn_threshold: Bytes | None = Field(None, description="for mark; absent: none is marked any more")

    @model_validator(mode="after")
    def _whole(self) -> Event:
        if (self.do in ("buffer", "mark")) == bool(self.host):
            raise ValueError(
                f"{self.do}: " + ("concerns every port, leave the host out" if self.host else "which host?")
            )
        for what, given, example in (("rate", self.rate, "10 Mbit/s"), ("buffer", self.buffer, "32 KiB")):
            if (self.do == what) != (given is not None):
                raise ValueError(f'a {what} is given where something gets it: do = "{what}", {what} = "{example}"')
        return self


class Topology(Part):
    """The hosts. World `local`: worker processes on this machine. World `lab`: hosts with links and switches. World
    `cluster`: not read, the workers are there."""

    kind: Literal["star", "two-rack", "two-path", "bonded", "custom"] = Field(
        "star", description="lab: how hosts and switches are linked; custom: as `links` says"
    )
    hosts: int = Field(4, ge=1, description="worker processes; in the lab each on a host of its own")
    links: tuple[Link, ...] = Field((), description="lab, own: of a, b, rate, path; its last host is the scheduler's")
    threads: int = Field(1, ge=1, description="of each worker: tasks at once; jobs only meet at a host that runs both")
    memory_limit: Bytes | Literal["auto"] = Field("auto", description="memory of each worker, or an equal part of all")
    link_rate: Rate | Literal["auto"] = Field(
        "auto", description="lab: of every host's link; auto: 100 Mbit/s, or what this machine forwards for all of them"
    )
    trunk_rate: Rate | None = Field(
        None, ge=10**6, description="lab, two-rack: of the links between switches; else as others"
    )
    link_delay: Microseconds | None = Field(
        None,
        ge=1,
        le=10**6,
        description="lab: one way of every host's link, as in 250 us; the base round trip of two hosts is four times "
        "it; at least 500 us once it is dilated; absent: some 0.1 ms in all",
    )
    events: tuple[Event, ...] = Field((), description="lab: what happens meanwhile: after, do, host, path, ...")
    dilation: int = Field(
        1,
        ge=1,
        le=600,
        description="lab: slow motion: rates are divided by it; link delays are multiplied, minimum RTOs "
        "multiplied and locked (200 ms, unless the stack says), and so are the times that Mission Control and Dask "
        "wait for the network; buffers and programs are as they are; times are as measured",
    )
    mtu: int = Field(1500, ge=576, le=9000, description="lab: bytes of a packet")
    port: Port = Port()


class Stack(Part):
    """World `lab`: what the hosts' kernels do with TCP. Single settings take the place of the profile's."""

    profile: Literal["modern", "2009", "linux-2.6.28", "sack", "newreno"] = Field(
        "modern",
        description="modern: cubic and the kernel's own; 2009: reno, RTO 200 ms, initial window 2, no SACK, no TLP; "
        "linux-2.6.28: what the papers of 2009 to 2012 measured: cubic with SACK, RTO 200 ms, initial window 3 (the "
        "source of that kernel; paper 000 has 1 in table 1 and 2 in its caption), no TLP, no RACK where the kernel can "
        "do without; sack, newreno: the same with reno, and with reno and no SACK (plain reno is not in Linux: without "
        "SACK it is NewReno; cubic with SACK is linux-2.6.28)",
    )
    congestion_control: str | None = Field(None, description="of sockets that choose none")
    rto_min: Milliseconds | None = Field(
        None, ge=1, description="shortest retransmission timeout, by the route: wins against socket and sysctl"
    )
    rto_min_socket: Milliseconds | None = Field(
        None, ge=1, le=200, description="incast: the same, asked of each socket, which only ever shortens it"
    )
    rto_min_sysctl: Milliseconds | None = Field(None, ge=1, description="the same by `net.ipv4.tcp_rto_min_us`")
    initial_window: int | None = Field(None, ge=1, description="segments that a connection may send at first")
    receive_window: Bytes | None = Field(None, ge=1, description="that a receiver lets a sender have under way at most")
    sack: bool | None = Field(None, description="selective acknowledgments")
    tlp: bool | None = Field(None, description="tail loss probes")
    rack: bool | None = Field(
        None,
        description="losses found by time (`net.ipv4.tcp_recovery`); since Linux 6.17 false has no effect with SACK",
    )
    delayed_ack: bool | None = Field(None, description="false: every segment is acknowledged at once")


def _kind(value: Any) -> str:
    kind = value.get("kind", "sort") if isinstance(value, dict) else getattr(value, "kind", "sort")
    return kind if isinstance(kind, str) else repr(kind)


_TAGGED: Any = tuple(Annotated[settings, Tag(kind)] for kind, settings in WORKLOADS.items())
Workload = Annotated[Union[_TAGGED], Discriminator(_kind)]  # noqa: UP007
"""What is computed; `kind` says which of them."""


class Control(Part):
    """How jobs share the network, and what carries their transfers."""

    policy: str = Field("performance-centric", description="see `mission weights --help`")
    flows_per_host: Flows = Field(
        _native.FLOWS_PER_HOST,
        description="receiving slots of a host; all: no limit; auto: as many as bring most, found by trial",
    )
    priorities: tuple[float, ...] = Field((), description="of the jobs in order; the policy `priority` reads them")
    transport: str = Field("auto", description="auto, or one that every job demands: tcp, tls, ...")
    encrypt: bool | Literal["opportunistic"] = Field(
        False, description="true: certificates of the cluster on both ends; opportunistic: encrypted, no identities"
    )


class Expect(Part):
    """What must hold for the run to be a success, beside the workload's own checks."""

    refetches_max: int | None = Field(None, ge=0, description="ranges that may arrive damaged")
    recomputed_max: int | None = Field(None, ge=0, description="keys that may have to be computed again")
    goodput_of_one_flow_min: float | None = Field(
        None, gt=0, description="incast in the lab: part of what one long flow gets there, that every point must reach"
    )
    goodput_of_ideal_min: float | None = Field(
        None, gt=0, description="gather in the lab: part of equation 1's goodput that every point must reach"
    )
    condition: tuple[Literal["drops", "marks"], ...] = Field(
        (),
        description="lab: what must have happened at some port, or the run is invalid: it did not show what it is for",
    )


class Variant(Part):
    """One of the ways that a study compares; the others are measured against the first."""

    name: str = Field(description="as tables show it")
    set: dict[str, Any] = Field({}, description='values of this scenario\'s keys, as in `{ "stack.sack" = false }`')
    ratio_min: float | None = Field(None, gt=0, description="expected of the median of its ratios to the first")
    ratio_max: float | None = Field(None, gt=0, description="the same")


class Study(Part):
    """A scenario that is run several times: what is compared takes turns, so that all have the same bad moments."""

    title: str = Field("", description="of its section in the report")
    paper: str = Field("", description="what the paper found")
    hope: str = Field("", description="what should be seen here")
    because: str = Field("", description="why it is seen, or is not")
    repeat: int = Field(1, ge=1, description="times that every variant is run")
    measure: tuple[str, ...] = Field(
        (),
        description="what is compared, of the workload's measures; empty: its first; ratios are expected of the first",
    )
    vary: dict[str, tuple[Any, ...]] = Field(
        {}, description='values of this scenario\'s keys: all are run, as in `{ "workload.size" = ["1 GiB"] }`'
    )
    compare: tuple[Variant, ...] = Field((), description="variants, in the order in which they take turns")
    quick: dict[str, Any] = Field(
        {},
        description="for --quick, which runs every variant once unless `study.repeat` is among them: values of this "
        "scenario's keys, for all variants, and fewer values of what varies; as in "
        '`{ "workload.senders" = "1,8", "study.point_takes" = "2 s" }`',
    )
    point_takes: Milliseconds | None = Field(
        None,
        ge=1,
        description="time to measure a point, with all that belongs to it, as measured on two cores: a run says before "
        "it begins how long it may take",
    )

    @model_validator(mode="after")
    def _quick(self) -> Study:
        for key, value in self.quick.items():
            if "." not in key:
                raise ValueError(f'quick: {key}: write a key with its table, in quotes, as in "workload.size"')
            if key.startswith("study.") and key not in ("study.repeat", "study.point_takes"):
                raise ValueError(f"quick: {key}: of the study, quick changes study.repeat and study.point_takes alone")
            if key in self.vary and (not isinstance(value, list | tuple) or not value):
                raise ValueError(f"quick: {key} varies: write a list of its values")
        return self


class Scenario(Part):
    """Units are written (`64 MiB`, `100 Mbit/s`); kB is 1,000 and KiB 1,024 bytes."""

    version: Literal[1] = Field(1, description="of this format")
    world: Literal["local", "lab", "model"] = Field(
        "local", description="where it runs unless the command line says otherwise; model: incast only"
    )
    topology: Topology = Topology()
    stack: Stack = Stack()
    workload: SerializeAsAny[Workload] = SortSettings()
    control: Control = Control()
    expect: Expect = Expect()
    study: Study = Study()

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        control, workload = self.control, self.workload
        _native.weights(control.policy, "[]", control.flows_per_host)
        workload.check(self)
        for priority in control.priorities or (1.0,):
            specification("job", priority=priority, encrypt=control.encrypt, transport=control.transport)
        if len({variant.name for variant in self.study.compare}) < len(self.study.compare):
            raise ValueError("two variants of one name: give each its own")
        return self

    @property
    def alone(self) -> Scenario:
        """Without its study: one run."""
        return self.model_copy(update={"study": Study()})

    @property
    def quick(self) -> Scenario:
        """With the fewer points of ``--quick``. Ratios are expected of several runs alone.

        Raises:
            ScenarioError: what the study says of it does not fit.
        """
        values = {"study.repeat": 1, **self.study.quick}
        varied = {key: values.pop(key, given) for key, given in self.study.vary.items()}
        compared = []
        for variant in self.study.compare:
            kept = {key: value for key, value in variant.set.items() if key not in values}
            judged = {"ratio_min", "ratio_max"} if values["study.repeat"] == 1 else set()
            compared.append({**variant.model_dump(exclude_none=True, exclude=judged), "set": kept})
        return with_values(self, {**values, "study.vary": varied, "study.compare": compared})


def built_in() -> list[str]:
    """Names of the scenarios that come with the package."""
    return sorted(path.stem for path in BUILT_IN.glob("*.toml"))


def load(name: str) -> Scenario:
    """A built-in scenario by name, a workload by its kind, or a file that ends in .toml.

    Raises:
        BadInput: it cannot be read or does not fit the model; the text has the file and the line.
    """
    if not name.endswith(".toml"):
        known = list(dict.fromkeys([*built_in(), *sorted(WORKLOADS)]))
        if name not in known:
            raise BadInput(
                f"there is no scenario {name!r}: use {', '.join(known)}, a file that ends in .toml, as in ./mine.toml, "
                "or a folder of such files"
            )
        if name not in built_in():
            return validate({"workload": {"kind": name}})
        path = BUILT_IN / f"{name}.toml"
    else:
        path = Path(name)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"scenario {path} cannot be read: {error}") from None
    try:
        scenario = validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"scenario {path}: {error}") from None
    except ScenarioError as error:
        line = _line(text, error.where)
        raise BadInput(f"scenario {path}{f', line {line}' if line else ''}: {error}") from None
    from mission_control.experiments.points import planned

    # What varies is asked for when it is read, and not after an hour of runs.
    for of_quick in (False, True) if scenario.study.quick else (False,):
        try:
            one = scenario.quick if of_quick else scenario
            planned(path.stem, one, one.workload.worlds_of(one))
        except BadInput as error:
            of_study = "quick" if of_quick else "vary" if "study.vary" in str(error) else "compare"
            line = _line(text, ("study", of_study)) or _line(text, ("study",)) or _line(text, ("workload",))
            why = f"study.quick: {error}" if of_quick else error
            raise BadInput(f"scenario {path}{f', line {line}' if line else ''}: {why}") from None
    return scenario


class ScenarioError(BadInput):
    """A value that does not fit the model, where it stands, and why without the place."""

    def __init__(self, text: str, where: tuple[str, ...], why: str):
        super().__init__(text)
        self.where = where
        self.why = why


def validate(values: dict[str, Any]) -> Scenario:
    """The scenario with these values.

    Raises:
        ScenarioError: the first thing that does not fit.
    """
    try:
        scenario = Scenario.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = tuple(str(step) for step in first["loc"])
        kind = ""
        if where[:1] == ("workload",) and where[1:2] and where[1] in WORKLOADS:
            kind, where = where[1], ("workload", *where[2:])
        name = ".".join(
            step for step in where if not any(letter in step for letter in "[(") and step not in ("int", "bool")
        )
        text = why = first["msg"].removeprefix("Value error, ")
        if first["type"] == "union_tag_invalid":
            where = ("workload", "kind")
            text = why = f"there is no workload {first['ctx']['tag']!r}: use {', '.join(WORKLOADS)}"
        elif first["type"] == "extra_forbidden":
            keys = ", ".join(WORKLOADS[kind].model_fields) if kind else ""
            why = f"{kind} does not read it; it reads {keys}" if kind else "docs/reference/scenario.md lists the keys"
            text = f"there is no such key: {name}; {why}"
        elif name:
            text = f"{name}: {text}"
        raise ScenarioError(text, where, why) from None
    workload = scenario.workload
    for path in workload.unread:
        if setting(scenario, path) != setting(Scenario(), path):
            why = f"{workload.kind} does not read it: leave it out"
            raise ScenarioError(f"{path}: {why}", tuple(path.split(".")), why)
    if unknown := [name for name in scenario.study.measure if name not in workload.measures]:
        why = f"{workload.kind} has no measure {unknown[0]!r}: use {', '.join(workload.measures)}"
        raise ScenarioError(f"study.measure: {why}", ("study", "measure"), why)
    return scenario


def setting(scenario: Scenario, path: str) -> Any:
    """The value of a key."""
    value: Any = scenario
    for name in path.split("."):
        value = getattr(value, name)
    return value


def leaves(part: Part, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All keys of a table and the tables in it, with their values."""
    for name in type(part).model_fields:
        value = getattr(part, name)
        yield from leaves(value, f"{prefix}{name}.") if isinstance(value, Part) else [(prefix + name, value)]


def not_in_force(scenario: Scenario, world: str, read: Sequence[str]) -> list[str]:
    """What the scenario sets and the world does not read, a line each.

    Args:
        read: keys, or beginnings of keys, that the world reads.
    """
    default = Scenario(workload=type(scenario.workload)())
    read = ("version", "world", "study.", "expect.", *read)
    return [
        f"{path} = {written(scenario, path)} is not in force in world {world}"
        for path, value in leaves(scenario)
        if value != setting(default, path) and not path.startswith(tuple(read))
    ]


def written(scenario: Scenario, path: str) -> Any:
    """A value as a file has it."""
    value: Any = plain(scenario)
    for name in path.split("."):
        value = value[name]
    return value


def with_changes(scenario: Scenario, changes: dict[str, dict[str, Any]]) -> Scenario:
    """The scenario with the options of the command line in place of its own values; `None` changes nothing.

    Raises:
        ScenarioError: the first thing that does not fit.
    """
    values = plain(scenario)
    for part, change in changes.items():
        place = values
        for name in part.split("."):
            if not isinstance(place.get(name), dict):
                raise BadInput(f"a scenario has no table {part!r}: docs/reference/scenario.md lists them")
            place = place[name]
        place.update({key: value for key, value in change.items() if value is not None})
    kind = values["workload"]["kind"]
    if kind != scenario.workload.kind and kind in WORKLOADS:
        # Of another workload's settings those that both have stay.
        known = WORKLOADS[kind].model_fields
        values["workload"] = {key: value for key, value in values["workload"].items() if key in known}
    return validate(values)


def with_settings(scenario: Scenario, settings: Sequence[str]) -> Scenario:
    """The scenario with settings as people type them: ``topology.port.buffer=64KiB``, ``stack.sack=false``.

    Raises:
        BadInput: one that does not fit.
    """
    values = {}
    for setting in settings:
        path, given, value = setting.partition("=")
        if not given or "." not in path:
            raise BadInput(f"--set {setting}: write TABLE.KEY=VALUE, as in stack.rto_min=200ms")
        try:
            values[path.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            values[path.strip()] = value.strip()
    return with_values(scenario, values)


def with_values(scenario: Scenario, values: dict[str, Any]) -> Scenario:
    """The scenario with values by their paths: ``{"topology.port.buffer": "64 KiB"}``.

    Raises:
        ScenarioError: the first that does not fit.
    """
    changes: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        table, _, key = path.rpartition(".")
        changes.setdefault(table, {})[key] = value
    return with_changes(scenario, changes)


def plain(scenario: Scenario) -> dict[str, Any]:
    """As a file would have it: units written, what is absent left out."""
    values: dict[str, Any] = plain_lists(scenario.model_dump(exclude_none=True))
    return values


def plain_lists(value: Any) -> Any:
    """Lists in place of tuples, all the way down."""
    if isinstance(value, dict):
        return {key: plain_lists(entry) for key, entry in value.items()}
    return [plain_lists(entry) for entry in value] if isinstance(value, tuple | list) else value


def _line(text: str, where: tuple[str, ...]) -> int | None:
    """The line of a key: the first in its table that begins with it."""
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([\w.]+)\]", line):
            table = tuple(header[1].split("."))
            if table == where:
                return number
        elif (key := re.match(r"\s*([\w-]+)\s*=", line)) and (*table, key[1]) == where[: len(table) + 1]:
            return number
    return None
