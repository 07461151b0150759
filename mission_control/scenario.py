"""A scenario: one file that says what is run, how it is controlled and what is expected; every world reads the same.

The model below is the only description of it: the file is checked against it, and docs/scenario.md is drawn from it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mission_control import _native
from mission_control.errors import BadInput as BadInput
from mission_control.errors import EnvironmentFailed as EnvironmentFailed
from mission_control.errors import PrerequisiteMissing as PrerequisiteMissing
from mission_control.jobs import specification

BUILT_IN = Path(__file__).parent / "scenarios"


def _bytes(value: Any) -> Any:
    if isinstance(value, str):
        return _native.parse_bytes(value)
    raise ValueError(f'{value!r} has no unit: write a size as in "64 MiB"')


def _rate(value: Any) -> Any:
    if isinstance(value, str):
        return _native.parse_rate(value)
    raise ValueError(f'{value!r} has no unit: write a rate as in "100 Mbit/s"')


def _milliseconds(value: Any) -> Any:
    if isinstance(value, str):
        return round(_native.parse_duration(value) * 1e3)
    raise ValueError(f'{value!r} has no unit: write a time as in "200 ms"')


Bytes = Annotated[int, BeforeValidator(_bytes)]
Rate = Annotated[int, BeforeValidator(_rate)]
"""Bits per second."""
Milliseconds = Annotated[int, BeforeValidator(_milliseconds)]


Flows = Annotated[int, Field(ge=1)] | Literal["all", "auto"]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


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
        None, ge=10**6, description="lab, two-rack: of the link between them; else as others"
    )
    events: tuple[Event, ...] = Field((), description="lab: what happens meanwhile: after, do, host, path, ...")
    dilation: int = Field(
        1,
        ge=1,
        description="lab: slow motion: rates are divided by it, and minimum RTOs multiplied and locked (200 ms, unless "
        "the stack says); buffers, programs and their own time limits are as they are; times are as measured",
    )
    mtu: int = Field(1500, ge=576, le=9000, description="lab: bytes of a packet")
    port: Port = Port()


class Stack(Part):
    """World `lab`: what the hosts' kernels do with TCP. Single settings take the place of the profile's."""

    profile: Literal["modern", "2009"] = Field(
        "modern",
        description="modern: cubic and the kernel's own; 2009: reno, RTO 200 ms, initial window 2, no SACK, no TLP",
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
    delayed_ack: bool | None = Field(None, description="false: every segment is acknowledged at once")


class Workload(Part):
    """What is computed."""

    kind: Literal["sort", "kmeans", "wordcount", "shuffle", "mix", "frames", "incast"] = Field(
        "sort",
        description="sort: records of 100 bytes with a 10-byte key, files to files; kmeans: centres of points; "
        "wordcount: words of texts, by mapreduce; "
        "shuffle: bytes that are there before the clock starts, from all to all; mix: "
        "the first job has a broadcast beside its shuffle, the others a shuffle; frames: Dask's own shuffle of a "
        "data frame, by an unchanged program; incast: "
        "synchronized reads of one receiver from many senders, without an engine",
    )
    size: Bytes = Field(
        "1 GiB",
        validate_default=True,
        description="sort, wordcount: bytes of input of each job; shuffle, mix, frames: of each shuffle",
        ge=100,
    )
    sizes: tuple[Annotated[Bytes, Field(ge=100)], ...] = Field(
        (), description="in place of `size`, one for each job: jobs that are unlike"
    )
    points: int = Field(2_000_000, ge=1, description="kmeans: points of each job")
    k: int = Field(100, ge=1, description="kmeans: centres")
    dimensions: int = Field(8, ge=1, description="kmeans: of each point")
    points_on: Literal["all", "one"] = Field(
        "all",
        description="kmeans: workers that make the points; all: map tasks run where their points were made; one: where "
        "Dask likes",
    )
    keep: bool = Field(False, description="kmeans: workers that have fetched points keep them for the next iterations")
    driver: Literal["client", "tasks"] = Field(
        "client",
        description="kmeans: who submits the next iteration; client: the program outside, which waits for each; tasks: "
        "the reduce task, which delegates to the next one",
    )
    engine: Literal["python", "java", "mapreduce"] = Field(
        "python",
        description="sort, kmeans: what their tasks are written in; java: classes in one process of Java a worker; "
        "kmeans has no driver then; mapreduce: functions for the library mapreduce, the client being the driver",
    )
    jobs: int = Field(1, ge=1, description="jobs at once, each with its own client and its own input")
    partitions: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="map tasks of each job; auto: one a worker, and at least: sort, wordcount one for 64 MiB, "
        "kmeans 8; frames: partitions, auto: eight a worker",
    )
    reducers: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="sort, wordcount: reduce tasks of each job; auto: sort as many as map tasks, wordcount one a "
        "worker",
    )
    placement: Literal["free", "even"] = Field(
        "free",
        description="sort: where tasks run; free: where Dask likes; even: in turn, so that all hosts send as much",
    )
    senders: Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)] = Field(
        "1-47", description="incast: how many are asked at once, as in 1-47 or 1,2,4,8-16"
    )
    fragment: tuple[Annotated[Bytes, Field(ge=1)], ...] = Field(
        ("64 kB",), validate_default=True, min_length=1, description="incast: bytes of each sender for a block"
    )
    total: Bytes | None = Field(None, ge=1, description="incast: in place of `fragment`, of all senders together")
    sender_rate: tuple[Rate, ...] = Field(
        (), description="incast in the lab: of the senders' links, in turn; absent: as the receiver's"
    )
    blocks: int = Field(100, ge=1, description="incast: that count at each point of the grid")
    warm_up: int = Field(10, ge=0, description="incast: blocks before them")
    deadline: Milliseconds = Field(
        "60 s", validate_default=True, ge=1, description="incast: a point ends after this, with what was measured"
    )
    jitter: Milliseconds = Field(
        "0 ms", validate_default=True, ge=0, description="incast: requests are put off by a random time of up to this"
    )
    rto_spread: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="incast: each socket's minimum RTO is shorter by a random part of it, up to this; sockets cannot "
        "have a longer one than the kernel's",
    )
    traced: int = Field(0, ge=0, le=8, description="incast: of how many senders the report shows what arrived when")
    seed: int = Field(1, description="the same seed makes the same input")


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
    measure: tuple[
        Literal["shuffle_seconds", "job_seconds", "fairness", "share", "first_shuffle_seconds", "mean_job_seconds"],
        ...,
    ] = Field(
        ("shuffle_seconds",),
        min_length=1,
        description="what is compared; ratios are expected of the first; fairness: Jain's index of receivers' rates; "
        "share: the first job's part of the bytes that cross the network while all jobs have some under way",
    )
    vary: dict[str, tuple[Any, ...]] = Field(
        {}, description='values of this scenario\'s keys: all are run, as in `{ "workload.size" = ["1 GiB"] }`'
    )
    compare: tuple[Variant, ...] = Field((), description="variants, in the order in which they take turns")


class Scenario(Part):
    """Units are written (`64 MiB`, `100 Mbit/s`); kB is 1,000 and KiB 1,024 bytes."""

    version: Literal[1] = Field(1, description="of this format")
    world: Literal["local", "lab", "model"] = Field(
        "local", description="where it runs unless told otherwise; model: incast only"
    )
    topology: Topology = Topology()
    stack: Stack = Stack()
    workload: Workload = Workload()
    control: Control = Control()
    expect: Expect = Expect()
    study: Study = Study()

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        control, jobs = self.control, self.workload.jobs
        _native.weights(control.policy, "[]", control.flows_per_host)
        if self.workload.k > self.workload.points:
            raise ValueError(f"{self.workload.k} centres of {self.workload.points} points: use at most as many centres")
        if control.priorities and len(control.priorities) != jobs:
            raise ValueError(f"{len(control.priorities)} priorities for {jobs} jobs: give one for each job")
        if self.workload.sizes and len(self.workload.sizes) != jobs:
            raise ValueError(f"{len(self.workload.sizes)} sizes for {jobs} jobs: give one for each job")
        for priority in control.priorities or (1.0,):
            specification("job", priority=priority, encrypt=control.encrypt, transport=control.transport)
        if len({variant.name for variant in self.study.compare}) < len(self.study.compare):
            raise ValueError("two variants of one name: give each its own")
        return self

    @property
    def alone(self) -> Scenario:
        """Without its study: one run."""
        return self.model_copy(update={"study": Study()})


def built_in() -> list[str]:
    """Names of the scenarios that come with the package."""
    return sorted(path.stem for path in BUILT_IN.glob("*.toml"))


def load(name: str) -> Scenario:
    """A built-in scenario by name, or a file that ends in .toml.

    Raises:
        BadInput: it cannot be read or does not fit the model; the text has the file and the line.
    """
    if not name.endswith(".toml"):
        if name not in built_in():
            raise BadInput(f"there is no scenario {name!r}: use {', '.join(built_in())}, or a file that ends in .toml")
        path = BUILT_IN / f"{name}.toml"
    else:
        path = Path(name)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"scenario {path} cannot be read: {error}") from None
    try:
        return validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"scenario {path}: {error}") from None
    except ScenarioError as error:
        line = _line(text, error.where)
        raise BadInput(f"scenario {path}{f', line {line}' if line else ''}: {error}") from None


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
        return Scenario.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = tuple(str(step) for step in first["loc"])
        name = ".".join(step for step in where if step not in ("int", "bool", "literal['auto']", "constrained-int"))
        text = why = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            text = f"there is no such key: docs/scenario.md lists them; {name} is none"
        elif name:
            text = f"{name}: {text}"
        raise ScenarioError(text, where, why) from None


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
                raise BadInput(f"a scenario has no table {part!r}: docs/scenario.md lists them")
            place = place[name]
        place.update({key: value for key, value in change.items() if value is not None})
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
    values = scenario.model_dump(exclude_none=True)
    for path, unit in UNITS.items():
        *parts, key = path.split(".")
        place: Any = values
        for part in parts:
            place = place[part]
        for entry in place if isinstance(place, tuple | list) else (place,):
            if isinstance(entry.get(key), int):
                entry[key] = f"{entry[key]} {unit}"
            elif isinstance(entry.get(key), tuple | list):
                entry[key] = [f"{value} {unit}" for value in entry[key]]
    return plain_lists(values)


def plain_lists(value: Any) -> Any:
    """Lists in place of tuples, all the way down."""
    if isinstance(value, dict):
        return {key: plain_lists(entry) for key, entry in value.items()}
    return [plain_lists(entry) for entry in value] if isinstance(value, tuple | list) else value


UNITS = {
    "topology.memory_limit": "B",
    "topology.link_rate": "bit/s",
    "topology.trunk_rate": "bit/s",
    "topology.links.rate": "bit/s",
    "topology.events.after": "ms",
    "topology.events.rate": "bit/s",
    "topology.events.buffer": "B",
    "topology.events.ecn_threshold": "B",
    "topology.port.buffer": "B",
    "topology.port.ecn_threshold": "B",
    "topology.port.shared_buffer": "B",
    "stack.receive_window": "B",
    "stack.rto_min": "ms",
    "stack.rto_min_socket": "ms",
    "stack.rto_min_sysctl": "ms",
    "workload.size": "B",
    "workload.sizes": "B",
    "workload.sender_rate": "bit/s",
    "workload.fragment": "B",
    "workload.total": "B",
    "workload.deadline": "ms",
    "workload.jitter": "ms",
}
"""Of the values that have one."""


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
