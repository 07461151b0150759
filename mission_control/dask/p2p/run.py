"""One run of a shuffle on one worker, whatever it moves."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext, suppress
from dataclasses import fields
from itertools import count as counting
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from dask.context import thread_state
from dask.utils import key_split
from distributed import Reschedule
from distributed.shuffle._exceptions import P2PConsistencyError, P2POutOfDiskError, ShuffleClosedError
from distributed.utils import sync
from distributed.utils_comm import retry

from mission_control import _native
from mission_control.dask.p2p.inputs import (
    Added,
    Index,
    Inputs,
    Line,
    Place,
    Put,
    SchemaAt,
    index_of,
    numbered,
    read_index,
)
from mission_control.objects import data_plane

if TYPE_CHECKING:
    from distributed.shuffle._core import ShuffleSpec
    from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin

    from mission_control.dask.worker import MissionControlWorker

COHORTS = 8
"""Number of cohorts of outputs: the parts of a cohort are freed once all its outputs are done."""
OBJECT_BYTES = 4 << 20
"""Smallest separate object of an input partition for one cohort. Each object costs a lookup, a description and a free:
1 MiB took 6 % more CPU time (2026-11-25, 1 GiB of numeric columns)."""
NEVER = range(-1, 0)
"""Cohorts of an object that is only freed when the run ends."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RESTART_WITHIN_S = 30.0
"""If an input is lost with its worker, the scheduler restarts the shuffle, at once if the worker's connection broke.
After this time without a restart the task fails with the cause."""
SILENT_WITHIN_S = 300.0
"""How long fetches from an unreachable worker are repeated: then Dask considers it lost
(``distributed.scheduler.worker-ttl``)."""
TELL_TIMES, TELL_PAUSE_S, TELL_PAUSE_MAX_S = 10, 0.1, 5.0
"""How often the barrier tries to reach a worker, and its pauses."""


class Incomplete(P2PConsistencyError):
    """A shuffle would produce other data than its input, or its data cannot be fetched.

    Dask passes errors of this class to the program unchanged. A client without Mission Control can read them, too:
    there they have Dask's class.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return P2PConsistencyError, self.args


class Room(NamedTuple):
    """Memory for some parts of an input partition."""

    cohorts: range
    parts: slice
    segment: _native.Segment


Spec = TypeVar("Spec")


def with_job(carried: Callable[..., Spec], spec: ShuffleSpec, job: str, demands: str, **more: Any) -> Spec:
    """Convert Dask's description of a shuffle to one that the data plane carries for a job; `demands` is JSON."""
    given = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return carried(**given, job=job, demands=demands, **more)


class Moved(int):
    """The result of adding a partition: the number of the run, as in Dask's runs, and who has what was put."""

    partition: Any
    worker: str
    """Address of the worker that added it."""
    number: int
    """Its number among the partitions that this worker has added."""
    rows: int
    unwanted: int
    """Rows for outputs that nobody wants."""

    def __new__(cls, run_id: int, partition: Any, worker: str, number: int, rows: int, unwanted: int) -> Moved:
        moved = super().__new__(cls, run_id)
        moved.partition, moved.worker, moved.number = partition, worker, number
        moved.rows, moved.unwanted = rows, unwanted
        return moved

    def __reduce__(self) -> tuple[Any, ...]:
        return Moved, (int(self), self.partition, self.worker, self.number, self.rows, self.unwanted)


class Piece(NamedTuple):
    """A part that an output takes."""

    partition: Any
    """The input partition that it comes from."""
    schema: Any
    rows: int
    data: Any
    """A read-only buffer."""


class Run(ABC):
    """Base of runs, with the methods of a run that Dask's worker plug-in calls."""

    def __init__(
        self,
        spec: ShuffleSpec,
        job: str,
        demands: str,
        run_id: int,
        worker_for: dict[Any, str],
        plugin: ShuffleWorkerPlugin,
    ):
        self.id = spec.id
        self.job = job
        self.demands = demands
        self.run_id = run_id
        self.worker_for = worker_for
        self.worker = plugin.worker
        self.outputs = numbered(worker_for)
        """The number of each wanted output partition. Those that workers join first have the lowest numbers."""
        self.outputs_of: defaultdict[str, list[int]] = defaultdict(list)
        """Numbers of the output partitions of each worker."""
        for partition, number in self.outputs.items():
            self.outputs_of[worker_for[partition]].append(number)
        count = min(COHORTS, max(map(len, self.outputs_of.values()), default=1))
        self.cohorts = [len(self.outputs) * (at + 1) // count for at in range(count)]
        """For each cohort, the first output after it. Parts are freed once all of their cohort are taken."""
        self.taken: set[int] = set()
        """Cohorts whose outputs are all done."""
        self.objects: dict[str, range] = {}
        """Objects that were put here, with the cohorts whose outputs take from each."""
        self.described: dict[bytes, tuple[str, int]] = {}
        """Schemas that were put here, by checksum: the object and its bytes."""
        self.joined: set[int] = set()
        """Outputs that were joined here."""
        self.schemas: dict[bytes, Any] = {}
        """By checksum."""
        self.added: dict[int, Added] = {}
        """The partitions that were added here, until their index is made."""
        self.numbers = counting()
        self.index: tuple[list[int], Index] | None = None
        """The index of the partitions of these numbers."""
        self.indexing = threading.Lock()
        self.places: list[Place] | None = None
        """Where the lines of the outputs of this worker are."""
        self.inputs: Future[list[Inputs]] | None = None
        """These lines, once a task fetches them."""
        self.reading = threading.Lock()
        self.transferred = False
        self.fetching = 0
        """Number of tasks that fetch."""
        self.closed = False
        self.closed_event = asyncio.Event()
        self.started_at = time.time()
        # Dask's plug-in reads it.
        self._exception: Exception | None = None
        if (own := self.worker.plugins.get("mission-control")) is not None:
            own.shuffles[self.id, run_id] = self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of shuffle {self.id}, run {self.run_id}, on {self.worker.address}>"

    def raise_if_closed(self) -> None:
        if self.closed:
            # Do not raise the exception: a task of the next run may receive it, and should run again instead of
            # failing.
            raise ShuffleClosedError(f"{self} is closed: {self._exception or 'it is over'}")

    # --- what each kind of shuffle does -----------------------------------------------------------------------------

    @abstractmethod
    def put(self, data: Any, partition: Any) -> Added:
        """Put an input partition: write it to memory from :meth:`rooms`, and :meth:`keep` it."""

    @abstractmethod
    def join(self, partition: Any, pieces: list[Piece], endpoint: _native.Endpoint) -> tuple[Any, int]:
        """Make an output partition; return it and its number of rows or items."""

    @abstractmethod
    def read_schema(self, described: Any) -> Any:
        """Parse the schema, the last part of an object."""

    # --- in a task's thread -----------------------------------------------------------------------------------------

    def add_partition(self, data: Any, partition_id: Any) -> int:
        """Put a partition, with a part for each output that takes from it.

        Raises:
            Incomplete: Some of it has no output.
            P2POutOfDiskError: The disk of the spool is full.
        """
        self.raise_if_closed()
        if self.transferred:
            raise RuntimeError(f"{self} has all its input partitions already")
        try:
            plane()
        except RuntimeError as error:
            self.leave_to_dask(error)
        try:
            added = self.put(data, partition_id)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise P2POutOfDiskError() from error
            raise
        finally:
            if self.closed:
                # The thread that closed the run may not have seen these objects.
                self.free(self.objects.copy())
        self.raise_if_closed()
        number = next(self.numbers)
        self.added[number] = added
        rows = sum(int(put.rows.sum()) for put in added.puts)
        return Moved(self.run_id, partition_id, self.worker.address, number, rows, added.unwanted)

    def make_index(self, numbers: list[int]) -> Index | None:
        """Put an object with a part for each worker that joins outputs: the lines that it takes from these partitions.

        Returns:
            ``None``: one of the partitions is not here.
        """
        with self.indexing:
            self.raise_if_closed()
            if self.index is None:
                endpoint, here = self.endpoint(), dict(self.added)
                if endpoint is None or not here.keys() >= set(numbers):
                    return None
                added = [here[number] for number in numbers]
                parts = index_of(added, list(self.outputs_of.values()))
                try:
                    name, _ = endpoint.put(parts, self.job, self.demands)
                except RuntimeError as error:
                    self.raise_if_closed()
                    raise OSError(f"the data plane of {self.worker.address} closes: {error}") from error
                except OSError as error:
                    if error.errno in NO_ROOM:
                        raise P2POutOfDiskError() from error
                    raise
                self.objects[name] = NEVER
                if self.closed:
                    self.free([name])
                stage = added[0].stage if added else ""
                self.index = numbers, Index(stage, name, endpoint.address, [len(part) for part in parts])
                # What others fetch is accounted, and can be written to disk.
                self.added.clear()
            made_of, index = self.index
            return index if made_of == numbers else None

    def leave_to_dask(self, error: RuntimeError) -> None:
        """Request a restart of the shuffle: this worker joined later, and has no data plane.

        Raises:
            ShuffleClosedError: The task runs again.
            RuntimeError: The given error, if this worker has a data plane.
        """
        plugin = self.worker.plugins.get("mission-control")
        if plugin is not None and plugin.endpoint is not None:
            raise error

        async def restart() -> None:
            # Otherwise the scheduler would choose the data plane again.
            await self.worker.scheduler.mission_control_without(worker=self.worker.address, why=str(error))
            await self.restart()

        # Another task may have requested the restart.
        with suppress(ValueError, KeyError):
            sync(self.worker.loop, restart)
        raise ShuffleClosedError(f"{self} starts again, carried by Dask: {self.worker.address} has no data plane")

    def rooms(self, outputs: np.ndarray, sizes: np.ndarray) -> list[Room]:
        """Allocate memory for the parts of an input partition: separate memory for parts that are freed separately.

        Args:
            outputs: The output of each part; ascending.
            sizes: Bytes of each part.
        """
        _, endpoint = plane()
        every = len(self.cohorts)
        count = min(max(int(sizes.sum()) // OBJECT_BYTES, 1), every)
        edges = [at * every // count for at in range(count + 1)]
        made = []
        for first, last in pairwise(edges):
            begin, end = np.searchsorted(outputs, [self.cohorts[first - 1] if first else 0, self.cohorts[last - 1]])
            if begin < end:
                size = int(sizes[begin:end].sum())
                segment = endpoint.allocate(size, (self.job, self.demands), first * COHORTS // every)
                made.append(Room(range(first, last), slice(int(begin), int(end)), segment))
        return made

    def keep(
        self,
        partition: Any,
        rooms: Sequence[Room],
        schema: bytes,
        outputs: np.ndarray,
        sizes: np.ndarray,
        rows: np.ndarray,
        unwanted: int = 0,
    ) -> Added:
        """Make objects of written memory. Others can map it once the caller has dropped its references."""
        _, endpoint = plane()
        puts = []
        for cohorts, parts, segment in rooms:
            name = endpoint.adopt(segment, sizes[parts].tolist(), self.demands)
            self.objects[name] = cohorts
            own = outputs[parts].astype(np.uint32), sizes[parts].astype(np.uint64), rows[parts].astype(np.uint64)
            puts.append(Put(name, *own))
        checksum = hashlib.blake2b(schema, digest_size=16).digest()
        if (schema_at := self.described.get(checksum)) is None:
            # All inputs of this worker share this object until the run ends.
            name, _ = endpoint.put([schema], self.job, self.demands)
            self.objects[name] = NEVER
            schema_at = self.described[checksum] = (name, len(schema))
        stage = key_split(thread_state.key)
        return Added(partition, stage, endpoint.address, puts, checksum, schema_at, unwanted)

    def get_output_partition(self, partition_id: Any, key: Any, **_: Any) -> Any:
        """Fetch and join the parts of an output partition, and check that it is complete.

        Raises:
            Incomplete: Parts are missing.
            distributed.Reschedule: The partition belongs to another worker; or an input is gone, or was freed since the
                partition was joined before: the shuffle restarts.
        """
        self.raise_if_closed()
        sync(self.worker.loop, self.ensure_output_worker, partition_id, key)
        if self.places is None or not self.transferred:
            raise RuntimeError(f"output partition {partition_id} of {self} was asked for before the barrier")
        stage, receiver, number = key_split(key), str(key), self.outputs[partition_id]
        lines = self.lines(number, stage, receiver)
        wanted = [(line.object, line.part, line.size, [line.address]) for line in lines]
        schemas = {own.checksum: self.schema(own, stage, receiver) for own in {line.schema for line in lines}}
        source = self.places[0].stage if self.places else ""
        parts = self.fetch(source, wanted, stage, receiver, output=number)
        pieces = [
            Piece(line.partition, schemas[line.schema.checksum], line.rows, data)
            for line, data in zip(lines, parts, strict=True)
        ]
        del parts
        plugin, endpoint = plane()
        output, rows = self.join(partition_id, pieces, endpoint)
        expected = sum(piece.rows for piece in pieces)
        if rows != expected:
            raise Incomplete(
                f"shuffle {self.id}: output partition {partition_id} has {rows} rows, but {expected} went in"
            )
        self.joined.add(number)
        # A task of a merge joins outputs of two shuffles.
        plugin.outputs.setdefault(key, {})[self.id] = {"run": self.run_id, "output": number, "rows": rows}
        plugin.watch_tasks()
        return output

    def fetch(
        self,
        source: str,
        wanted: list[tuple[str, int, int, list[str]]],
        stage: str,
        receiver: str,
        output: int | None = None,
    ) -> list[Any]:
        """Fetch parts: object, number, bytes and addresses of each, for `output`.

        Raises:
            ShuffleClosedError, distributed.Reschedule: The shuffle restarts.
            Incomplete: It does not restart, and the parts cannot be fetched.
        """
        deadline = time.monotonic() + SILENT_WITHIN_S
        while True:
            try:
                return self.fetch_once(source, wanted, stage, receiver)
            except _native.TransferError as error:
                self.raise_if_closed()
                if isinstance(error, _native.Unreachable) and time.monotonic() < deadline:
                    # The worker may only be paused.
                    continue
                if output in self.joined:
                    # Another task took them, or an earlier run of this one, whose result is needed again.
                    with suppress(ValueError, KeyError):
                        sync(self.worker.loop, self.restart)
                self.wait_for_restart(error)
                raise Incomplete(f"shuffle {self.id}: data of an input cannot be fetched: {error}") from error

    def fetch_once(
        self, source: str, wanted: list[tuple[str, int, int, list[str]]], stage: str, receiver: str
    ) -> list[Any]:
        plugin, endpoint = plane()
        asks = (receiver, len(self.outputs))
        self.fetching += 1
        try:
            # Closing the run checks the number of tasks afterwards.
            self.raise_if_closed()
            with plugin.turns.thread_released() if plugin.turns is not None else nullcontext():
                fetched, _, _ = endpoint.fetch(self.job, source, stage, self.demands, wanted, False, False, *asks)
        finally:
            self.fetching -= 1
        return fetched

    def lines(self, output: int, stage: str, receiver: str) -> list[Line]:
        """Return the lines of an output, in the order of the input partitions. The first task here fetches those of all
        outputs of this worker; others wait, and share its error."""
        with self.reading:
            self.raise_if_closed()
            is_first = self.inputs is None
            inputs = self.inputs = self.inputs or Future()
        if is_first:
            try:
                inputs.set_result(self.read_indexes(stage, receiver))
            except BaseException as error:
                with self.reading:
                    self.inputs = None
                inputs.set_exception(error)
                raise
        elif not inputs.done():
            plugin, _ = plane()
            # Whoever fetches them needs a turn to go on.
            with plugin.turns.thread_released() if plugin.turns is not None else nullcontext():
                wait([inputs])
        return sorted((line for own in inputs.result() for line in own.lines(output)), key=attrgetter("partition"))

    def read_indexes(self, stage: str, receiver: str) -> list[Inputs]:
        places = self.places or []
        wanted = [(place.object, place.part, place.size, [place.address]) for place in places]
        source = f"{places[0].stage} index" if places else ""
        return [read_index(part) for part in self.fetch(source, wanted, stage, receiver)]

    def schema(self, schema: SchemaAt, stage: str, receiver: str) -> Any:
        """Fetch a schema, once for each worker; most inputs have the same one."""
        if schema.checksum not in self.schemas:
            source = f"{self.places[0].stage} schema" if self.places else ""
            wanted = [(schema.object, 0, schema.size, [schema.address])]
            (described,) = self.fetch(source, wanted, stage, receiver)
            self.schemas.setdefault(schema.checksum, self.read_schema(described))
        return self.schemas[schema.checksum]

    def wait_for_restart(self, error: Exception) -> None:
        """Wait for the restart: the scheduler closes the run if one of its workers is gone."""

        async def closed() -> None:
            await asyncio.wait_for(self.closed_event.wait(), RESTART_WITHIN_S)

        try:
            sync(self.worker.loop, closed)
        except TimeoutError:
            return
        raise Reschedule() from error

    # --- in the event loop ------------------------------------------------------------------------------------------

    async def barrier(self, run_ids: Sequence[int]) -> int:
        """Run the barrier, when all partitions were added: tell each worker where the parts of its outputs are listed,
        then notify the scheduler.

        Raises:
            distributed.Reschedule: The run is closed, and the shuffle restarts.
        """
        try:
            return await self._barrier(run_ids)
        except ShuffleClosedError as error:
            # Dask would treat it as an error of the shuffle here.
            raise Reschedule() from error

    async def _barrier(self, run_ids: Sequence[int]) -> int:
        self.raise_if_closed()
        moved = [own for own in run_ids if isinstance(own, Moved) and own == self.run_id]
        consistent = len(moved) == len(run_ids)
        if consistent:
            cohorts = np.diff([0, *self.cohorts]).tolist()
            # A worker that joined later may run the barrier, and have no data plane.
            if (plugin := self.worker.plugins.get("mission-control")) is not None:
                rows, unwanted = sum(own.rows for own in moved), sum(own.unwanted for own in moved)
                self.say(plugin, "shuffle-in", rows=rows, unwanted=unwanted, cohorts=cohorts)
            added: defaultdict[str, list[Moved]] = defaultdict(list)
            for own in moved:
                added[own.worker].append(own)
            try:
                made = await asyncio.gather(*(self.ask_for_index(worker, own) for worker, own in added.items()))
                indexes = [index for index in made if index is not None]
                consistent = len(indexes) == len(made)
                if consistent:
                    await asyncio.gather(
                        *(
                            self.tell(worker, [index.place(part) for index in indexes if index.sizes[part]])
                            for part, worker in enumerate(self.outputs_of)
                        )
                    )
            except P2POutOfDiskError:
                raise
            except OSError:
                # A worker is gone, so the scheduler closes this run and begins another.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.closed_event.wait(), RESTART_WITHIN_S)
                self.raise_if_closed()
                raise
        self.raise_if_closed()
        await self.worker.scheduler.shuffle_barrier(id=self.id, run_id=self.run_id, consistent=consistent)
        return self.run_id

    async def ask_for_index(self, worker: str, added: list[Moved]) -> Index | None:
        """Have a worker make the index of the partitions that it added."""
        numbers = [own.number for own in sorted(added, key=attrgetter("partition"))]

        async def once() -> Any:
            self.raise_if_closed()
            other = self.worker.rpc(worker)
            return await other.mission_control_shuffle_index(shuffle_id=self.id, run_id=self.run_id, numbers=numbers)

        async def once_with_room() -> Any:
            try:
                return await once()
            except P2POutOfDiskError as error:
                return error  # another try would find no more room

        answer = await retry(
            once_with_room, TELL_TIMES, TELL_PAUSE_S, TELL_PAUSE_MAX_S, operation=f"{self}: index of {worker}"
        )
        if isinstance(answer, P2POutOfDiskError):
            raise answer
        if isinstance(answer, dict):
            raise ShuffleClosedError(answer["closed"])
        return Index(*answer) if answer is not None else None

    async def tell(self, worker: str, places: list[Place]) -> None:
        async def once() -> None:
            self.raise_if_closed()
            other = self.worker.rpc(worker)
            took = await other.mission_control_shuffle_inputs(
                shuffle_id=self.id, run_id=self.run_id, places=[tuple(place) for place in places]
            )
            if not took:
                raise OSError(f"{worker} is leaving")

        await retry(once, TELL_TIMES, TELL_PAUSE_S, TELL_PAUSE_MAX_S, operation=f"{self}: tell {worker}")

    async def restart(self) -> None:
        """Request another run from the scheduler."""
        await self.worker.scheduler.shuffle_barrier(id=self.id, run_id=self.run_id, consistent=False)

    async def take(self, cohort: int) -> None:
        """Free the objects of a cohort whose outputs are all done. Current readers keep their memory."""
        self.taken.add(cohort)
        gone = [name for name, cohorts in self.objects.copy().items() if self.taken.issuperset(cohorts)]
        # In a thread, because the kernel needs time to free large objects. A closed data plane has freed them.
        with suppress(RuntimeError):
            await asyncio.to_thread(self.free, gone)

    async def inputs_done(self) -> None:
        self.raise_if_closed()
        if self.places is None and self.worker.address in self.outputs_of:
            raise P2PConsistencyError(f"{self} did not receive its inputs")
        self.transferred = True

    async def ensure_output_worker(self, partition: Any, key: Any) -> None:
        """Request that the scheduler runs a task on the worker of its output partition."""
        worker = self.worker_for[partition]
        if worker == self.worker.address:
            return
        answer = await self.worker.scheduler.shuffle_restrict_task(
            id=self.id, run_id=self.run_id, key=key, worker=worker
        )
        if answer["status"] == "error":
            raise RuntimeError(answer["message"])
        raise Reschedule()

    async def receive(self, data: Any) -> Any:
        raise RuntimeError(f"{self} was pushed data: its peers run another version of Mission Control")

    def heartbeat(self) -> dict[str, Any]:
        """Metrics of a run for Dask's dashboard, which counts pushed data; here nothing is pushed."""
        counts = ("memory", "total", "buckets", "written", "read", "avg_size", "avg_duration", "memory_limit")
        nothing = dict.fromkeys(counts, 0)
        return {"disk": nothing, "comm": nothing, "start": self.started_at}

    def fail(self, exception: Exception) -> None:
        if not self.closed:
            self._exception = exception

    async def close(self) -> None:
        if self.closed:
            await self.closed_event.wait()
            return
        self.closed = True
        self.closed_event.set()
        # In a thread, because the kernel needs time to free many objects.
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Free what was put here, and end fetches, because no message will report the loss of their objects."""
        self.added.clear()
        self.free(self.objects.copy())
        endpoint = self.endpoint()
        with self.reading:
            # They lie in memory of the data plane.
            inputs, self.inputs = self.inputs, None
        if self.fetching and endpoint is not None:
            names = {place.object for place in self.places or ()}
            for own in inputs.result() if inputs is not None and inputs.done() and not inputs.exception() else ():
                names.update(name for _, name, _, _ in own.puts)
                names.update(schema.object for schema in own.schemas)
            endpoint.lost(list(names), f"shuffle {self.id} was closed")

    def free(self, names: Iterable[str]) -> None:
        """Free objects that were put here. Several threads may call this."""
        endpoint = self.endpoint()
        for name in names:
            if self.objects.pop(name, None) is not None and endpoint is not None:
                endpoint.free(name)

    def endpoint(self) -> _native.Endpoint | None:
        plugin = self.worker.plugins.get("mission-control")
        return plugin.endpoint if plugin is not None else None

    def say(self, plugin: MissionControlWorker, kind: str, **said: Any) -> None:
        self.worker.loop.add_callback(lambda: plugin.say(kind, shuffle=self.id, run=self.run_id, **said))


def plane() -> tuple[MissionControlWorker, _native.Endpoint]:
    """Return the plug-in and the data plane of the worker whose task this thread runs."""
    _, plugin, endpoint = data_plane("shuffle")
    return plugin, endpoint


async def give_index(
    shuffles: ShuffleWorkerPlugin | None, shuffle_id: Any, run_id: int, numbers: list[int]
) -> Index | dict[str, str] | None:
    """Handle :meth:`Run.ask_for_index` on a worker; it may arrive more than once.

    Returns:
        ``None``: the shuffle has to restart. A dictionary: why the run here is ``closed``.
    """
    if shuffles is None:
        raise OSError("this worker is leaving")
    run: Any = await shuffles._get_shuffle_run(shuffle_id, run_id)
    try:
        # In a thread, because it sorts a line for each part.
        return await asyncio.to_thread(run.make_index, list(numbers))
    except ShuffleClosedError as error:
        return {"closed": str(error)}  # Dask's server would log it as an error


async def take_inputs(shuffles: ShuffleWorkerPlugin | None, shuffle_id: Any, run_id: int, places: Any) -> bool:
    """Handle the message of :meth:`Run.tell` on a worker; it may arrive more than once. Return false if the worker
    leaves."""
    if shuffles is None:
        return False
    run: Any = await shuffles._get_shuffle_run(shuffle_id, run_id)
    if run.places is None:
        run.places = [Place(*place) for place in places]
    return True
