"""k-means by Lloyd's iterations: a graph that grows until the centres converge.

The client checks each iteration and submits the next one. Or the reduce task does so, and delegates its own result to
the next reduce task (paper 001, 5.2.2).

The points lie where they were made, and are read there in every iteration. The centres are one object that every map
task fetches, a broadcast; the partial sums of all map tasks go to one reduce task, a gather, the incast pattern. Rules
of convergence are scikit-learn's (``KMeans``, algorithm ``lloyd``), so that its result from the same start is the same.
"""

from __future__ import annotations

import operator
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from uuid import uuid4

import numpy as np
from pydantic import Field

import mission_control
from mission_control.map_reduce import Output, items_of
from mission_control.map_reduce.phases import note_phases
from mission_control.workers import workers_of
from mission_control.workloads.settings import AutoCount, Count, JobSettings

if TYPE_CHECKING:
    from distributed import Client, Future

    from mission_control.scenario import Scenario

PARTITIONS = 8
"""Default number of map tasks, unless there are more workers."""
TOLERANCE = 1e-4
"""Tolerance, relative to the mean variance of the points: a smaller squared shift ends the iterations (scikit-learn's
default)."""
ITERATIONS_MAX = 300
"""scikit-learn's default."""
ROWS = 8192
"""Points whose distances to all centres are computed at once: they fit into a core's cache."""
COMPARED_MAX = 500_000
"""With more points the comparison with scikit-learn would take longer than the work."""
SAME = 1e-6
"""Largest difference of a coordinate from scikit-learn's: sums are formed in another order."""


PROGRESS = "mission-control-kmeans"
"""Topic to which reduce tasks that submit the next iteration publish their progress."""


class Move(NamedTuple):
    """How far the centres moved in an iteration."""

    shift: float
    """Sum of the squared distances by which the centres moved."""
    counted: int
    labels: tuple[int, ...]
    """A checksum of the labels of each partition: if none changed, the centres will not change either."""


class Step(NamedTuple):
    """A reduce task's report of its iteration."""

    centres: mission_control.Reference
    move: Move


class Plan(NamedTuple):
    """The constants of all iterations that tasks submit."""

    points: tuple[mission_control.Reference, ...]
    columns: int
    tolerance: float
    at_home: bool
    """Map tasks run where their points were made."""
    run: str
    """Distinguishes the progress of this job from another job's."""


class KMeansSettings(JobSettings):
    """k-means: find the centres of points by Lloyd's iterations."""

    kind: Literal["kmeans"] = "kmeans"
    points: Count = Field(2_000_000, description="Points per job")
    k: Count = Field(100, description="Clusters")
    dimensions: Count = Field(8, description="Coordinates per point")
    partitions: AutoCount = Field("auto", description="Map tasks per job. auto: one per worker, at least 8")
    points_on: Literal["all", "one"] = Field(
        "all",
        description="Workers that make the points. all: map tasks run where their points are; one: Dask places map "
        "tasks",
    )
    keep: bool = Field(False, description="Workers keep the points that they fetch for later iterations")
    driver: Literal["client", "tasks"] = Field(
        "client",
        description="Which process submits the next iteration. client: the client, after each result; tasks: the "
        "reduce task, which delegates to the next one",
    )
    engine: Literal["python", "java", "mapreduce"] = Field(
        "python",
        description="Implementation of the tasks. java: classes in one Java process per worker, without a driver; "
        "mapreduce: functions for the library mapreduce, with the client as driver",
    )

    def check(self, scenario: Scenario) -> None:
        super().check(scenario)
        if self.k > self.points:
            raise ValueError(f"{self.k} centres of {self.points} points: use at most as many centres")

    def make(self, number: int, folder: Path, workers: int) -> KMeans:
        return KMeans(self, number, folder, workers)


class KMeans:
    """One k-means job.

    Args:
        workload: of the scenario.
        number: of the job, from 0; each has other points.
    """

    def __init__(self, workload: KMeansSettings, number: int, folder: Path, workers: int = 1):
        self.points, self.k, self.dimensions = workload.points, workload.k, workload.dimensions
        self.partitions = max(PARTITIONS, workers) if workload.partitions == "auto" else workload.partitions
        self.seed = workload.seed * 1000 + number
        self.driver, self.keep, self.engine = workload.driver, workload.keep, workload.engine
        self.at_home = workload.points_on == "all"
        self.data: list[Future] = []
        self.start = np.empty(0)
        self.tolerance = 0.0
        self.moves: list[Move] = []
        self.result = np.empty(0)

    def prepare(self, client: Client, say: Callable[[str], None]) -> None:
        """The first points of the input are the first centres; with well mixed points that is as good as any."""
        say(f"makes {self.points} points of {self.dimensions} dimensions")
        sizes = np.diff(np.linspace(0, self.points, self.partitions + 1).astype(int)).tolist()
        shape = (self.seed, self.k, self.dimensions)
        make = partial(make_points, shape=shape, keep=self.keep)
        first = None if self.at_home else sorted(workers_of(client))[:1]
        self.data = client.map(make, sizes, range(len(sizes)), key="kmeans-make", pure=False, workers=first)
        moments = partial(moments_of, columns=self.dimensions)
        result = client.gather(client.map(moments, self.data, key="kmeans-moments", pure=False))
        mean = sum(entry[0] for entry in result) / self.points
        self.tolerance = float(np.mean(sum(entry[1] for entry in result) / self.points - mean**2)) * TOLERANCE
        head = partial(copy_of, columns=self.dimensions, rows=self.k)
        self.start = np.concatenate(client.gather(client.map(head, self.data, key="kmeans-head", pure=False)))[: self.k]

    def run(self, client: Client, say: Callable[[str], None]) -> None:
        if self.engine == "java":
            centres = self.in_java(client, say)
        elif self.engine == "mapreduce":
            centres = self.map_reduced(client, say)
        else:
            centres = (self.delegated if self.driver == "tasks" else self.driven)(client, say)
        result = client.submit(copy_of, centres, self.dimensions, key=f"kmeans-result-{uuid4().hex}", pure=False)
        self.result = result.result()

    def delegated(self, client: Client, say: Callable[[str], None]) -> Future:
        """The client submits one task."""
        run = uuid4().hex

        def hear(event: tuple[float, tuple[str, str]]) -> None:
            of, text = event[1]
            if of == run:
                say(text)

        client.subscribe_topic(PROGRESS, hear)
        try:
            given = (self.dimensions, self.tolerance, self.at_home, run)
            last = client.submit(begin, self.data, self.start, *given, key=f"kmeans-reduce-{run}", pure=False)
            self.moves = client.submit(moves_of, last, key=f"kmeans-moves-{uuid4().hex}", pure=False).result()
            return client.submit(centres_of, last, key=f"kmeans-next-{uuid4().hex}", pure=False)
        finally:
            client.unsubscribe_topic(PROGRESS)

    def in_java(self, client: Client, say: Callable[[str], None]) -> Future:
        """As :meth:`delegated`; all tasks are of Java."""
        say("iterates in Java")
        start = client.submit(put_rows, self.start, key=f"kmeans-start-{uuid4().hex}", pure=False)
        plan = {"columns": self.dimensions, "tolerance": self.tolerance}
        given = {"inputs": [start, *self.data], "arguments": plan, "key": f"kmeans-reduce-{uuid4().hex}"}
        last = client.submit(mission_control.java, "org.missioncontrol.workloads.KMeans$Begin", pure=False, **given)
        moves = client.submit(operator.itemgetter(0), last, key=f"kmeans-moves-{uuid4().hex}", pure=False).result()
        self.moves = [Move(own["shift"], own["counted"], tuple(own["labels"])) for own in moves]
        return client.submit(first_reference, last, key=f"kmeans-next-{uuid4().hex}", pure=False)

    def map_reduced(self, client: Client, say: Callable[[str], None]) -> Future:
        """As :meth:`driven`; each iteration is a job of the library."""
        columns = self.dimensions
        centres = client.submit(put_rows, self.start, key=f"kmeans-start-{uuid4().hex}", pure=False)
        while True:
            inputs = [(points, centres) for points in self.data]
            sums = partial(partial_sums, columns=columns)
            made = mission_control.mapreduce(inputs, map=sums, reduce=moved, reducers=1, client=client, name="kmeans")
            step = client.submit(step_of, made[0], key=f"kmeans-step-{uuid4().hex}", pure=False)
            self.moves.append(step.result().move)
            centres = client.submit(centres_of, step, key=f"kmeans-next-{uuid4().hex}", pure=False)
            say(progress(self.moves, self.tolerance))
            if len(self.moves) == ITERATIONS_MAX or standing(self.moves, self.tolerance):
                return centres

    def driven(self, client: Client, say: Callable[[str], None]) -> Future:
        """The client submits each iteration."""
        columns = self.dimensions
        homes = client.who_has(self.data) if self.at_home else {}
        centres = client.submit(put_rows, self.start, key=f"kmeans-start-{uuid4().hex}", pure=False)
        while True:
            run = uuid4().hex  # keys of two iterations, or of two jobs, must not meet
            parts = []
            for number, points in enumerate(self.data):
                key = (f"kmeans-map-{run}", number)
                where = homes[points.key] if self.at_home else None
                parts.append(client.submit(assign, points, centres, columns, key=key, pure=False, **placed(where)))
            step = client.submit(update, parts, centres, columns, key=f"kmeans-reduce-{run}", pure=False)
            self.moves.append(step.result().move)
            centres = client.submit(centres_of, step, key=f"kmeans-next-{run}", pure=False)
            say(progress(self.moves, self.tolerance))
            if len(self.moves) == ITERATIONS_MAX or standing(self.moves, self.tolerance):
                return centres

    def check(self, client: Client, say: Callable[[str], None]) -> dict[str, bool]:
        checks = {
            "converged": standing(self.moves, self.tolerance),
            "every point counted in every iteration": all(move.counted == self.points for move in self.moves),
        }
        if self.points <= COMPARED_MAX and (theirs := self.scikit_learn(client, say)) is not None:
            # If several centres lose all their points, it does not matter which of them moves to which far point.
            nearest = ((self.result[:, None] - theirs[None]) ** 2).sum(axis=2).argmin(axis=1)
            same = len(set(nearest)) == self.k and np.abs(self.result - theirs[nearest]).max() <= SAME
            checks[f"centres equal scikit-learn's within {SAME:g}"] = bool(same)
        self.data = []
        return checks

    def scikit_learn(self, client: Client, say: Callable[[str], None]) -> np.ndarray | None:
        """scikit-learn's centres from the same start; ``None`` if it is not installed."""
        try:
            from sklearn.cluster import KMeans as Reference
        except ImportError:
            return None
        say("compares with scikit-learn")
        everything = partial(copy_of, columns=self.dimensions)
        points = np.concatenate(client.gather(client.map(everything, self.data, key="kmeans-all", pure=False)))
        model = Reference(self.k, init=self.start, n_init=1, max_iter=ITERATIONS_MAX, tol=TOLERANCE, algorithm="lloyd")
        return model.fit(points).cluster_centers_


def standing(moves: list[Move], tolerance: float) -> bool:
    """Whether the iterations have converged."""
    if len(moves) > 1 and moves[-1].labels == moves[-2].labels:
        return True
    return moves[-1].shift <= tolerance


def progress(moves: list[Move], tolerance: float) -> str:
    return f"iteration {len(moves)}: squared shift {moves[-1].shift:.3g}, done below {tolerance:.3g}"


def placed(workers: Iterable[str] | None) -> dict[str, Any]:
    """The worker on which a map task runs: its points are the same in every iteration."""
    return {} if workers is None else {"workers": list(workers), "allow_other_workers": True}


def make_points(count: int, number: int, shape: tuple[int, int, int], keep: bool = False) -> mission_control.Reference:
    """Generate points around k places, the same places in every partition; put them as an object of one part."""
    seed, k, dimensions = shape
    places = np.random.default_rng(seed).uniform(-10, 10, (k, dimensions))
    random = np.random.default_rng([seed, number])
    points = places[random.integers(0, k, count)] + random.normal(0, 1, (count, dimensions))
    return put_rows(points, keep)


def put_rows(rows: np.ndarray, keep: bool = False) -> mission_control.Reference:
    return mission_control.put([np.ascontiguousarray(rows, np.float64).data], keep=keep)


def rows_of(reference: mission_control.Reference, columns: int) -> np.ndarray:
    """View a fetched object as rows of numbers, without a copy."""
    return np.frombuffer(memoryview(mission_control.fetch(reference)[0]), np.float64).reshape(-1, columns)


def copy_of(reference: mission_control.Reference, columns: int, rows: int | None = None) -> np.ndarray:
    """Copy the first rows of an object, or all, for a result that Dask carries."""
    return rows_of(reference, columns)[:rows].copy()


def centres_of(step: Step | Outcome) -> mission_control.Reference:
    """Keep only what the next iteration needs."""
    return step.centres


def first_reference(outcome: tuple[Any, list[mission_control.Reference]]) -> mission_control.Reference:
    return outcome[1][0]


def moves_of(outcome: Outcome) -> list[Move]:
    return outcome.moves


def moments_of(reference: mission_control.Reference, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums, and sums of squares, of each coordinate."""
    rows = rows_of(reference, columns)
    return rows.sum(axis=0), (rows**2).sum(axis=0)


class Sums(NamedTuple):
    """The result of a map task."""

    sums: mission_control.Reference
    """An object of two parts: for each centre the sum of its points, and their number in the last column; and points
    that are far from their centres: squared distance, centre, coordinates."""
    labels: int


class Partial(NamedTuple):
    """Partial sums of some points."""

    sums: np.ndarray
    """For each centre the sum of its points, and their number in the last column."""
    far: np.ndarray
    """Points that are far from their centres: squared distance, centre, coordinates."""
    labels: int


def nearest(rows: np.ndarray, middle: np.ndarray) -> Partial:
    """Find the nearest centre of each point, and the sums that the reduce task needs."""
    columns = rows.shape[1]
    squares = (middle**2).sum(axis=1)
    labels = np.empty(len(rows), np.int32)
    for first in range(0, len(rows), ROWS):
        block = rows[first : first + ROWS]
        # The squared distance without the point's square, which is the same for all centres.
        labels[first : first + ROWS] = (squares - 2 * block @ middle.T).argmin(axis=1)
    sums = np.empty((len(middle), columns + 1))
    for column in range(columns):
        sums[:, column] = np.bincount(labels, rows[:, column], len(middle))
    sums[:, columns] = np.bincount(labels, minlength=len(middle))
    # A centre that has no points anywhere has none in this block.
    empty = int((sums[:, columns] == 0).sum())
    far = np.empty((0, columns + 2))
    if empty:
        distances = ((rows - middle[labels]) ** 2).sum(axis=1)
        farthest = distances.argsort()[-empty:]
        far = np.column_stack([distances[farthest], labels[farthest], rows[farthest]]).copy()
    return Partial(sums, far, zlib.crc32(labels.tobytes()))


def moved_from(old: np.ndarray, parts: list[Partial]) -> tuple[np.ndarray, Move]:
    """Compute the new centres. A centre without points moves to the point that is farthest from its centre, which loses
    that point (as in scikit-learn)."""
    columns = old.shape[1]
    total = np.sum([own.sums for own in parts], axis=0)
    far = np.concatenate([own.far for own in parts])
    empty = np.flatnonzero(total[:, columns] == 0)
    for centre, point in zip(empty, far[far[:, 0].argsort()[::-1]], strict=False):
        if point[0] > 0:
            total[int(point[1])] -= (*point[2:], 1)
            total[centre] = (*point[2:], 1)
    counts = total[:, columns:]
    new = np.where(counts > 0, total[:, :columns] / np.maximum(counts, 1), old)
    shift = float(((new - old) ** 2).sum())
    return new, Move(shift, int(counts.sum()), tuple(own.labels for own in parts))


def assign(points: mission_control.Reference, centres: mission_control.Reference, columns: int) -> Sums:
    """A map task."""
    began = time.monotonic()
    known = nearest(rows_of(points, columns), rows_of(centres, columns))
    sums = Sums(mission_control.put([known.sums.data, known.far.data]), known.labels)
    note_phases(map_s=time.monotonic() - began)
    return sums


def update(parts: list[Sums], before: mission_control.Reference, columns: int) -> Step:
    """A reduce task."""
    began = time.monotonic()
    fetched = [
        np.frombuffer(memoryview(entry), np.float64) for entry in mission_control.fetch([entry.sums for entry in parts])
    ]
    sums = (entry.reshape(-1, columns + 1) for entry in fetched[::2])
    far = (entry.reshape(-1, columns + 2) for entry in fetched[1::2])
    known = [Partial(*each) for each in zip(sums, far, (part.labels for part in parts), strict=True)]
    shuffled = time.monotonic()
    centres, move = moved_from(rows_of(before, columns), known)
    step = Step(put_rows(centres), move)
    note_phases(shuffle_s=shuffled - began, reduce_s=time.monotonic() - shuffled)
    return step


# --- on the library ---------------------------------------------------------------------------------------------------


def partial_sums(
    given: tuple[mission_control.Reference, mission_control.Reference], columns: int
) -> Iterator[tuple[int, tuple[np.ndarray, Partial]]]:
    """The map function: one key, for one reduce task; the centres travel with it."""
    points, centres = given
    middle = rows_of(centres, columns)
    yield 0, (middle, nearest(rows_of(points, columns), middle))


def moved(key: int, values: Iterable[tuple[np.ndarray, Partial]]) -> Iterator[tuple[np.ndarray, Move]]:
    """The reduce function."""
    (old, *_), parts = zip(*values, strict=True)
    # Sums are formed in the same order in all iterations, whatever the order of the values.
    yield moved_from(old, sorted(parts, key=operator.attrgetter("labels")))


def step_of(output: Output) -> Step:
    assert isinstance(output.value, mission_control.Reference)
    ((centres, move),) = items_of(output.value)
    return Step(put_rows(centres), move)


# --- without a client -----------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The last reduce task's report of all iterations."""

    centres: mission_control.Reference
    moves: list[Move]


def begin(
    points: list[mission_control.Reference], start: np.ndarray, columns: int, tolerance: float, at_home: bool, run: str
) -> mission_control.Delegation:
    return iterate(Plan(tuple(points), columns, tolerance, at_home, run), put_rows(start), [])


def iterate(plan: Plan, centres: mission_control.Reference, moves: list[Move]) -> mission_control.Delegation:
    """Submit the map tasks of an iteration, and delegate to its reduce task."""
    from distributed import get_client

    client, run = get_client(), uuid4().hex
    parts = []
    for number, points in enumerate(plan.points):
        key = (f"kmeans-map-{run}", number)
        where = placed([points.worker] if plan.at_home else None)
        parts.append(client.submit(assign, points, centres, plan.columns, key=key, pure=False, **where))
    return mission_control.delegate(reduce, plan, centres, parts, moves)


def reduce(
    plan: Plan, centres: mission_control.Reference, parts: list[Sums], moves: list[Move]
) -> Outcome | mission_control.Delegation:
    """Compute the new centres; delegate to the next iteration's reduce task, if there is one."""
    from distributed import get_worker

    step = update(parts, centres, plan.columns)
    moves = [*moves, step.move]
    get_worker().log_event(PROGRESS, (plan.run, progress(moves, plan.tolerance)))
    if len(moves) == ITERATIONS_MAX or standing(moves, plan.tolerance):
        return Outcome(step.centres, moves)
    return iterate(plan, step.centres, moves)
