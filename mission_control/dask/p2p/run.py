"""One run of a shuffle on one worker, whatever it moves."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from dask.context import thread_state
from dask.utils import key_split
from distributed import Reschedule
from distributed.protocol.serialize import ToPickle
from distributed.shuffle._exceptions import P2PConsistencyError, P2POutOfDiskError, ShuffleClosedError
from distributed.utils import sync
from distributed.utils_comm import retry

from mission_control import _native
from mission_control.objects import data_plane

if TYPE_CHECKING:
    from distributed.shuffle._core import ShuffleSpec
    from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin

    from mission_control.dask.worker import MissionControlWorker

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RESTART_WITHIN_S = 30.0
"""Where an input is gone with its worker, the scheduler restarts the shuffle: at once where the worker's connection
broke. After this time the task fails and names its cause."""
SILENT_WITHIN_S = 300.0
"""A worker that nobody reaches is fetched from again for so long: Dask takes it for lost then
(``distributed.scheduler.worker-ttl``)."""
TELL_TIMES, TELL_PAUSE_S, TELL_PAUSE_MAX_S = 10, 0.1, 5.0
"""How often the barrier turns to a worker that it does not reach, and its pauses."""


class Incomplete(P2PConsistencyError):
    """A shuffle would bring other data than went in, or its data cannot be had.

    Dask hands errors of this kind to the program as they are.
    """


@dataclass(frozen=True)
class Put:
    """What was put of one input partition."""

    partition: Any
    stage: str
    """Of the task that put it."""
    object: str
    address: str
    """Of the data plane that has it."""
    schema: bytes
    """Checksum of what the receiver must know of the data; that is the object's last part."""
    outputs: np.ndarray
    """Of each part but the last: the output that takes it, as a number from 0 in the order of the shuffle's outputs."""
    sizes: np.ndarray
    """Bytes of each part, with the last."""
    rows: np.ndarray
    """Rows, or items, of each part but the last."""
    unwanted: int = 0
    """Rows of outputs that nobody wants."""


Spec = TypeVar("Spec")


def with_job(carried: Callable[..., Spec], spec: ShuffleSpec, job: str, demands: str) -> Spec:
    """Return Dask's description of a shuffle as one that the data plane carries for a job; `demands` are JSON."""
    given = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return carried(**given, job=job, demands=demands)


class Moved(int):
    """What adding a partition gives: the number of the run, as in Dask's own runs, and what was put."""

    put: Put

    def __new__(cls, run_id: int, put: Put) -> Moved:
        moved = super().__new__(cls, run_id)
        moved.put = put
        return moved

    def __reduce__(self) -> tuple[Any, ...]:
        return Moved, (int(self), self.put)

    def __sizeof__(self) -> int:
        return 500 + self.put.outputs.nbytes + self.put.sizes.nbytes + self.put.rows.nbytes


class Piece(NamedTuple):
    """A part that an output takes."""

    partition: Any
    """The input partition that it comes from."""
    schema: Any
    rows: int
    data: Any
    """A read-only buffer."""


@dataclass(frozen=True)
class Inputs:
    """What the outputs of one worker take: a line for each part, by output and then by input partition."""

    stage: str
    puts: list[tuple[Any, str, str, int]]
    """Input partition, object, the data plane that has it, and the number of its schema."""
    schemas: list[tuple[str, str, int, int]]
    """An object that has it, the object's data plane, number and bytes of the part."""
    outputs: np.ndarray
    put: np.ndarray
    """Of each line, the put; then the part of its object, its bytes and rows."""
    part: np.ndarray
    sizes: np.ndarray
    rows: np.ndarray

    def lines(self, output: int) -> range:
        """Which lines are an output's."""
        first, last = np.searchsorted(self.outputs, [output, output + 1])
        return range(int(first), int(last))


def inputs_of(puts: Sequence[Put], outputs_of: Mapping[str, Sequence[int]]) -> dict[str, Inputs]:
    """Pick what each worker's outputs take. `puts` are in the order of the input partitions."""
    lengths = [len(put.outputs) for put in puts]
    nothing = np.zeros(0, dtype=np.uint32)
    table = {
        "outputs": np.concatenate([nothing, *(put.outputs for put in puts)]),
        "put": np.repeat(np.arange(len(puts), dtype=np.uint32), lengths),
        "part": np.concatenate([nothing, *(np.arange(length, dtype=np.uint32) for length in lengths)]),
        "sizes": np.concatenate([nothing.astype(np.uint64), *(put.sizes[:-1] for put in puts)]),
        "rows": np.concatenate([nothing.astype(np.uint64), *(put.rows for put in puts)]),
    }
    # Stable: the parts of an output stay in the order of the inputs.
    order = np.argsort(table["outputs"], kind="stable")
    table = {name: column[order] for name, column in table.items()}
    return {
        worker: picked(puts, table, np.isin(table["outputs"], np.array(outputs, dtype=np.uint32)))
        for worker, outputs in outputs_of.items()
    }


def picked(puts: Sequence[Put], table: dict[str, np.ndarray], wanted: np.ndarray) -> Inputs:
    """Return the lines that are wanted, with the puts that they name."""
    lines = {name: column[wanted] for name, column in table.items()}
    used, lines["put"] = np.unique(lines["put"], return_inverse=True)
    schemas: dict[bytes, tuple[int, tuple[str, str, int, int]]] = {}
    kept = []
    for put in (puts[number] for number in used):
        known = (put.object, put.address, len(put.outputs), int(put.sizes[-1]))
        number, _ = schemas.setdefault(put.schema, (len(schemas), known))
        kept.append((put.partition, put.object, put.address, number))
    stage = puts[0].stage if puts else ""
    return Inputs(stage, kept, [place for _, place in schemas.values()], **lines)


class Run(ABC):
    """Has the methods that Dask's plug-in of a worker calls of a run."""

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
        self.outputs = {partition: number for number, partition in enumerate(worker_for)}
        """The number of each output partition that is wanted."""
        self.outputs_of: defaultdict[str, list[int]] = defaultdict(list)
        """Of each worker."""
        for partition, worker in worker_for.items():
            self.outputs_of[worker].append(self.outputs[partition])
        self.objects: list[str] = []
        """Put here; freed when the run is closed."""
        self.schemas: dict[int, Any] = {}
        self.inputs: Inputs | None = None
        self.transferred = False
        self.fetching = 0
        """Tasks that fetch."""
        self.closed = False
        self.closed_event = asyncio.Event()
        self.started_at = time.time()
        # Dask's plug-in reads it.
        self._exception: Exception | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of shuffle {self.id}, run {self.run_id}, on {self.worker.address}>"

    def raise_if_closed(self) -> None:
        if self.closed:
            raise self._exception or ShuffleClosedError(f"{self} is closed")

    # --- what each kind of shuffle does -----------------------------------------------------------------------------

    @abstractmethod
    def put(self, data: Any, partition: Any) -> Put:
        """Put an input partition with :meth:`keep`."""

    @abstractmethod
    def join(self, partition: Any, pieces: list[Piece], endpoint: _native.Endpoint) -> tuple[Any, int]:
        """Make an output partition; return it and its number of rows or items."""

    @abstractmethod
    def read_schema(self, described: Any) -> Any:
        """Understand the last part of an object."""

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
            put = self.put(data, partition_id)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise P2POutOfDiskError() from error
            raise
        if self.closed:
            # Whoever closed it may not have seen this object.
            self.free()
            self.raise_if_closed()
        return Moved(self.run_id, put)

    def leave_to_dask(self, error: RuntimeError) -> None:
        """Have the scheduler start the shuffle again: this worker came later, and has no data plane.

        Raises:
            ShuffleClosedError: The task runs again.
            RuntimeError: The error, if it has one.
        """
        plugin = self.worker.plugins.get("mission-control")
        if plugin is not None and plugin.endpoint is not None:
            raise error

        async def restart() -> None:
            # Else the scheduler would carry it as before.
            await self.worker.scheduler.mission_control_without(worker=self.worker.address, why=str(error))
            await self.worker.scheduler.shuffle_barrier(id=self.id, run_id=self.run_id, consistent=False)

        # Another task may have had it restarted.
        with suppress(ValueError, KeyError):
            sync(self.worker.loop, restart)
        raise ShuffleClosedError(f"{self} starts again, carried by Dask: {self.worker.address} has no data plane")

    def keep(
        self,
        partition: Any,
        segment: _native.Segment,
        schema: bytes,
        outputs: np.ndarray,
        sizes: Sequence[int],
        rows: np.ndarray,
        unwanted: int = 0,
    ) -> Put:
        """Make an object of memory that was written. Others can map it once the caller has dropped its reference."""
        _, endpoint = plane()
        name = endpoint.adopt(segment, sizes, self.demands)
        self.objects.append(name)
        return Put(
            partition=partition,
            stage=key_split(thread_state.key),
            object=name,
            address=endpoint.address,
            schema=hashlib.blake2b(schema, digest_size=16).digest(),
            outputs=np.asarray(outputs, dtype=np.uint32),
            sizes=np.array(sizes, dtype=np.uint64),
            rows=np.asarray(rows, dtype=np.uint64),
            unwanted=unwanted,
        )

    def get_output_partition(self, partition_id: Any, key: Any, **_: Any) -> Any:
        """Fetch and join the parts of an output partition, and see that everything is there.

        Raises:
            Incomplete: It is not.
            distributed.Reschedule: The partition belongs to another worker, or an input is gone: the shuffle restarts.
        """
        self.raise_if_closed()
        sync(self.worker.loop, self.ensure_output_worker, partition_id, key)
        inputs = self.inputs
        if inputs is None or not self.transferred:
            raise RuntimeError(f"output partition {partition_id} of {self} was asked for before the barrier")
        stage, receiver = key_split(key), str(key)
        lines = inputs.lines(self.outputs[partition_id])
        own = [inputs.puts[int(inputs.put[line])] for line in lines]
        wanted = [
            (name, int(inputs.part[line]), int(inputs.sizes[line]), [address])
            for line, (_, name, address, _) in zip(lines, own, strict=True)
        ]
        schemas = {number: self.schema(inputs, number, stage, receiver) for number in {put[3] for put in own}}
        parts = self.fetch(inputs.stage, wanted, stage, receiver)
        pieces = [
            Piece(partition, schemas[number], int(inputs.rows[line]), data)
            for line, (partition, _, _, number), data in zip(lines, own, parts, strict=True)
        ]
        del parts
        plugin, endpoint = plane()
        output, rows = self.join(partition_id, pieces, endpoint)
        expected = sum(piece.rows for piece in pieces)
        if rows != expected:
            raise Incomplete(
                f"shuffle {self.id}: output partition {partition_id} has {rows} rows, but {expected} went in"
            )
        self.say(plugin, "shuffle-out", output=self.outputs[partition_id], rows=rows)
        return output

    def fetch(self, source: str, wanted: list[tuple[str, int, int, list[str]]], stage: str, receiver: str) -> list[Any]:
        """Bring parts: object, number, bytes and addresses of each.

        Raises:
            ShuffleClosedError: The shuffle starts again.
            Incomplete: It does not, and the parts cannot be had.
        """
        deadline = time.monotonic() + SILENT_WITHIN_S
        while True:
            try:
                return self.fetch_once(source, wanted, stage, receiver)
            except _native.TransferError as error:
                self.raise_if_closed()
                if isinstance(error, _native.Unreachable) and time.monotonic() < deadline:
                    # It may only be paused.
                    continue
                self.wait_for_restart(error)
                raise Incomplete(f"shuffle {self.id}: data of an input cannot be had: {error}") from error

    def fetch_once(
        self, source: str, wanted: list[tuple[str, int, int, list[str]]], stage: str, receiver: str
    ) -> list[Any]:
        plugin, endpoint = plane()
        asks = (receiver, len(self.outputs))
        self.fetching += 1
        try:
            # Whoever closes it looks at the number of tasks afterwards.
            self.raise_if_closed()
            with plugin.turns.thread_released() if plugin.turns is not None else nullcontext():
                fetched, _, _ = endpoint.fetch(self.job, source, stage, self.demands, wanted, False, False, *asks)
        finally:
            self.fetching -= 1
        return fetched

    def schema(self, inputs: Inputs, number: int, stage: str, receiver: str) -> Any:
        """Bring a schema, once to each worker; most inputs have the same one."""
        if number not in self.schemas:
            name, address, part, size = inputs.schemas[number]
            (described,) = self.fetch(f"{inputs.stage} schema", [(name, part, size, [address])], stage, receiver)
            self.schemas.setdefault(number, self.read_schema(described))
        return self.schemas[number]

    def wait_for_restart(self, error: Exception) -> None:
        """The scheduler closes the run where a worker of it is gone."""

        async def closed() -> None:
            await asyncio.wait_for(self.closed_event.wait(), RESTART_WITHIN_S)

        try:
            sync(self.worker.loop, closed)
        except TimeoutError:
            return
        raise Reschedule() from error

    # --- in the event loop ------------------------------------------------------------------------------------------

    async def barrier(self, run_ids: Sequence[int]) -> int:
        """All partitions were added: tells each worker what its outputs take, and then the scheduler."""
        self.raise_if_closed()
        consistent = all(isinstance(moved, Moved) and moved == self.run_id for moved in run_ids)
        if consistent:
            puts = sorted((moved.put for moved in run_ids if isinstance(moved, Moved)), key=lambda put: put.partition)
            rows = sum(int(put.rows.sum()) for put in puts)
            unwanted = sum(put.unwanted for put in puts)
            # A worker that came later may run the barrier, and have no data plane.
            if (plugin := self.worker.plugins.get("mission-control")) is not None:
                self.say(plugin, "shuffle-in", rows=rows, unwanted=unwanted)
            try:
                # Large, where there are many inputs and outputs.
                inputs = await asyncio.to_thread(inputs_of, puts, self.outputs_of)
                await asyncio.gather(*(self.tell(worker, own) for worker, own in inputs.items()))
            except OSError:
                # A worker is gone: the scheduler closes this run and begins another.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.closed_event.wait(), RESTART_WITHIN_S)
                self.raise_if_closed()
                raise
        await self.worker.scheduler.shuffle_barrier(id=self.id, run_id=self.run_id, consistent=consistent)
        return self.run_id

    async def tell(self, worker: str, inputs: Inputs) -> None:
        async def once() -> None:
            self.raise_if_closed()
            other = self.worker.rpc(worker)
            took = await other.mission_control_shuffle_inputs(
                shuffle_id=self.id, run_id=self.run_id, inputs=ToPickle(inputs)
            )
            if not took:
                raise OSError(f"{worker} is leaving")

        await retry(once, TELL_TIMES, TELL_PAUSE_S, TELL_PAUSE_MAX_S, operation=f"{self}: tell {worker}")

    async def inputs_done(self) -> None:
        self.raise_if_closed()
        if self.inputs is None and self.worker.address in self.outputs_of:
            raise P2PConsistencyError(f"{self} did not receive its inputs")
        self.transferred = True

    async def ensure_output_worker(self, partition: Any, key: Any) -> None:
        """Have the scheduler run a task where its output partition belongs."""
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
        """What Dask's dashboard shows of a run: here nothing is pushed."""
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
        # The kernel takes its time with many objects.
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Free what was put here, and end fetches: nobody will tell that their objects are lost."""
        self.free()
        endpoint = self.endpoint()
        if self.fetching and self.inputs is not None and endpoint is not None:
            endpoint.lost([name for _, name, _, _ in self.inputs.puts], f"shuffle {self.id} was closed")

    def free(self) -> None:
        """Free what was put here. A task that ends may call it as well."""
        endpoint = self.endpoint()
        while True:
            try:
                name = self.objects.pop()
            except IndexError:
                return
            if endpoint is not None:
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


async def take_inputs(shuffles: ShuffleWorkerPlugin | None, shuffle_id: Any, run_id: int, inputs: Inputs) -> bool:
    """A worker's handler of what :meth:`Run.tell` sends, maybe more than once; false: the worker is leaving."""
    if shuffles is None:
        return False
    run: Any = await shuffles._get_shuffle_run(shuffle_id, run_id)
    if run.inputs is None:
        run.inputs = inputs
    return True
