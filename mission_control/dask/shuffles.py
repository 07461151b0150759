"""Dask's own shuffles on the data plane: one object for each input partition, with a part for each output partition.

Graph, barrier, restarts and the choice of workers stay Dask's. What is replaced is a shuffle's run on each worker. The
scheduler decides which engine carries a shuffle (:mod:`.seams.shuffles`), so all workers use the same one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.context import thread_state
from dask.utils import key_split
from distributed import Reschedule
from distributed.protocol.serialize import ToPickle
from distributed.shuffle._exceptions import P2PConsistencyError, ShuffleClosedError
from distributed.shuffle._shuffle import DataFrameShuffleSpec
from distributed.utils import sync

from mission_control import _native, frames
from mission_control.objects import data_plane

if TYPE_CHECKING:
    import pandas as pd
    from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin

    from mission_control.dask.worker import MissionControlWorker

STAGE = "shuffle-transfer"
"""Dask's name of the tasks that add a partition; those of a merge have another one."""
RESTART_WITHIN_S = 30.0
"""Where an input is gone with its worker, the scheduler restarts the shuffle: at once where the worker's connection
broke. After this time the task fails and names its cause."""


@dataclass(frozen=True)
class Fetching:
    """The task that fetches."""

    stage: str
    receiver: str
    """Its name, for the pattern of the transfer."""


class RowsLost(P2PConsistencyError):
    """A shuffle would bring other rows than go in. Dask hands errors of this kind to the program as they are."""


@dataclass(frozen=True)
class Put:
    """What was put of one input partition."""

    partition: int
    stage: str
    """Of the task that put it."""
    object: str
    address: str
    """Of the data plane that has it."""
    schema: bytes
    """Checksum of the frame's schema, which is the object's last part."""
    sizes: np.ndarray
    """Bytes of each part, one for each output partition and the schema."""
    rows: np.ndarray
    """Rows of each part but the last."""
    unwanted: int
    """Rows of output partitions that nobody wants."""


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
        return 500 + self.put.sizes.nbytes + self.put.rows.nbytes


@dataclass(frozen=True)
class Inputs:
    """What the output partitions of one worker take, in the order of the input partitions."""

    stage: str
    objects: list[tuple[str, str]]
    """Name of each object, and the data plane that has it."""
    schemas: list[tuple[str, str, int]]
    """Different schemas: an object that has it, the object's data plane, and bytes."""
    schema_of: list[int]
    """Of each object."""
    sizes: np.ndarray
    """Bytes: objects x outputs of this worker."""
    rows: np.ndarray
    """Rows: objects x outputs of this worker."""

    @classmethod
    def of(cls, puts: Sequence[Put], parts: Sequence[int]) -> Inputs:
        """Pick what these parts need."""
        having = [put for put in puts if put.rows[parts].any()]
        schemas: dict[bytes, tuple[int, tuple[str, str, int]]] = {}
        for put in having:
            schemas.setdefault(put.schema, (len(schemas), (put.object, put.address, int(put.sizes[-1]))))
        shape = (len(having), len(parts))
        return cls(
            stage=puts[0].stage if puts else STAGE,
            objects=[(put.object, put.address) for put in having],
            schemas=[place for _, place in schemas.values()],
            schema_of=[schemas[put.schema][0] for put in having],
            sizes=np.array([put.sizes[parts] for put in having], dtype=np.uint64).reshape(shape),
            rows=np.array([put.rows[parts] for put in having], dtype=np.uint32).reshape(shape),
        )


@dataclass(frozen=True)
class DataFrameSpec(DataFrameShuffleSpec):
    """A shuffle of data frames that Mission Control carries."""

    job: str
    demands: str
    """As JSON."""

    @classmethod
    def of(cls, spec: DataFrameShuffleSpec, job: str, demands: dict[str, Any]) -> DataFrameSpec:
        given = {field.name: getattr(spec, field.name) for field in fields(DataFrameShuffleSpec)}
        return cls(**given, job=job, demands=json.dumps(demands))

    def create_run_on_worker(
        self, run_id: int, span_id: str | None, worker_for: dict[int, str], plugin: ShuffleWorkerPlugin
    ) -> Any:
        return DataFrameRun(self, run_id, worker_for, plugin)


class DataFrameRun:
    """One run of a shuffle on one worker; has the methods that Dask's plug-in calls."""

    def __init__(self, spec: DataFrameSpec, run_id: int, worker_for: dict[int, str], plugin: ShuffleWorkerPlugin):
        self.spec = spec
        self.id = spec.id
        self.run_id = run_id
        self.worker_for = worker_for
        self.worker = plugin.worker
        self.parts = {partition: part for part, partition in enumerate(worker_for)}
        """Of each output partition that is wanted."""
        self.parts_of: defaultdict[str, list[int]] = defaultdict(list)
        """Of each worker."""
        for partition, worker in worker_for.items():
            self.parts_of[worker].append(self.parts[partition])
        self.part_of = [self.parts.get(partition, frames.UNWANTED) for partition in range(spec.npartitions)]
        self.meta = spec.meta.drop(columns=spec.column) if spec.drop_column else spec.meta
        self.objects: list[str] = []
        """Put here; freed when the run is closed."""
        self.schemas: dict[int, frames.Schema] = {}
        self.inputs: Inputs | None = None
        self.transferred = False
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

    # --- in a task's thread -----------------------------------------------------------------------------------------

    def add_partition(self, data: pd.DataFrame, partition_id: int) -> int:
        """Put a partition's rows, a part for each output partition.

        Raises:
            ValueError: It has other columns than the shuffle.
            RowsLost: A row has no output partition.
        """
        self.raise_if_closed()
        if self.transferred:
            raise RuntimeError(f"{self} has all its input partitions already")
        if set(data.columns) != set(self.spec.meta.columns):
            raise ValueError(f"partition {partition_id} has columns {list(data.columns)}, not {list(self.spec.meta)}")
        _, endpoint = plane()
        # A frame that another worker sent may lie at any address.
        outputs = np.require(data[self.spec.column].to_numpy(), np.int64, ["C_CONTIGUOUS", "ALIGNED"])
        schema, buffers = frames.encode(data, self.meta.columns)
        try:
            split = _native.ColumnSplit(outputs.data, self.part_of, len(self.parts), buffers)
        except ValueError as error:
            raise RowsLost(f"shuffle {self.id}, input partition {partition_id}: {error}") from None
        described = frames.dumps(schema)
        sizes = [*split.sizes, len(described)]
        segment = endpoint.allocate(sum(sizes), (self.spec.job, self.spec.demands))
        split.write(segment, described)
        name = endpoint.adopt(segment, sizes, self.spec.demands)
        # Its memory is not lent to others while somebody can write to it.
        del segment
        self.objects.append(name)
        if self.closed:
            # Whoever closed it may not have seen this object.
            self.free()
            self.raise_if_closed()
        put = Put(
            partition=partition_id,
            stage=key_split(thread_state.key),
            object=name,
            address=endpoint.address,
            schema=hashlib.blake2b(described, digest_size=16).digest(),
            sizes=np.array(sizes, dtype=np.uint64),
            rows=np.array(split.rows, dtype=np.uint32),
            unwanted=split.unwanted,
        )
        return Moved(self.run_id, put)

    def get_output_partition(self, partition_id: int, key: Any, **_: Any) -> pd.DataFrame:
        """Fetch and join the parts of an output partition, and see that all rows are there.

        Raises:
            RowsLost: They are not.
            distributed.Reschedule: The partition belongs to another worker, or an input is gone: the shuffle restarts.
        """
        self.raise_if_closed()
        sync(self.worker.loop, self.ensure_output_worker, partition_id, key)
        inputs = self.inputs
        if inputs is None or not self.transferred:
            raise RuntimeError(f"output partition {partition_id} of {self} was asked for before the barrier")
        part = self.parts[partition_id]
        place = self.parts_of[self.worker.address].index(part)
        rows, sizes = inputs.rows[:, place], inputs.sizes[:, place]
        having = np.flatnonzero(rows)
        task = Fetching(stage=key_split(key), receiver=str(key))
        try:
            schemas = {
                number: self.schema(inputs, number, task) for number in {inputs.schema_of[own] for own in having}
            }
            parts = self.fetch(inputs.stage, [(*inputs.objects[own], part, int(sizes[own])) for own in having], task)
        except (_native.Lost, _native.Unreachable) as error:
            self.wait_for_restart(error)
            raise
        plugin, endpoint = plane()
        pieces = [(schemas[inputs.schema_of[own]], fetched) for own, fetched in zip(having, parts, strict=True)]
        frame = frames.decode(endpoint, pieces, self.meta)
        if len(frame) != rows.sum():
            raise RowsLost(
                f"shuffle {self.id}: output partition {partition_id} has {len(frame)} rows, but {rows.sum()} went in"
            )
        self.say(plugin, "shuffle-out", output=partition_id, rows=len(frame))
        return frame

    def fetch(self, source: str, parts: Sequence[tuple[str, str, int, int]], task: Fetching) -> list[Any]:
        """Bring parts: object, address, number and bytes of each."""
        plugin, endpoint = plane()
        wanted = [(name, part, size, [address]) for name, address, part, size in parts]
        asks = (task.receiver, len(self.parts))
        given = (self.spec.job, source, task.stage, self.spec.demands, wanted, False, False, *asks)
        with plugin.turns.lent() if plugin.turns is not None else nullcontext():
            fetched, _, _ = endpoint.fetch(*given)
        return fetched

    def schema(self, inputs: Inputs, number: int, task: Fetching) -> frames.Schema:
        """Bring a schema, once to each worker; most inputs have the same one."""
        if number not in self.schemas:
            name, address, size = inputs.schemas[number]
            (part,) = self.fetch(f"{inputs.stage} schema", [(name, address, len(self.parts), size)], task)
            self.schemas.setdefault(number, frames.loads(part))
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
            self.say(self.worker.plugins["mission-control"], "shuffle-in", rows=rows, unwanted=unwanted)
            try:
                await asyncio.gather(
                    *(self.tell(worker, Inputs.of(puts, self.parts_of[worker])) for worker in self.parts_of)
                )
            except OSError:
                # A worker is gone: the scheduler closes this run and begins another.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.closed_event.wait(), RESTART_WITHIN_S)
                self.raise_if_closed()
                raise
        await self.worker.scheduler.shuffle_barrier(id=self.id, run_id=self.run_id, consistent=consistent)
        return self.run_id

    async def tell(self, worker: str, inputs: Inputs) -> None:
        await self.worker.rpc(worker).mission_control_shuffle_inputs(
            shuffle_id=self.id, run_id=self.run_id, inputs=ToPickle(inputs)
        )

    async def inputs_done(self) -> None:
        self.raise_if_closed()
        if self.inputs is None and self.worker.address in self.parts_of:
            raise P2PConsistencyError(f"{self} was not told of its inputs")
        self.transferred = True

    async def ensure_output_worker(self, partition: int, key: Any) -> None:
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
        self.free()
        self.closed_event.set()

    def free(self) -> None:
        plugin = self.worker.plugins.get("mission-control")
        endpoint = plugin.endpoint if plugin is not None else None
        while self.objects:
            name = self.objects.pop()
            if endpoint is not None:
                endpoint.free(name)

    def say(self, plugin: MissionControlWorker, kind: str, **said: Any) -> None:
        self.worker.loop.add_callback(lambda: plugin.say(kind, shuffle=self.id, run=self.run_id, **said))


def plane() -> tuple[MissionControlWorker, _native.Endpoint]:
    """Return the plug-in and the data plane of the worker whose task this thread runs."""
    _, plugin, endpoint = data_plane("shuffle")
    return plugin, endpoint


async def take_inputs(shuffles: ShuffleWorkerPlugin, shuffle_id: Any, run_id: int, inputs: Inputs) -> None:
    """A worker's handler of what :meth:`DataFrameRun.tell` sends."""
    run = await shuffles._get_shuffle_run(shuffle_id, run_id)
    run.inputs = inputs
