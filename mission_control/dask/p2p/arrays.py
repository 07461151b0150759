"""Rechunking of arrays."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.shuffle._rechunk import ArrayRechunkSpec, convert_chunk, split_axes

from mission_control import _native
from mission_control.dask.p2p.inputs import Added
from mission_control.dask.p2p.run import Incomplete, Piece, Run

if TYPE_CHECKING:
    from distributed.shuffle._worker_plugin import ShuffleWorkerPlugin

OWN_MEMORY_BYTES = 64 << 10
"""Smaller chunks lie in NumPy's memory, because each segment needs a mapping, of which a process has only 65,530."""
Index = tuple[int, ...]
"""Index of a chunk, by axis."""
PICKLED = b"pickled"
"""The schema of pickled pieces of arrays, each with its place among the pieces of its output."""


@dataclass(frozen=True)
class ArraySpec(ArrayRechunkSpec):
    """A rechunk that Mission Control carries."""

    job: str
    demands: str
    """The job's demands, as JSON."""

    def create_run_on_worker(
        self, run_id: int, span_id: str | None, worker_for: dict[Index, str], plugin: ShuffleWorkerPlugin
    ) -> Any:
        return ArrayRun(self, run_id, worker_for, plugin)


class ArrayRun(Run):
    def __init__(self, spec: ArraySpec, run_id: int, worker_for: dict[Index, str], plugin: ShuffleWorkerPlugin):
        super().__init__(spec, spec.job, spec.demands, run_id, worker_for, plugin)
        self.axes = split_axes(spec.old, spec.new)
        """For each axis and each old chunk: the new chunks that take from it, the numbers of their pieces, and
        slices."""
        self.starts = [[np.cumsum([0, *axis]) for axis in chunks] for chunks in (spec.old, spec.new)]
        """Where old chunks begin on each axis, and new ones."""
        self.new = spec.new

    def put(self, data: Any, partition: Index) -> Added:
        splits = [
            zip(*split, strict=True)
            for split in product(*(axis[i] for axis, i in zip(self.axes, partition, strict=True)))
        ]
        pieces = sorted(
            ((self.outputs[chunk], place, data[where]) for chunk, place, where in splits), key=itemgetter(0)
        )
        outputs = np.array([output for output, _, _ in pieces], dtype=np.uint32)
        items = np.array([piece.size for _, _, piece in pieces], dtype=np.uint64)
        if type(data) is np.ndarray and not data.dtype.hasobject:
            described, frames = pickle.dumps(data.dtype), None
            sizes = np.array([piece.nbytes for _, _, piece in pieces], dtype=np.uint64)
        else:
            described, frames = PICKLED, [pickle.dumps((place, piece), protocol=5) for _, place, piece in pieces]
            sizes = np.array([len(frame) for frame in frames], dtype=np.uint64)
        rooms = self.rooms(outputs, sizes)
        for room in rooms:
            memory = memoryview(room.segment)
            at = 0
            for number in range(*room.parts.indices(len(pieces))):
                size = int(sizes[number])
                if frames is not None:
                    memory[at : at + size] = frames[number]
                else:
                    piece = pieces[number][2]
                    # Copied directly to its place.
                    np.ndarray(piece.shape, piece.dtype, memory, at)[...] = piece
                at += size
            memory.release()
        return self.keep(partition, rooms, described, outputs, sizes, items)

    def join(self, partition: Index, pieces: list[Piece], endpoint: _native.Endpoint) -> tuple[Any, int]:
        shape = tuple(int(chunks[i]) for chunks, i in zip(self.new, partition, strict=True))
        dtypes = {piece.schema for piece in pieces}
        if None in dtypes or len(dtypes) > 1:
            # Chunks of an array may have several types. As in Dask's rechunk, NumPy chooses the common type.
            made = convert_chunk([[self.decoded(piece, partition)] for piece in pieces])
            if made.shape != shape:
                raise Incomplete(f"shuffle {self.id}: chunk {partition} has shape {made.shape} instead of {shape}")
            return made, made.size
        output = result_array(endpoint, shape, *dtypes)
        filled = 0
        for piece in pieces:
            own = output[self.where(piece.partition, partition)]
            own[...] = np.frombuffer(piece.data, piece.schema).reshape(own.shape)
            filled += own.size
        if filled != output.size:
            raise Incomplete(f"shuffle {self.id}: {filled} of {output.size} items of chunk {partition} came")
        return output, filled

    def decoded(self, piece: Piece, new: Index) -> tuple[Index, Any]:
        """Return a piece and its place among the pieces of its chunk."""
        if piece.schema is None:
            return pickle.loads(piece.data)
        shape = tuple(own.stop - own.start for own in self.where(piece.partition, new))
        axes = zip(self.axes, piece.partition, new, strict=True)
        place = tuple(next(place for chunk, place, _ in axis[i] if chunk == j) for axis, i, j in axes)
        return place, np.frombuffer(piece.data, piece.schema).reshape(shape)

    def where(self, old: Index, new: Index) -> tuple[slice, ...]:
        """Return the items of a new chunk that an old one has."""
        places = []
        for olds, news, i, j in zip(*self.starts, old, new, strict=True):
            first, last = max(olds[i], news[j]), min(olds[i + 1], news[j + 1])
            places.append(slice(int(first - news[j]), int(last - news[j])))
        return tuple(places)

    def read_schema(self, described: Any) -> np.dtype | None:
        """Return the type of plain memory; ``None``: the pieces are pickled."""
        return None if bytes(described) == PICKLED else pickle.loads(described)


def result_array(endpoint: _native.Endpoint, shape: Index, dtype: np.dtype) -> np.ndarray:
    """Make an array in memory of the data plane, accounted as a result."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size < OWN_MEMORY_BYTES:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, memoryview(endpoint.allocate_result(size)))
