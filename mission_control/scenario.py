"""A scenario: one file that describes what to run, how to control it and what to expect; every world reads it.

The model below is its only description: files are validated against it, and docs/reference/scenario.md is generated
from it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Discriminator, Field, SerializeAsAny, Tag, ValidationError, model_validator

from mission_control import _native, invalid
from mission_control.errors import BadInput as BadInput
from mission_control.errors import EnvironmentFailed as EnvironmentFailed
from mission_control.errors import PrerequisiteMissing as PrerequisiteMissing
from mission_control.jobs import specification
from mission_control.workloads import WORKLOADS
from mission_control.workloads.settings import Bytes, Microseconds, Milliseconds, Part, Rate
from mission_control.workloads.sort import SortSettings

HOSTS_MAX = 10_001
"""Most hosts of a topology: a receiver and the most senders that `mission incast` knows."""
BUILT_IN = Path(__file__).parent / "scenarios"

Flows = Annotated[int, Field(ge=1, le=2**32 - 1)] | Literal["all", "auto"]


class Port(Part):
    """World `lab`: the behaviour of every switch port."""

    switch: Literal["plain", "paper-003"] = Field(
        "plain",
        description="paper-003: the paper's 48-port switch; each 12 ports share 786,432 B, of which a port gets at "
        "most a sixth",
    )
    buffer: Bytes = Field("64 KiB", validate_default=True, ge=1600, description="plain: size of a port's queue")
    ecn_threshold: Bytes | None = Field(
        None, description="queue length that triggers ECN marks; absent: no marks (30 kB if every job demands dctcp)"
    )
    shared_buffer: Bytes | None = Field(
        None, description="plain: one buffer for each 12 ports; absent: each port has its own"
    )
    alpha: float = Field(1.0, gt=0, description="a port may use this many times the free part of a shared buffer")


class Link(Part):
    """World `lab`, kind `custom`: one link."""

    a: str = Field(description="node at one end: s and a number is a switch, all others are hosts")
    b: str = Field(description="node at the other end")
    rate: Rate = Field("100 Mbit/s", validate_default=True, ge=10**6, description="in both directions")
    path: int = Field(
        0, ge=0, le=7, description="number of the path, where two hosts have several; each path has its own addresses"
    )


def _word(do: Any) -> Any:
    # Version 1 files written before the rename call this event `mend`; they stay valid.
    return "restore" if do == "mend" else do


class Event(Part):
    """World `lab`: a change of the network while the jobs run."""

    after: Milliseconds = Field(ge=0, description="time since the jobs began")
    do: Annotated[Literal["cut", "restore", "rate", "buffer", "mark", "die"], BeforeValidator(_word)] = Field(
        description="cut, restore: take a host's link down, bring it up again; rate: change the rate of a host's link; "
        "buffer: change the buffer of every port; mark: change the ECN threshold of every port; die: end a host's "
        "programs and cut its links"
    )
    host: str = Field("", description="host that it concerns, as in h3; not for buffer and mark")
    path: int = Field(0, ge=0, le=7, description="number of the host's link, where it has several")
    rate: Rate | None = Field(None, ge=10**6, description="for rate: the new rate")
    buffer: Bytes | None = Field(None, ge=1600, description="for buffer: the new size")
    ecn_threshold: Bytes | None = Field(None, description="for mark: the new threshold; absent: no marks any more")

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
    `cluster`: not read, because its workers already run."""

    kind: Literal["star", "two-rack", "two-path", "bonded", "custom"] = Field(
        "star", description="lab: how hosts and switches are linked; custom: by `links`"
    )
    hosts: int = Field(4, ge=1, le=HOSTS_MAX, description="worker processes; in the lab each on its own host")
    links: tuple[Link, ...] = Field(
        (), description="lab, custom: tables of a, b, rate, path; the last host is the scheduler's"
    )
    threads: int = Field(
        1,
        ge=1,
        description="concurrent tasks of each worker; jobs share a host's network only if the host runs both at once",
    )
    memory_limit: Bytes | Literal["auto"] = Field(
        "auto", description="memory of each worker; auto: an equal part of the machine's"
    )
    link_rate: Rate | Literal["auto"] = Field(
        "auto",
        description="lab: rate of every host's link; auto: 100 Mbit/s, or less if this machine cannot forward that "
        "for all hosts",
    )
    trunk_rate: Rate | None = Field(
        None, ge=10**6, description="lab, two-rack: rate of the links between switches; absent: link_rate"
    )
    link_delay: Microseconds | None = Field(
        None,
        ge=1,
        le=10**6,
        description="lab: one-way delay of every host's link, as in 250 us; the base round trip of two hosts is "
        "four times "
        "it; at least 500 us once it is dilated; absent: some 0.1 ms in all",
    )
    events: tuple[Event, ...] = Field(
        (), description="lab: changes of the network during the run: tables of after, do, host, path, ..."
    )
    dilation: int = Field(
        1,
        ge=1,
        le=600,
        description="lab: time dilation: rates are divided by it; multiplied by it are link delays, minimum RTOs "
        "(locked; 200 ms unless the stack sets one) and the times that Mission Control and Dask wait for the "
        "network; unchanged are buffers, programs and measured times",
    )
    mtu: int = Field(1500, ge=576, le=9000, description="lab: largest packet in bytes")
    port: Port = Port()


class Stack(Part):
    """World `lab`: TCP settings of the hosts' kernels. A single setting overrides the profile's."""

    profile: Literal["modern", "2009", "linux-2.6.28", "sack", "newreno"] = Field(
        "modern",
        description="modern: cubic and the kernel's own; 2009: reno, RTO 200 ms, initial window 2, no SACK, no TLP; "
        "linux-2.6.28: what the papers of 2009 to 2012 measured: cubic with SACK, RTO 200 ms, initial window 3 (the "
        "source of that kernel; paper 000 has 1 in table 1 and 2 in its caption), no TLP, no RACK where the kernel can "
        "do without; sack, newreno: the same with reno, and with reno and no SACK (plain reno is not in Linux: without "
        "SACK it is NewReno; cubic with SACK is linux-2.6.28)",
    )
    congestion_control: str | None = Field(None, description="default congestion control of sockets")
    rto_min: Milliseconds | None = Field(
        None, ge=1, description="minimum RTO, set on the route: overrides the socket's and the sysctl's"
    )
    rto_min_socket: Milliseconds | None = Field(
        None, ge=1, le=200, description="incast: minimum RTO, set on each socket; it can only shorten the kernel's"
    )
    rto_min_sysctl: Milliseconds | None = Field(None, ge=1, description="minimum RTO, set by `net.ipv4.tcp_rto_min_us`")
    initial_window: int | None = Field(None, ge=1, description="initial congestion window in segments")
    receive_window: Bytes | None = Field(None, ge=1, description="largest receive window of a connection")
    sack: bool | None = Field(None, description="selective acknowledgments")
    tlp: bool | None = Field(None, description="tail loss probes")
    rack: bool | None = Field(
        None,
        description="RACK: loss detection by time (`net.ipv4.tcp_recovery`); since Linux 6.17 false has no effect "
        "with SACK",
    )
    delayed_ack: bool | None = Field(None, description="false: every segment is acknowledged at once")


def _kind(value: Any) -> str:
    kind = value.get("kind", "sort") if isinstance(value, dict) else getattr(value, "kind", "sort")
    return kind if isinstance(kind, str) else repr(kind)


_TAGGED: Any = tuple(Annotated[settings, Tag(kind)] for kind, settings in WORKLOADS.items())
Workload = Annotated[Union[_TAGGED], Discriminator(_kind)]  # noqa: UP007
"""What is computed; `kind` says which of them."""


class Control(Part):
    """How jobs share the network, and which transport carries their transfers."""

    policy: str = Field("performance-centric", description="see `mission weights --help`")
    flows_per_host: Flows = Field(
        _native.FLOWS_PER_HOST,
        description="concurrent flows that a host receives; all: no limit; auto: the number with the highest "
        "goodput, found by trial",
    )
    priorities: tuple[float, ...] = Field(
        (), description="one number for each job, in order; read by the policy `priority`"
    )
    transport: str = Field("auto", description="auto, or the transport that every job demands: tcp, tls, ...")
    encrypt: bool | Literal["opportunistic"] = Field(
        False, description="true: certificates of the cluster on both ends; opportunistic: encrypted, no identities"
    )


class Expect(Part):
    """What must hold for the run to be a success, beside the workload's own checks."""

    refetches_max: int | None = Field(
        None, ge=0, description="largest number of ranges that arrive damaged and are fetched again"
    )
    recomputed_max: int | None = Field(None, ge=0, description="largest number of keys that are computed again")
    goodput_of_one_flow_min: float | None = Field(
        None,
        gt=0,
        description="incast in the lab: lowest goodput of a point, as a fraction of one long flow's in the same lab",
    )
    goodput_of_ideal_min: float | None = Field(
        None, gt=0, description="gather in the lab: lowest goodput of a point, as a fraction of equation 1's"
    )
    condition: tuple[Literal["drops", "marks"], ...] = Field(
        (),
        description="lab: what must happen at some port; otherwise the run is invalid, because it did not test its "
        "subject",
    )


class Variant(Part):
    """One of the variants that a study compares; ratios are relative to the first."""

    name: str = Field(description="name in tables")
    set: dict[str, Any] = Field({}, description='values of this scenario\'s keys, as in `{ "stack.sack" = false }`')
    ratio_min: float | None = Field(None, gt=0, description="lowest expected median of its ratios to the first variant")
    ratio_max: float | None = Field(None, gt=0, description="highest expected median of these ratios")


class Study(Part):
    """A scenario that runs several times. Runs alternate between variants, so disturbances affect all alike."""

    title: str = Field("", description="title of its section in the report")
    paper: str = Field("", description="what the paper found")
    hope: str = Field("", description="what this scenario should show")
    because: str = Field("", description="why it shows it, or does not")
    repeat: int = Field(1, ge=1, description="runs of every variant")
    measure: tuple[str, ...] = Field(
        (),
        description="measures of the workload to compare; empty: its first; ratio_min and ratio_max apply to the first",
    )
    vary: dict[str, tuple[Any, ...]] = Field(
        {}, description='values of this scenario\'s keys: all are run, as in `{ "workload.size" = ["1 GiB"] }`'
    )
    compare: tuple[Variant, ...] = Field((), description="variants, in the order in which they run")
    quick: dict[str, Any] = Field(
        {},
        description="for --quick, which runs every variant once unless `study.repeat` is among them: values of this "
        "scenario's keys, for all variants, and fewer values of what varies; as in "
        '`{ "workload.senders" = "1,8", "study.point_takes" = "2 s" }`',
    )
    point_takes: Milliseconds | None = Field(
        None,
        ge=1,
        description="time to measure one point with its setup, as measured on two cores; a run uses it to predict "
        "its duration",
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

    version: Literal[1] = Field(1, description="version of this format")
    world: Literal["local", "lab", "model"] = Field(
        "local", description="where it runs, unless the command line names another; model: incast only"
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
        """The scenario without its study: one run."""
        return self.model_copy(update={"study": Study()})

    @property
    def quick(self) -> Scenario:
        """The scenario with the fewer points of ``--quick``. Ratios are only expected of several runs.

        Raises:
            ScenarioError: a value of ``study.quick`` does not fit.
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
    except RecursionError:
        raise BadInput(f"scenario {path}: it nests too deep: check its brackets") from None
    except ScenarioError as error:
        line = _line(text, error.where)
        raise BadInput(f"scenario {path}{f', line {line}' if line else ''}: {error}") from None
    from mission_control.experiments.points import planned

    # Variants are validated when the file is read, and not after an hour of runs.
    for of_quick in (False, True) if scenario.study.quick else (False,):
        try:
            one = scenario.quick if of_quick else scenario
            planned(path.stem, one, one.workload.worlds_of(one))
        except BadInput as error:
            of_study = "quick" if of_quick else "vary" if "study.vary" in str(error) else "compare"
            named = (f"study.compare {variant.name!r}" in str(error) for variant in one.study.compare)
            number = next((str(at) for at, found in enumerate(named) if found), "0")
            place = ("study", "compare", number) if of_study == "compare" else ("study", of_study)
            line = _line(text, place) or _line(text, ("study",)) or _line(text, ("workload",))
            why = f"study.quick: {error}" if of_quick else error
            raise BadInput(f"scenario {path}{f', line {line}' if line else ''}: {why}") from None
    return scenario


class ScenarioError(BadInput):
    """A value that does not fit the model: its place (``where``), and the reason without the place (``why``)."""

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
        where = tuple(str(step) for step in invalid.place_of(first))
        kind = ""
        if where[:1] == ("workload",) and where[1:2] and where[1] in WORKLOADS:
            kind, where = where[1], ("workload", *where[2:])
        name = ".".join(where)
        text = why = invalid.reason(Scenario, error.errors())
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
    """Return the line of a key; of a key that is absent, the line of its table.

    Args:
        where: Tables and key; in lists of tables (``[[study.compare]]``) their numbers from 0, too.
    """
    table: tuple[str, ...] = ()
    headers: dict[tuple[str, ...], int] = {}
    counts: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[(\[?)([\w.]+)\]", line):
            names = tuple(header[2].split("."))
            if header[1]:
                counts[names] = counts.get(names, -1) + 1
            table = ()
            for at, name in enumerate(names, 1):
                table += (name, str(counts[names[:at]])) if names[:at] in counts else (name,)
            if table == where:
                return number
            headers.setdefault(table, number)
        elif (key := re.match(r"\s*[\"']?([\w.-]+)[\"']?\s*=", line)) and (*table, key[1]) == where[: len(table) + 1]:
            return number
    around = [number for table, number in headers.items() if table == where[: len(table)]]
    return max(around, default=None)
