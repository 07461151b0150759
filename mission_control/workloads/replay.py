"""Replays a trace: its jobs, scaled, as real jobs, each at its time (paper 000, 3.2: SWIM).

A job has map tasks that read its input, a shuffle, and reduce tasks that write its output. Tasks generate their input
locally, as if a file system had local replicas. Shuffle and output are put: they lie in memory, or in the store's spool
files once that is full. Every byte that arrives, and all output, is compared with the expected content.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple
from uuid import uuid4

import numpy as np
from pydantic import Field

import mission_control
from mission_control.errors import BadInput
from mission_control.experiments.result import Point
from mission_control.workloads.settings import Bytes, ClusterSettings, Count, Measure, shuffle_parts

if TYPE_CHECKING:
    from distributed import Client, Future

    from mission_control.experiments.points import Conditions, Measuring
    from mission_control.experiments.running import Running
    from mission_control.scenario import Scenario
    from mission_control.traces.scale import ScaledJob
    from mission_control.worlds.site import Site

PERIOD = 65521
"""Bytes after which content repeats: a prime, so a block that arrives in another's place is detected."""
TASKS_MAX = 256
"""Most map tasks of a job, and most reduce tasks: with more of both, parts of a shuffle would be tiny."""
JOB_MAX = 16 << 30
"""Most bytes of input, shuffle and output of a job, so that no task holds more than 64 MiB at once."""
READ = 1 << 20
"""Bytes of input that a map task holds in memory at once."""
SHUFFLE, OUTPUT, INPUT = range(3)
LATE_S = 0.1
"""Seconds: a job that begins within this time counts as on time."""


class ReplayPoint(Point):
    """A trace that was replayed."""

    job_time_s: dict[str, float] = Field(default={}, description="quantiles of submission (when due) to end, by name")
    late_s: dict[str, float] = Field(default={}, description="quantiles of how long after its time a job began")
    late: int = Field(0, description="jobs that began more than 0.1 s after their time")
    under_way_max: int = Field(0, description="most jobs that had begun and not ended")
    distortion: dict[str, Any] = Field(default={}, description="how scaling changed the trace")


def of(quantities: str, name: str) -> Any:
    """A measure: one of the quantiles of a point."""
    return lambda point: getattr(point, quantities).get(name)


class ReplaySettings(ClusterSettings):
    """The jobs of a trace in SWIM's format, scaled, each submitted at its time."""

    measures: ClassVar[Mapping[str, Measure]] = {
        "job_median": Measure("s", "median job", of("job_time_s", "p50")),
        "job_p90": Measure("s", "90 % of jobs within", of("job_time_s", "p90")),
        "job_p99": Measure("s", "99 % of jobs within", of("job_time_s", "p99")),
        "job_max": Measure("s", "longest job", of("job_time_s", "max")),
        "replay_seconds": Measure("s", "whole replay", lambda p: p.seconds),
        "late_p99": Measure("s", "99 % of jobs begun late by up to", of("late_s", "p99")),
        "under_way_max": Measure("", "most jobs under way", lambda p: p.under_way_max),
        "bytes": Measure("B", "bytes that tasks fetched", lambda p: sum(t.bytes for j in p.jobs for t in j.transfers)),
    }
    unread: ClassVar[tuple[str, ...]] = (*ClusterSettings.unread, "control.priorities")
    point: ClassVar[type[Point]] = ReplayPoint
    leaves_files: ClassVar[bool] = True
    many_jobs: ClassVar[bool] = True

    kind: Literal["replay"] = "replay"
    trace: str = Field("sample", description="File in SWIM's format, or sample: a synthesised one of 2 hours")
    trace_hosts: Count = Field(600, description="Hosts of the traced cluster; bytes are scaled in proportion to hosts")
    scale: float = Field(0.1, gt=0, le=1000, description="Additional factor of all bytes")
    start: float = Field(0.0, ge=0, description="Hour of the trace at which to begin")
    hours: float = Field(1.0, gt=0, le=10000, description="Hours of the trace to replay")
    speed: float = Field(10.0, gt=0, le=1e6, description="Seconds of the trace in one second of the replay")
    at_once: Annotated[int, Field(ge=1, le=256)] = Field(
        16, description="Most concurrent jobs; others wait, and are late"
    )
    block: Annotated[Bytes, Field(ge=1, le=1 << 30)] = Field(
        "1 MiB", validate_default=True, description="Bytes of a task: larger jobs have more tasks, up to 256 of each"
    )
    job_limit: Annotated[Bytes, Field(ge=1, le=JOB_MAX)] = Field(
        "64 MiB", validate_default=True, description="Input, shuffle and output of a job are each cut to this"
    )

    def check(self, scenario: Scenario) -> None:
        from mission_control.traces import swim

        try:
            swim.find(self.trace)
        except BadInput as error:
            raise ValueError(str(error)) from None

    def factor(self, hosts: int) -> float:
        """The factor of all bytes on this number of hosts."""
        return self.scale * hosts / self.trace_hosts

    def scaled(self, hosts: int) -> list[ScaledJob]:
        """The jobs of the replay.

        Raises:
            BadInput: the trace is malformed, or has no job in these hours.
        """
        from mission_control.traces import scale, swim

        jobs = scale.window(swim.read(swim.find(self.trace)), self.start, self.hours)
        return scale.scaled(jobs, self.factor(hosts), self.speed, self.job_limit, self.start)

    def opened(self, world: str, whole: Scenario, conditions: Conditions) -> AbstractContextManager[Measuring]:
        self.scaled(whole.topology.hosts)  # a malformed trace is refused before a cluster is made
        return super().opened(world, whole, conditions)

    def running(self, scenario: Scenario, site: Site, data: Path) -> Running:
        from mission_control.experiments.replay import Replay

        return Replay(scenario, site, data)

    @classmethod
    def pieces(cls, points: Sequence[Any]) -> list[dict[str, Any]]:
        from mission_control.experiments import replayed

        return replayed.pieces(points) + shuffle_parts(points)

    @classmethod
    def lines(cls, point: Any) -> list[str] | None:
        from mission_control.experiments import replayed

        return replayed.lines(point)


class ReplayedJob:
    """One job of the trace.

    Args:
        job: what it reads, shuffles and writes.
        number: of the job, from 0; each has other content.
        block: bytes of a task.
        seed: of the scenario.
        homes: addresses of the workers.
    """

    def __init__(self, job: ScaledJob, number: int, block: int, seed: int, homes: Sequence[str]):
        self.job, self.seed, self.homes = job, (seed, number), homes
        self.maps = tasks(max(job.input_bytes, job.shuffle_bytes or job.output_bytes), block)
        # As in Hadoop: a job without a shuffle has no reduce tasks, and its map tasks write its output.
        self.reduces = tasks(max(job.shuffle_bytes, job.output_bytes), block) if job.shuffle_bytes else 0
        self.found: list[Done] = []
        self.written: list[Future] = []

    def run(self, client: Client) -> None:
        """Do the work; timed, inside the job's :func:`mission_control.job`."""
        given, job, run = {"pure": False}, self.job, uuid4().hex
        shuffled = [split(size, self.reduces) for size in split(job.shuffle_bytes, self.maps)] if self.reduces else []
        outputs = split(job.output_bytes, self.reduces or self.maps)
        maps = [
            client.submit(
                map_part,
                (*self.seed, index),
                size,
                shuffled[index] if shuffled else None,
                0 if shuffled else outputs[index],
                key=f"replay-map-{job.name}-{index}-{run}",
                **given,
            )
            for index, size in enumerate(split(job.input_bytes, self.maps))
        ]
        self.written = maps
        if self.reduces:
            # Hadoop places reduce tasks without regard to the location of their input.
            places = random.Random(repr(self.seed))
            self.written = [
                client.submit(
                    reduce_part,
                    maps,
                    self.seed,
                    index,
                    size,
                    key=f"replay-reduce-{job.name}-{index}-{run}",
                    workers=[places.choice(self.homes)],
                    allow_other_workers=True,
                    **given,
                )
                for index, size in enumerate(outputs)
            ]
        self.found = client.gather([*maps, *(self.written if self.reduces else ())])

    def check(self, client: Client) -> dict[str, bool]:
        """Check that all bytes were read, arrived, were written and are correct; free the output."""
        checks = []
        for number, (future, done) in enumerate(zip(self.written, self.found[-len(self.written) :], strict=True)):
            if done.output is not None:
                near = {"workers": [done.output.worker], "allow_other_workers": True, "pure": False}
                checks.append(client.submit(output_is_right, future, (*self.seed, number, OUTPUT), **near))
        right = all(client.gather(checks))
        self.written = []
        written = sum(sum(done.output.sizes) for done in self.found if done.output is not None)
        return {
            "input": sum(done.read for done in self.found) == self.job.input_bytes,
            "shuffle": sum(done.arrived for done in self.found) == self.job.shuffle_bytes
            and not any(done.wrong for done in self.found),
            "output": right and written == self.job.output_bytes,
        }


class Done(NamedTuple):
    """The report of a task."""

    read: int
    """Bytes of input."""
    shuffle: mission_control.Reference | None = None
    """The object that it put for reduce tasks, a part for each."""
    arrived: int = 0
    """Bytes that it fetched."""
    wrong: int = 0
    """Fetched parts that were wrong."""
    output: mission_control.Reference | None = None


def tasks(size: int, block: int) -> int:
    return min(TASKS_MAX, max(1, math.ceil(size / block)))


def split(size: int, parts: int) -> list[int]:
    """Split a size into nearly equal parts."""
    return [size * (index + 1) // parts - size * index // parts for index in range(parts)]


def block_of(key: tuple[int, ...], size: int) -> np.ndarray:
    """The bytes that the content of this key repeats."""
    random_bytes = np.random.Generator(np.random.PCG64(list(key))).bytes(min(size, PERIOD))
    return np.frombuffer(random_bytes, np.uint8)


def fill(view: Any, key: tuple[int, ...]) -> None:
    """Write the content of a key."""
    to = np.frombuffer(view, np.uint8)
    block = block_of(key, len(to))
    for start in range(0, len(to), PERIOD):
        piece = to[start : start + PERIOD]
        piece[:] = block[: len(piece)]


def is_right(view: Any, key: tuple[int, ...], size: int) -> bool:
    """Whether this is the content of a key, of so many bytes."""
    found = np.frombuffer(view, np.uint8)
    if len(found) != size:
        return False
    block = block_of(key, size)
    pieces = (found[start : start + PERIOD] for start in range(0, size, PERIOD))
    return all(np.array_equal(piece, block[: len(piece)]) for piece in pieces)


def put_made(sizes: Sequence[int], keys: Sequence[tuple[int, ...]]) -> mission_control.Reference | None:
    """Put an object of parts with the content of these keys; ``None`` if all would be empty."""
    if not sum(sizes):
        return None
    segment = mission_control.allocate(sum(sizes))
    view, start = memoryview(segment), 0
    for size, key in zip(sizes, keys, strict=True):
        if size:
            fill(view[start : start + size], key)
        start += size
    del view
    return mission_control.put(segment, sizes=sizes)


def map_part(seed: tuple[int, ...], input_bytes: int, shuffle: Sequence[int] | None, output_bytes: int) -> Done:
    """Read some input; put a part for each reduce task, or the output if there are none.

    Args:
        seed: of the scenario, number of the job, number of the task.
    """
    read, buffer = 0, bytearray(min(READ, input_bytes))
    while read < input_bytes:
        size = min(READ, input_bytes - read)
        fill(memoryview(buffer)[:size], (*seed, INPUT))
        read += size
    if shuffle is None:
        return Done(read, output=put_made([output_bytes], [(*seed, OUTPUT)]))
    return Done(read, put_made(shuffle, [(*seed, SHUFFLE, index) for index in range(len(shuffle))]))


def reduce_part(maps: Sequence[Done], seed: tuple[int, ...], index: int, output_bytes: int) -> Done:
    """Fetch a part from each map task, check it, and write output."""
    put = [(number, done.shuffle) for number, done in enumerate(maps) if done.shuffle is not None]
    arrived = wrong = 0
    # If all parts are empty there is nothing to fetch.
    if any(reference.sizes[index] for _, reference in put):
        fetched = mission_control.fetch([reference for _, reference in put], part=index)
        for (number, reference), part in zip(put, fetched, strict=True):
            arrived += len(part)
            wrong += not is_right(part, (*seed, number, SHUFFLE, index), reference.sizes[index])
        del fetched
    return Done(0, None, arrived, wrong, put_made([output_bytes], [(*seed, index, OUTPUT)]))


def output_is_right(done: Done, key: tuple[int, ...]) -> bool:
    """Whether the output of a task has the expected content."""
    assert done.output is not None
    (part,) = mission_control.fetch([done.output], part=0)
    return is_right(part, key, done.output.sizes[0])
