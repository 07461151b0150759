"""Synchronized reads: one receiver asks many senders at once, without an engine. In the lab over real sockets, in the
model by the equations (`crates/core/src/incast.rs`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from mission_control import interrupts
from mission_control.errors import PrerequisiteMissing
from mission_control.experiments.result import Onset, Point
from mission_control.incast import model, quantities, statistics
from mission_control.incast.points import (
    MSS,
    ONE_FLOW,
    Place,
    alpha,
    check,
    collapsed,
    halved,
    ideal_mbit,
    link_rate,
    path_of,
    place_of,
    reads,
    rto_min_asked,
)
from mission_control.lab.topology import HOSTS_MAX
from mission_control.workloads.settings import Bytes, Count, Measure, Milliseconds, Rate, Settings, several

if TYPE_CHECKING:
    from mission_control.experiments.points import Conditions, Measuring, Planned, Watch
    from mission_control.lab import Lab
    from mission_control.scenario import Scenario


class IncastPoint(Point):
    """Blocks of one number of senders with one size of fragment."""

    senders: int = 0
    fragment_bytes: int = Field(0, description="bytes that each sender sends for a block")
    asked_bytes: int = Field(0, description="the same as the scenario gives it: of each sender, or of all together")
    goodput_mbit: float | None = Field(None, description="bytes of all blocks divided by their time, as measured")
    ideal_mbit: float = Field(0.0, description="equation 1, with headers; includes slow start if connections are fresh")
    rto_s: float = Field(0.0, description="expected minimum RTO")
    dilation: int = 1
    interval95: tuple[float, float] | None = Field(
        None, description="95 % interval of goodput, from this point's blocks alone"
    )
    blocks: list[float] = Field(default=[], description="seconds of each block")
    block_ms: dict[str, float] = Field(default={}, description="median, p95")
    flows: list[dict[str, Any]] = Field(default=[], description="counters of each sender's kernel")
    drops: int | None = Field(None, description="packets dropped at the receiver's port")
    marks: int | None = None
    queue_bytes_p50: int | None = None
    queue_bytes_max: int | None = None
    limits: list[Any] = Field(default=[], description="flows_per_host auto: seconds, flows")
    rto_min: dict[str, Any] | None = Field(
        None, description="minimum RTOs by who sets them (asked), observed_us, and which of them applies (won)"
    )
    trace: list[Any] = Field(default=[], description="seconds, number of the sender, its bytes so far")
    correlations: dict[str, Any] | None = Field(
        None,
        description="correlations of the traced senders' TCP variables over time: variables, rank, looks, pairs, "
        "strong",
    )
    background_mbit: float | None = Field(None, description="goodput of all long flows together during the measurement")
    ended: str | None = Field(None, description="why it ended early")
    one_flow_mbit: float | None = Field(None, description="goodput of one long flow in the same lab")
    regime: str = Field("", description="model: ideal, collapsed")
    at_once: int | None = Field(None, description="model: concurrent senders that flows_per_host allows")
    paper_mbit: float | None = Field(None, description="model: equations 1 to 3 as printed, of so many senders")

    def interval_of(self, measure: str) -> tuple[float, float] | None:
        if self.interval95 is None or measure not in ("goodput", "alpha"):
            return None
        slow, fast = self.interval95
        return (slow, fast) if measure == "goodput" else (alpha(self, fast), alpha(self, slow))


def total(name: str) -> Any:
    """Sum a counter over all senders; ``None`` if the counters of one did not arrive, because then the sum is not
    known."""
    return lambda p: sum(flow[name] for flow in p.flows) if p.flows and all(f["asked"] for f in p.flows) else None


class IncastSettings(Settings):
    """Synchronized reads of one receiver from many senders, without an engine."""

    worlds: ClassVar[tuple[str, ...]] = ("model", "lab")
    measures: ClassVar[Mapping[str, Measure]] = {
        "goodput": Measure("Mbit/s", "goodput", lambda p: p.goodput_mbit),
        "goodput_of_ideal": Measure(
            "",
            "goodput, fraction of the ideal",
            lambda p: None if p.goodput_mbit is None else p.goodput_mbit / p.ideal_mbit,
        ),
        "block_median": Measure("ms", "median block", lambda p: p.block_ms.get("median")),
        "block_p95": Measure("ms", "95 % of blocks within", lambda p: p.block_ms.get("p95")),
        "timeouts": Measure("", "timeouts", total("timeouts")),
        "retransmits": Measure("", "segments retransmitted", total("retransmits")),
        "drops": Measure("", "packets dropped", lambda p: p.drops),
        "marks": Measure("", "packets marked", lambda p: p.marks),
        "queue_max": Measure("B", "longest queue", lambda p: p.queue_bytes_max),
        "alpha": Measure(
            "",
            "alpha, idle fraction of an RTO in a block",
            lambda p: alpha(p, p.goodput_mbit) if p.blocks and p.goodput_mbit else None,
            ratios=False,
        ),
        "background": Measure("Mbit/s", "goodput of long flows", lambda p: p.background_mbit),
    }
    unread: ClassVar[tuple[str, ...]] = (
        *("topology.hosts", "topology.threads", "topology.memory_limit", "topology.links", "topology.trunk_rate"),
        *("control.policy", "control.priorities", "control.encrypt"),
        *("expect.refetches_max", "expect.recomputed_max", "expect.condition", "expect.goodput_of_ideal_min"),
    )
    point: ClassVar[type[Point]] = IncastPoint
    axis: ClassVar[str] = "workload.senders"
    side_by_side: ClassVar[bool] = True

    kind: Literal["incast"] = "incast"
    senders: Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)] = Field(
        "1-47", description="Numbers of concurrent senders, e.g. 1-47 or 1,2,4,8-16"
    )
    fragment: Annotated[tuple[Annotated[Bytes, Field(ge=1)], ...], BeforeValidator(several)] = Field(
        ("64 kB",), validate_default=True, min_length=1, description="Bytes of each sender for a block, e.g. 16kB,64kB"
    )
    total: Annotated[Bytes, Field(ge=1)] | None = Field(
        None, description="Bytes of all senders together, in place of fragment"
    )
    sender_rate: Annotated[tuple[Rate, ...], BeforeValidator(several)] = Field(
        (), description="Lab: rates of the senders' links, assigned in turn; absent: the receiver's"
    )
    blocks: Count = Field(100, description="Blocks to measure at each point")
    warm_up: int = Field(10, ge=0, description="Warm-up blocks before them")
    deadline: Annotated[Milliseconds, Field(ge=1)] = Field(
        "60 s", validate_default=True, description="Time limit of a point; it keeps what was measured"
    )
    connections: Literal["persistent", "fresh"] = Field(
        "persistent",
        description="fresh: new connections for each block, so that it begins with the initial window; "
        "they are made before its time begins",
    )
    jitter: Annotated[Milliseconds, Field(ge=0)] = Field(
        "0 ms", validate_default=True, description="Delay each request by a random time of up to this"
    )
    rto_spread: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Shorten each socket's minimum RTO by a random fraction, up to this; sockets cannot have a "
        "longer one than the kernel's",
    )
    traced: int = Field(
        0,
        ge=0,
        le=8,
        description="Senders to trace: the report shows their arrivals over time and correlations of their TCP "
        "variables",
    )
    background: int = Field(
        0, ge=0, le=64, description="Lab: additional hosts, each of which sends one long flow through the same port"
    )

    def check(self, scenario: Scenario) -> None:
        most = max(quantities.senders(self.senders))
        if scenario.world == "lab" and most + self.background >= HOSTS_MAX:
            raise ValueError(
                f"{most} senders, {self.background} long flows and the receiver: a lab has {HOSTS_MAX} hosts at most"
            )
        check(scenario)

    def grid(self) -> list[dict[str, Any]]:
        """The places of the grid: fragment by fragment, from few senders to many."""
        name, sizes = ("total", (self.total,)) if self.total else ("fragment", self.fragment)
        return [
            {"workload.senders": senders, f"workload.{name}": exact(size)}
            for size in sizes
            for senders in quantities.senders(self.senders)
        ]

    def worlds_of(self, scenario: Scenario) -> tuple[str, ...]:
        """Add the model, which takes no time, to the worlds that are plotted."""
        return ("model",) if scenario.world == "model" else ("model", "lab")

    def alone(self, scenario: Scenario) -> bool:
        from mission_control.experiments.points import variants_of

        return any(one.expect.goodput_of_one_flow_min for one in variants_of(scenario).values())

    def site(self, whole: Scenario) -> Any:
        return whole

    def made_for(self, whole: Scenario) -> str:
        """The hosts of the lab, the same for all points."""
        return f"{max(quantities.senders(self.senders))} senders"

    def opened(self, world: str, whole: Scenario, conditions: Conditions) -> AbstractContextManager[Measuring]:
        return {"model": in_model, "lab": in_lab}[world](whole)

    @classmethod
    def pieces(cls, points: Sequence[Any]) -> list[dict[str, Any]]:
        from mission_control.incast.shown import pieces

        return pieces(points)

    def onsets(self, points: list[Any]) -> list[Onset]:
        """Where each curve collapses: by its median block, and by its goodput, which the papers plot."""
        curves: dict[tuple[str, str, str, int], list[Any]] = {}
        for point in (one for one in points if one.asked_bytes):  # without points that could not be measured
            curve = curves.setdefault((point.study, point.world, point.variant, point.asked_bytes), [])
            if point.counts:
                curve.append(point)
        names = ("study", "world", "variant", "asked_bytes")
        return [
            Onset(
                **dict(zip(names, curve, strict=True)),
                senders=min((one.senders for one in own if collapsed(one)), default=None),
                of_goodput=min((one.senders for one in own if halved(one)), default=None),
            )
            for curve, own in curves.items()
        ]


def exact(size: int) -> str:
    """Write a size as a scenario has it, exactly."""
    return quantities.size(size) if size % 1000 == 0 or size % 1024 == 0 else f"{size} B"


def found_at(one: Planned, place: Place, **found: Any) -> IncastPoint:
    """A point of synchronized reads."""
    path = path_of(one.whole)
    labels = {"senders": place.senders, "fragment_bytes": place.fragment, "asked_bytes": place.asked}
    ideal = ideal_mbit(path, place.senders, place.fragment)
    slow = one.whole.topology.dilation
    made: IncastPoint = one.point(**labels, ideal_mbit=ideal, rto_s=path["rto_s"], dilation=slow, **found)
    return made


IN_MODEL = (
    *(
        "topology.link_rate",
        "topology.link_delay",
        "topology.mtu",
        "topology.dilation",
        "topology.port.switch",
        "topology.port.buffer",
    ),
    *("stack.profile", "stack.rto_min", "stack.initial_window", "stack.sack", "control.flows_per_host"),
    *(
        "workload.kind",
        "workload.senders",
        "workload.fragment",
        "workload.total",
        "workload.blocks",
        "workload.warm_up",
        "workload.connections",
    ),
    *("workload.deadline", "workload.traced", "workload.seed"),
)
"""The keys that the model reads."""


@contextmanager
def in_model(whole: Scenario) -> Iterator[Measuring]:
    """The equations; nothing is measured."""
    from mission_control.scenario import not_in_force

    path = path_of(whole)
    # Figure 4 of paper 000 was measured with an initial window of one segment.
    paper = {**path, "initial_window": MSS}

    def measure(one: Planned, folder: Path, watch: Watch) -> IncastPoint:
        place = place_of(one.scenario)
        most = at_once(path, place, one.scenario.control.flows_per_host)
        # With a limit, a request goes to the next sender when one is done, so the port never has more flows than that.
        (row,) = model.predict(path, [most], [place.fragment])["rows"]
        (printed,) = model.predict(paper, [most], [place.fragment], equations="paper")["rows"]
        came = {"goodput_mbit": row["goodput_mbit"], "regime": row["regime"], "paper_mbit": printed["goodput_mbit"]}
        return found_at(one, place, **came, at_once=most, notes=not_in_force(one.scenario, "model", IN_MODEL))

    yield measure


def at_once(path: dict[str, Any], place: Place, limit: int | str) -> int:
    """How many senders answer at the same time; ``auto``: the number with the highest goodput, as trials find it."""
    if limit == "all":
        return place.senders
    if limit != "auto":
        return min(int(limit), place.senders)
    rows = model.predict(path, range(1, place.senders + 1), [place.fragment])["rows"]
    return int(max(rows, key=lambda row: row["goodput_mbit"])["senders"])


@contextmanager
def in_lab(whole: Scenario) -> Iterator[Measuring]:
    """Synchronized reads over real sockets between namespaces."""
    from mission_control.incast.lab import reads_in
    from mission_control.lab.described import lab_of
    from mission_control.lab.events import dilated

    long_flows: int = getattr(whole.workload, "background", 0)
    hosts = place_of(whole).senders + 1 + long_flows
    topology = whole.topology.model_copy(update={"hosts": hosts, "link_rate": link_rate(whole)})
    size = whole.model_copy(update={"topology": topology})
    if whole.control.transport == "dctcp":
        # The first packets of a connection negotiate ECN, so both ends are set before they connect.
        size = size.model_copy(update={"stack": whole.stack.model_copy(update={"congestion_control": "dctcp"})})
    events, wanted = dilated(whole.topology), whole.expect.goodput_of_one_flow_min
    with lab_of(size) as lab, reads_in(lab) as own:
        for event in events:
            lab.link_of(event.host or lab.topology.hosts[0], event.path)  # refuses what is not there
        set_up(lab, whole)
        one_flow: list[float] = []

        def measure_at(one: Planned, place: Place, watch: Watch) -> IncastPoint:
            asked = reads(one.scenario, place)

            def look(blocks: int) -> bool:
                watch(f"{blocks} of {asked.warm_up + asked.blocks} blocks", {})
                try:
                    interrupts.check()
                except KeyboardInterrupt:
                    return True
                return False

            try:
                more: dict[str, Any] = {} if place == ONE_FLOW else {"events": events, "long_flows": long_flows}
                result = own.measure(place.senders, asked, watch=look, **more)
            finally:
                if events:
                    set_up(lab, whole)
            interrupts.check()
            result["rto_min"] = statistics.rto_min(result["flows"], rto_min_asked(whole))
            return found_at(one, place, **result)

        def measure(one: Planned, folder: Path, watch: Watch) -> IncastPoint:
            if wanted and not one_flow:
                one_flow.append(long_flow(lambda _: measure_at(one, ONE_FLOW, watch)))
            point = measure_at(one, place_of(one.scenario), watch)
            if point.ended:
                point.expectations[f"every block was read: {point.ended}"] = False
            if wanted:
                point.one_flow_mbit = one_flow[0]
                part = (point.goodput_mbit or 0) / one_flow[0]
                words = f"{part:.1%} of one long flow's goodput, at least {wanted:.0%}"
                point.expectations[words] = part >= wanted
            return point

        yield measure


def long_flow(measure: Any) -> float:
    """Goodput of one long flow, in Mbit/s.

    Raises:
        PrerequisiteMissing: it could not be measured, so no fraction of it is known.
    """
    from mission_control.experiments.points import until_valid

    result = until_valid(measure, lambda _: None)
    if result.ended or not result.valid or not result.goodput_mbit:
        why = result.ended or "; ".join(result.invalid_because)
        raise PrerequisiteMissing(f"the goodput of one long flow could not be measured: {why}")
    return float(result.goodput_mbit)


def set_up(lab: Lab, scenario: Scenario) -> None:
    """Restore the scenario's settings of links and ports, which events may have changed."""
    workload: Any = scenario.workload
    rates, slow = workload.sender_rate, scenario.topology.dilation
    changed = {event.host for event in scenario.topology.events if event.do == "rate"}
    senders = place_of(scenario).senders
    for number, host in enumerate(lab.topology.hosts):
        if 1 <= number <= senders and rates:
            lab.slow(host, rates[(number - 1) % len(rates)] // slow)
        elif host in changed:
            lab.slow(host, lab.link_of(host).bits_per_second)
    if scenario.topology.events:
        lab.resize(lab.topology.port.buffer_bytes)
        lab.mark(lab.topology.port.ecn_bytes)
