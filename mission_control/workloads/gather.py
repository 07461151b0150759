"""A gather: one task fetches a fragment from every sender at once, round after round.

In this pattern incast collapses a job's goodput: a striped read (paper 003), the reduce task of each iteration of
k-means, and any barrier at which many hosts answer one. The senders hold a part for each round, so no round repeats
bytes.
"""

from __future__ import annotations

import os
import statistics
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple
from uuid import uuid4

from pydantic import Field

import mission_control
from mission_control import _native
from mission_control.experiments.result import Point
from mission_control.incast.points import ideal_mbit, path_of
from mission_control.workers import workers_of
from mission_control.workloads.mix import Made, put_random
from mission_control.workloads.settings import JOB_MEASURES, AutoCount, Bytes, Count, JobSettings, Measure

if TYPE_CHECKING:
    from distributed import Client, Future

    from mission_control.scenario import Scenario


class GatherPoint(Point):
    """Rounds of a gather, of all jobs of the run."""

    senders: int = Field(0, description="of each job")
    fragment_bytes: int = Field(0, description="bytes that each sender sends for a round")
    rounds: list[float] = Field(default=[], description="seconds of each measured round, job after job")
    ideal_mbit: float | None = Field(None, description="lab with a link rate: equation 1, with headers")
    timeouts: int | None = Field(None, description="lab: timeouts that the senders' kernels counted, warm-up included")
    retransmits: int | None = Field(
        None, description="lab: segments that the senders' kernels retransmitted, warm-up included"
    )


def goodput(point: Any) -> float | None:
    """Goodput of a job in Mbit/s: bytes of a mean round divided by its time."""
    if not point.rounds:
        return None
    return float(point.senders * point.fragment_bytes * 8 / statistics.fmean(point.rounds) / 1e6)


def of_ideal(point: Any) -> float | None:
    reached = goodput(point)
    return reached / point.ideal_mbit if reached is not None and point.ideal_mbit else None


class GatherSettings(JobSettings):
    """One task fetches a fragment from every sender at once, checks them, and begins the next round."""

    measures: ClassVar[Mapping[str, Measure]] = {
        "gather_seconds": Measure("s", "measured rounds", lambda p: sum(p.rounds) or None),
        "goodput": Measure("Mbit/s", "goodput", goodput),
        "of_ideal": Measure("", "goodput, fraction of the ideal", of_ideal),
        "round_median": Measure(
            "ms", "median round", lambda p: statistics.median(p.rounds) * 1e3 if p.rounds else None
        ),
        "timeouts": Measure("", "timeouts", lambda p: p.timeouts),
        "retransmits": Measure("", "segments retransmitted", lambda p: p.retransmits),
        "drops": Measure("", "packets dropped", lambda p: sum(port["drops"] for port in p.ports) if p.ports else None),
        **JOB_MEASURES,
    }
    unread: ClassVar[tuple[str, ...]] = ("stack.rto_min_socket", "expect.goodput_of_one_flow_min")
    point: ClassVar[type[Point]] = GatherPoint

    kind: Literal["gather"] = "gather"
    fragment: Annotated[Bytes, Field(ge=1)] = Field(
        "64 kB", validate_default=True, description="Bytes of each sender for a round"
    )
    senders: AutoCount = Field("auto", description="Senders per job. auto: all workers but the one that receives")
    rounds: Count = Field(20, description="Rounds to measure")
    warm_up: int = Field(
        2, ge=0, description="Warm-up rounds before them: connections are made, and `auto` tries numbers of flows"
    )

    def make(self, number: int, folder: Path, workers: int) -> Gather:
        return Gather(self, number, folder, workers)

    def check(self, scenario: Scenario) -> None:
        super().check(scenario)
        if scenario.expect.goodput_of_ideal_min and scenario.topology.link_rate == "auto":
            raise ValueError(
                "expect.goodput_of_ideal_min: nobody knows the ideal of a link_rate that is auto; give one"
            )

    def found(self, point: Any, running: Any, scenario: Scenario) -> None:
        done: list[Gather] = [job for job in running.made if job.seconds]
        point.senders, point.fragment_bytes = running.made[0].senders, self.fragment
        point.rounds = [seconds for job in done for seconds in job.seconds]
        if point.world != "lab":
            return  # hosts share one kernel's counters, and the link's rate is not known
        if scenario.topology.link_rate != "auto":
            point.ideal_mbit = ideal_mbit(path_of(scenario), point.senders, self.fragment)
        if done and len(running.made) == 1:  # kernels do not count the jobs of a host apart
            point.timeouts = sum(job.counted.timeouts for job in done)
            point.retransmits = sum(job.counted.retransmits for job in done)
        if wanted := scenario.expect.goodput_of_ideal_min:
            part = of_ideal(point) or 0.0
            point.expectations[f"goodput at least {wanted:.0%} of the ideal"] = part >= wanted


class Counted(NamedTuple):
    """Counters of a host's kernel since its start."""

    timeouts: int = 0
    retransmits: int = 0


class Gathered(NamedTuple):
    """The receiving task's report of its rounds."""

    seconds: list[float]
    checksums: list[list[int]]
    """For each round, a checksum of each sender's bytes."""


class Gather:
    """One job.

    Args:
        workload: of the scenario.
        number: of the job, from 0; each has other bytes.
        folder: not used.
        workers: of the cluster. The first receives; the senders are on the others in turn.
    """

    def __init__(self, workload: GatherSettings, number: int, folder: Path, workers: int = 1):
        self.workers = workers
        self.senders = max(1, workers - 1) if workload.senders == "auto" else workload.senders
        self.fragment, self.warm_up = workload.fragment, workload.warm_up
        self.rounds = workload.warm_up + workload.rounds
        self.seed = workload.seed * 1000 + number
        self.run_id = uuid4().hex
        self.held: list[Future] = []
        self.expected: list[list[int]] = []
        self.came: list[list[int]] = []
        self.seconds: list[float] = []
        """Seconds of each measured round."""
        self.counted = Counted()
        """Counters of the senders' kernels while the job ran."""

    def homes(self, client: Client) -> tuple[str, list[str]]:
        """Addresses of the worker that receives, and of those that send; one worker does both."""
        known = workers_of(client)
        # Shorter ones first, so that the first host of a lab receives: that is the one whose receive queue is sampled.
        first, *others = sorted(known, key=lambda address: (len(address), address))[: self.workers]
        return first, others or [first]

    def prepare(self, client: Client, say: Callable[[str], None]) -> None:
        size = self.senders * self.fragment
        say(f"makes {self.rounds} rounds of {_native.format_bytes(size)} on {self.senders} senders")
        _, homes = self.homes(client)
        self.held = [
            client.submit(
                put_random,
                *(self.seed, "fragment", sender, self.rounds, self.fragment),
                key=(f"gather-hold-{self.run_id}", sender),
                pure=False,
                workers=[homes[sender % len(homes)]],
            )
            for sender in range(self.senders)
        ]
        made = client.gather(self.held)
        self.expected = [[one.checksums[number] for one in made] for number in range(self.rounds)]
        self.counted = self.kernels(client)

    def run(self, client: Client, say: Callable[[str], None]) -> None:
        say(f"gathers {self.rounds} times")
        receiver, _ = self.homes(client)
        given = {"key": f"gather-{self.run_id}", "pure": False, "workers": [receiver]}
        found = client.submit(gather, self.held, self.rounds, **given).result()
        self.seconds, self.came = found.seconds[self.warm_up :], found.checksums

    def check(self, client: Client, say: Callable[[str], None]) -> dict[str, bool]:
        after = self.kernels(client)
        self.counted = Counted(*(new - old for new, old in zip(after, self.counted, strict=True)))
        self.held = []
        return {"content of every fragment": self.came == self.expected}

    def kernels(self, client: Client) -> Counted:
        """The counters of the senders' kernels so far, each kernel once."""
        _, homes = self.homes(client)
        kernels = dict(client.run(counters, workers=homes).values())
        return Counted(*map(sum, zip(*kernels.values(), strict=True)))


def gather(held: list[Made], rounds: int) -> Gathered:
    """Run the receiving task. It checks the fragments between rounds, while nothing moves."""
    references, seconds, checksums = [one.reference for one in held], [], []
    for number in range(rounds):
        began = time.monotonic()
        came = mission_control.fetch(references, part=number)
        seconds.append(time.monotonic() - began)
        checksums.append([zlib.crc32(part) for part in came])
    return Gathered(seconds, checksums)


def counters() -> tuple[int, Counted]:
    """The network namespace of this worker, and TCP's counters there."""
    tcp, more = tables(Path("/proc/thread-self/net/snmp")), tables(Path("/proc/thread-self/net/netstat"))
    counted = Counted(more["TcpExt"]["TCPTimeouts"], tcp["Tcp"]["RetransSegs"])
    return os.stat("/proc/thread-self/ns/net").st_ino, counted


def tables(path: Path) -> dict[str, dict[str, int]]:
    """Parse a file of the kernel in which each table has a line of names and a line of values."""
    lines = [line.split() for line in path.read_text().splitlines()]
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return {names[0].rstrip(":"): dict(zip(names[1:], map(int, values[1:]), strict=True)) for names, values in pairs}
