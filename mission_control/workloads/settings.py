"""What all workloads share: quantities with units, settings that are keys of a scenario and flags of `mission run`, and
what is measured of jobs."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from mission_control import _native
from mission_control.errors import BadInput
from mission_control.experiments.result import JobResult, Onset, Point

if TYPE_CHECKING:
    from distributed import Client

    from mission_control.experiments.points import Conditions, Measuring
    from mission_control.experiments.running import Running
    from mission_control.scenario import Scenario
    from mission_control.worlds.site import Site


def quantity(parse: Callable[[str], float], unit: str, what: str, example: str) -> tuple[Any, Any]:
    """Make the validator and serializer of a number that has its unit in files.

    Args:
        parse: converts a text to a number of units.
        unit: the unit in files.
        what: kind of quantity, and ``example`` of one, for errors.
    """

    def read(value: Any) -> Any:
        if isinstance(value, str):
            return round(parse(value))
        raise ValueError(f'{value!r} has no unit: write a {what} as in "{example}"')

    return BeforeValidator(read), PlainSerializer(lambda value: f"{value} {unit}" if type(value) is int else value)


Bytes = Annotated[int, *quantity(_native.parse_bytes, "B", "size", "64 MiB")]
Rate = Annotated[int, *quantity(_native.parse_rate, "bit/s", "rate", "100 Mbit/s")]
"""Bits per second."""
BYTES_MAX = 2**63 - 1
"""Most bytes that a text of them is made for."""
Microseconds = Annotated[int, *quantity(lambda text: _native.parse_duration(text) * 1e6, "us", "time", "250 us")]
Milliseconds = Annotated[int, *quantity(lambda text: _native.parse_duration(text) * 1e3, "ms", "time", "200 ms")]
Count = Annotated[int, Field(ge=1)]


def several(value: Any) -> Any:
    """Accept a list, or a text with commas: `16kB,64kB`."""
    return value.split(",") if isinstance(value, str) else value


class Part(BaseModel):
    """A table of a scenario."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Measure:
    """A quantity that every point of a workload has."""

    unit: str
    words: str
    """Its name in tables and on axes."""
    of: Callable[[Any], float | None]
    """Its value at a point; ``None``: the point does not have it."""
    ratios: bool = True
    """Whether variants are compared by ratios; they make no sense where values may be 0 or less."""

    @property
    def label(self) -> str:
        return f"{self.words}, {self.unit}" if self.unit else self.words


class Job(Protocol):
    """One job of a workload. ``say`` takes a line of progress for the user."""

    def prepare(self, client: Client, say: Callable[[str], None]) -> None:
        """Make the input; not timed."""

    def run(self, client: Client, say: Callable[[str], None]) -> None:
        """Do the work; timed, inside the job's :func:`mission_control.job`."""

    def check(self, client: Client, say: Callable[[str], None]) -> dict[str, bool]:
        """Verify the result: the name of each check, and whether it passed; not timed."""


class Settings(Part):
    """Base of a workload's settings. Each field is a key of `[workload]` and a flag of `mission run KIND`."""

    worlds: ClassVar[tuple[str, ...]]
    """Worlds in which it can run."""
    measures: ClassVar[Mapping[str, Measure]]
    """Measures by name; studies compare the first unless the scenario names others."""
    unread: ClassVar[tuple[str, ...]] = ()
    """Keys of other tables that it ignores, so a scenario may not set them."""
    point: ClassVar[type[Point]] = Point
    """The type of its points."""
    axis: ClassVar[str] = ""
    """Key of the scenario on the x-axis of its curves."""
    leaves_files: ClassVar[bool] = False
    """Whether a point leaves files of its own."""
    reads_data: ClassVar[bool] = False
    """Whether its jobs read and write files in a folder shared by all workers."""
    many_jobs: ClassVar[bool] = False
    """Whether a point has too many jobs for a line each in reports."""
    side_by_side: ClassVar[bool] = False
    """Whether scenarios of it may be measured at the same time on one machine."""

    kind: Any = ""
    seed: int = Field(1, ge=0, le=2**32 - 1, description="Input seed: the same seed makes the same input")

    def check(self, scenario: Scenario) -> None:
        """Raise ValueError if other tables of the scenario do not fit this workload."""

    def check_room(self, data: Path) -> None:
        """Raise BadInput if the disk of the folder for data has no room for the files of a point."""

    def grid(self) -> list[dict[str, Any]]:
        """The points of the workload's grid: for each, keys of the scenario and their values."""
        return [{}]

    def worlds_of(self, scenario: Scenario) -> tuple[str, ...]:
        """Worlds in which the scenario runs, unless the command line names one."""
        return (scenario.world,)

    def alone(self, scenario: Scenario) -> bool:
        """Whether this machine may measure nothing else at the same time."""
        return not self.side_by_side

    def site(self, whole: Scenario) -> Any:
        """The key of a world: points with equal keys are measured in the same world, one after the other."""
        raise NotImplementedError

    def made_for(self, whole: Scenario) -> str:
        """What the world needs for all points, beyond the scenario of a single one."""
        return ""

    def opened(self, world: str, whole: Scenario, conditions: Conditions) -> AbstractContextManager[Measuring]:
        """Open the world in which points are measured.

        Args:
            whole: the scenario of a variant, with its whole grid.

        Raises:
            PrerequisiteMissing, EnvironmentFailed, BadInput: the world cannot be had.
        """
        raise NotImplementedError

    def onsets(self, points: list[Any]) -> list[Onset]:
        """The onsets of collapse of these points' curves."""
        return []

    @classmethod
    def pieces(cls, points: Sequence[Any]) -> list[dict[str, Any]]:
        """Sections of the report that only this workload has."""
        return []

    @classmethod
    def lines(cls, point: Any) -> list[str] | None:
        """Describe a single point, as `mission run` prints it; ``None``: use the general description."""
        return None


def shuffle_seconds(job: JobResult) -> float | None:
    """Return how long the longest shuffle of a job took."""
    seconds = (transfer.seconds for transfer in job.transfers if transfer.pattern == "shuffle")
    return max((one for one in seconds if one is not None), default=None)


def shuffle_part(job: JobResult) -> float | None:
    """The fraction of a job's time in which it shuffles (paper 001, figure 1.1)."""
    seconds = shuffle_seconds(job)
    return None if seconds is None or not job.seconds else seconds / job.seconds


PARTS_MIN = 5
"""Fewest jobs that are plotted as a distribution."""


def shuffle_parts(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Plot figure 1.1 of paper 001: a curve for each variant, of its jobs at all points."""
    from mission_control.experiments import charts
    from mission_control.experiments.pieces import drawn, text

    found: dict[str, list[float]] = {}
    for point in (one for one in points if one.counts):
        parts = [part for job in point.jobs if (part := shuffle_part(job)) is not None]
        found.setdefault(point.variant, []).extend(parts)
    found = {name: parts for name, parts in found.items() if len(parts) >= PARTS_MIN}
    words = "The fraction of a job's time in which it shuffles, for jobs of all sizes (paper 001, figure 1.1)."
    return [text(words), drawn(charts.cdf(found, "jobs", "fraction of the job that is shuffle"))] if found else []


def mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def of_shuffles(point: Point, quantity: str) -> float | None:
    """The mean of a quantity over all shuffles of a point's jobs."""
    return mean([getattr(one, quantity) for job in point.jobs for one in job.transfers if one.pattern == "shuffle"])


JOB_MEASURES = {
    "shuffle_seconds": Measure(
        "s",
        "shuffle",
        lambda p: max((one for job in p.jobs if (one := shuffle_seconds(job)) is not None), default=None),
    ),
    "job_seconds": Measure("s", "job", lambda p: p.seconds),
    "shuffle_part": Measure(
        "", "fraction of the job that is shuffle", lambda p: mean([shuffle_part(j) for j in p.jobs])
    ),
    "mean_job_seconds": Measure("s", "mean job", lambda p: mean([job.seconds for job in p.jobs])),
    "fairness": Measure("", "Jain's index of receivers", lambda p: of_shuffles(p, "fairness")),
    "flow_fairness": Measure("", "Jain's index of flows", lambda p: of_shuffles(p, "flow_fairness")),
    "share": Measure("", "first job's fraction of the bytes", lambda p: p.jobs[0].share if p.jobs else None),
    "first_shuffle_seconds": Measure(
        "s", "first job's shuffle", lambda p: shuffle_seconds(p.jobs[0]) if p.jobs else None
    ),
    "bytes": Measure("B", "bytes that tasks fetched", lambda p: sum(t.bytes for j in p.jobs for t in j.transfers)),
}


class ClusterSettings(Settings):
    """Base of workloads that run on a cluster of an engine."""

    worlds: ClassVar[tuple[str, ...]] = ("local", "lab", "cluster")
    unread: ClassVar[tuple[str, ...]] = (
        "stack.rto_min_socket",
        "expect.goodput_of_one_flow_min",
        "expect.goodput_of_ideal_min",
    )

    def site(self, whole: Scenario) -> Any:
        """The parts of the scenario that make a world; all else belongs to the jobs."""
        if whole.topology.events:
            return object()  # equal to no other: the effects of events on a network are not undone
        control = whole.control
        marks = control.transport == "dctcp" and whole.topology.port.ecn_threshold is None
        return whole.topology, whole.stack, control.policy, control.flows_per_host, control.encrypt is True, marks

    def opened(self, world: str, whole: Scenario, conditions: Conditions) -> AbstractContextManager[Measuring]:
        from mission_control.experiments.running import opened

        return opened(world, whole, conditions)

    def running(self, scenario: Scenario, site: Site, data: Path) -> Running:
        """The jobs of a point, ready to run.

        Args:
            scenario: of the point.
            data: folder for the jobs' input and output, shared by all workers.

        Raises:
            BadInput: the workload's input is malformed.
        """
        raise NotImplementedError

    def found(self, point: Any, running: Any, scenario: Scenario) -> None:
        """Add the measurements that only this workload has to its point.

        Args:
            point: of :attr:`point`'s type, complete but for these measurements.
            running: the result of :meth:`running`; some jobs may have failed.
        """


class JobSettings(ClusterSettings):
    """Base of workloads that are a few concurrent jobs."""

    measures: ClassVar[Mapping[str, Measure]] = JOB_MEASURES
    leaves_files: ClassVar[bool] = True
    reads_data: ClassVar[bool] = True

    jobs: Count = Field(1, description="Concurrent jobs, each with its own client and input")

    @classmethod
    def pieces(cls, points: Sequence[Any]) -> list[dict[str, Any]]:
        return shuffle_parts(points)

    def make(self, number: int, folder: Path, workers: int) -> Job:
        """Make a job.

        Args:
            number: of the job, from 0; each has another input.
            folder: for its data, shared by all workers.
            workers: of the cluster; each gets part of the work.
        """
        raise NotImplementedError

    def of_job(self, number: int) -> JobSettings:
        """The settings of one of the jobs."""
        return self

    def check(self, scenario: Scenario) -> None:
        if scenario.control.priorities and len(scenario.control.priorities) != self.jobs:
            raise ValueError(
                f"{len(scenario.control.priorities)} priorities for {self.jobs} jobs: give one for each job"
            )

    def running(self, scenario: Scenario, site: Site, data: Path) -> Running:
        from mission_control.experiments.jobs import Jobs

        return Jobs(scenario, site, data)


class SizedSettings(JobSettings):
    """Base of jobs whose input has a size in bytes."""

    files_per_byte: ClassVar[int] = 0
    """Bytes of files that a job writes to the data folder, per byte of its size."""

    size: Bytes = Field("1 GiB", validate_default=True, ge=100, description="Input per job")
    sizes: Annotated[tuple[Annotated[Bytes, Field(ge=100)], ...], BeforeValidator(several)] = Field(
        (), description="Input of each job, if jobs differ; replaces size"
    )

    def of_job(self, number: int) -> JobSettings:
        return self.model_copy(update={"size": self.sizes[number]}) if self.sizes else self

    def check_room(self, data: Path) -> None:
        needed = self.files_per_byte * (sum(self.sizes) or self.size * self.jobs)
        folder = next(own for own in (data, *data.parents) if own.exists())
        if folder == Path(folder.anchor):
            return  # of a cluster's hosts, not of this one
        free = shutil.disk_usage(folder).free
        if needed > free:
            flag = "--sizes" if self.sizes else "--size"
            files, room = _native.format_bytes(min(needed, BYTES_MAX)), _native.format_bytes(free)
            raise BadInput(
                f"{self.kind}: its files take {files}, and {folder} has {room} free: give a smaller {flag}, or a "
                "folder of another disk with --data"
            )

    def check(self, scenario: Scenario) -> None:
        super().check(scenario)
        if self.sizes and len(self.sizes) != self.jobs:
            raise ValueError(f"{len(self.sizes)} sizes for {self.jobs} jobs: give one for each job")


AutoCount = Annotated[int, Field(ge=1, le=1_000_000)] | Literal["auto"]
