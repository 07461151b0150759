"""Shuffles of data frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.shuffle._shuffle import DataFrameShuffleSpec

from mission_control import _native, frames, hashing
from mission_control.dask.p2p.inputs import Added
from mission_control.dask.p2p.keys import Keys
from mission_control.dask.p2p.run import Incomplete, Piece, Run

if TYPE_CHECKING:
    import pandas as pd
    from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin


@dataclass(frozen=True)
class FrameSpec(DataFrameShuffleSpec):
    """A shuffle of data frames that Mission Control carries."""

    job: str
    demands: str
    """The job's demands, as JSON."""
    keys: Keys | None = None
    """How the keys of a join are compared whose sides have unlike types; ``None``: Dask has placed the rows."""

    def create_run_on_worker(
        self, run_id: int, span_id: str | None, worker_for: dict[int, str], plugin: ShuffleWorkerPlugin
    ) -> Any:
        # Imported with the first shuffle: a worker without shuffles may not need pandas.
        hashing.install()
        return FrameRun(self, run_id, worker_for, plugin)


class FrameRun(Run):
    def __init__(self, spec: FrameSpec, run_id: int, worker_for: dict[int, str], plugin: ShuffleWorkerPlugin):
        super().__init__(spec, spec.job, spec.demands, run_id, worker_for, plugin)
        self.column = spec.column
        self.keys = spec.keys
        self.names = set(spec.meta.columns)
        self.meta = spec.meta.drop(columns=spec.column) if spec.drop_column else spec.meta
        self.part_of = [self.outputs.get(partition, frames.UNWANTED) for partition in range(spec.npartitions)]

    def put(self, data: pd.DataFrame, partition: int) -> Added:
        if set(data.columns) != self.names:
            raise ValueError(
                f"partition {partition} has columns {list(data.columns)}, but the frame's meta has {list(self.names)}: "
                "give from_delayed, from_map or map_partitions the right meta"
            )
        places = data[self.column].to_numpy() if self.keys is None else self.keys.places(data, len(self.part_of))
        # A frame from another worker may have any alignment.
        rows_to = np.require(places, np.int64, ["C_CONTIGUOUS", "ALIGNED"])
        schema, buffers = frames.encode(data, self.meta.columns)
        try:
            split = _native.ColumnSplit(rows_to.data, self.part_of, len(self.outputs), buffers)
        except ValueError as error:
            raise Incomplete(f"shuffle {self.id}, input partition {partition}: {error}") from None
        rows = np.array(split.rows, dtype=np.uint64)
        outputs = np.flatnonzero(rows)
        # Parts without rows have no bytes, so they are not fetched.
        sizes = np.array(split.sizes, dtype=np.uint64)[outputs]
        rooms = self.rooms(outputs, sizes)
        split.write([room.segment for room in rooms])
        return self.keep(partition, rooms, frames.dumps(schema), outputs, sizes, rows[outputs], split.unwanted)

    def join(self, partition: int, pieces: list[Piece], endpoint: _native.Endpoint) -> tuple[pd.DataFrame, int]:
        frame = frames.decode(endpoint, [(piece.schema, piece.data) for piece in pieces], self.meta)
        return frame, len(frame)

    def read_schema(self, described: Any) -> frames.Schema:
        return frames.loads(described)
