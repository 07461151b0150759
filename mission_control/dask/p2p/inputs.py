"""The objects of a shuffle's input partitions, and the parts that each worker's outputs take.

A table of all parts has inputs times outputs lines, which is more than one process should hold. So each worker keeps
the lines of the partitions that it put. When all are there it makes an *index* of them, an object with a part for each
worker that joins outputs, and that worker fetches its part.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as counting
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Put:
    """An object with some of an input partition: a part for each of its outputs."""

    object: str
    outputs: np.ndarray
    """For each part, the number of the output that takes it (``Run.outputs``); ascending."""
    sizes: np.ndarray
    """Bytes of each part."""
    rows: np.ndarray
    """Rows, or items, of each part."""


@dataclass(frozen=True)
class Added:
    """The objects of one input partition."""

    partition: Any
    stage: str
    """Stage of the task that put it."""
    address: str
    """Address of the data plane that has it."""
    puts: list[Put]
    schema: bytes
    """Checksum of the schema."""
    schema_at: tuple[str, int]
    """The object of the schema, and its bytes."""
    unwanted: int
    """Rows for outputs that nobody wants."""


class Place(NamedTuple):
    """Where a worker fetches lines of its outputs: a part of the index of another worker."""

    stage: str
    """Stage of the tasks that put the input partitions."""
    object: str
    part: int
    size: int
    """In bytes."""
    address: str
    """Address of the data plane that has it."""


class Index(NamedTuple):
    """The index of one worker's input partitions."""

    stage: str
    object: str
    address: str
    """Address of the data plane that has it."""
    sizes: list[int]
    """Bytes of the part of each worker that joins outputs; 0: it takes nothing."""

    def place(self, part: int) -> Place:
        return Place(self.stage, self.object, part, self.sizes[part], self.address)


class SchemaAt(NamedTuple):
    """Where a schema is. Workers that made equal ones have an object each."""

    checksum: bytes
    object: str
    address: str
    """Address of the data plane that has it."""
    size: int
    """In bytes."""


class Line(NamedTuple):
    """A part that an output takes."""

    partition: Any
    """The input partition that it comes from."""
    object: str
    part: int
    size: int
    """In bytes."""
    rows: int
    address: str
    """Address of the data plane that has it."""
    schema: SchemaAt


@dataclass(frozen=True)
class Inputs:
    """The parts that one worker's outputs take from another worker's input partitions: a line for each, by output."""

    stage: str
    puts: list[tuple[Any, str, str, int]]
    """Input partition, object, the data plane that has it, and the number of its schema."""
    schemas: list[SchemaAt]
    outputs: np.ndarray
    put: np.ndarray
    """For each line: the number of its put, the part of the object, its bytes and rows."""
    part: np.ndarray
    sizes: np.ndarray
    rows: np.ndarray

    def lines(self, output: int) -> list[Line]:
        """Return the lines of an output."""
        first, last = np.searchsorted(self.outputs, [output, output + 1])
        columns = (own[first:last].tolist() for own in (self.put, self.part, self.sizes, self.rows))
        made = []
        for put, part, size, rows in zip(*columns, strict=True):
            partition, name, address, schema = self.puts[put]
            made.append(Line(partition, name, part, size, rows, address, self.schemas[schema]))
        return made


def index_of(added: Sequence[Added], outputs_of: Sequence[Sequence[int]]) -> list[bytes]:
    """Return for each worker the lines of its outputs, as :func:`read_index` reads them; nothing if it has none.

    Args:
        added: The input partitions of one worker.
        outputs_of: The numbers of each worker's outputs.
    """
    worker_of = np.zeros(sum(map(len, outputs_of)), dtype=np.uint32)
    for worker, outputs in enumerate(outputs_of):
        worker_of[np.asarray(outputs, dtype=np.intp)] = worker
    puts = [(own, put, worker_of[put.outputs]) for own in added for put in own.puts]
    # One worker after the other, because all lines together may be large.
    return [lines_of(worker, puts) for worker in range(len(outputs_of))]


def lines_of(worker: int, puts: Sequence[tuple[Added, Put, np.ndarray]]) -> bytes:
    """Return the lines of one worker's outputs. `puts` has for each put the workers of its parts."""
    schemas: dict[bytes, tuple[int, SchemaAt]] = {}
    kept: list[tuple[Any, str, str, int]] = []
    parts, chosen = [], []
    for added, put, workers in puts:
        (part,) = np.nonzero(workers == worker)
        if not len(part):
            continue
        name, size = added.schema_at
        number, _ = schemas.setdefault(added.schema, (len(schemas), SchemaAt(added.schema, name, added.address, size)))
        kept.append((added.partition, put.object, added.address, number))
        parts.append(part.astype(np.uint32))
        chosen.append(put)
    if not chosen:
        return b""
    outputs = np.concatenate([put.outputs[part] for put, part in zip(chosen, parts, strict=True)])
    order = np.argsort(outputs, kind="stable")
    lines = {
        "outputs": outputs[order],
        "put": np.repeat(np.arange(len(chosen), dtype=np.uint32), [len(part) for part in parts])[order],
        "sizes": np.concatenate([put.sizes[part] for put, part in zip(chosen, parts, strict=True)])[order],
        "rows": np.concatenate([put.rows[part] for put, part in zip(chosen, parts, strict=True)])[order],
        "part": np.concatenate(parts)[order],
    }
    stage = puts[0][0].stage
    buffers: list[pickle.PickleBuffer] = []
    inputs = Inputs(stage, kept, [schema for _, schema in schemas.values()], **lines)
    head = pickle.dumps(inputs, protocol=5, buffer_callback=buffers.append)
    arrays = [own.raw() for own in buffers]
    sizes = np.array([len(head), *map(len, arrays)], dtype=np.uint64)
    return b"".join([len(sizes).to_bytes(8, "little"), sizes.tobytes(), *map(padded, (head, *arrays))])


def padded(data: Any) -> bytes:
    """Return bytes up to a place where an array may begin."""
    return bytes(data) + bytes(-len(data) % 8)


def read_index(part: Any) -> Inputs:
    """Return the lines of a part of an index; they use its memory."""
    memory = memoryview(part).cast("B")
    count = int.from_bytes(memory[:8], "little")
    sizes = np.frombuffer(memory, np.uint64, count, 8).tolist()
    at, pieces = 8 + 8 * count, []
    for size in sizes:
        pieces.append(memory[at : at + size])
        at += size + -size % 8
    return pickle.loads(pieces[0], buffers=pieces[1:])


def numbered(worker_for: Mapping[Any, str]) -> dict[Any, int]:
    """Number output partitions by their rank among those of their worker: the first of each worker, then the second."""
    ranks: defaultdict[str, Iterator[int]] = defaultdict(counting)
    rank_of = {partition: next(ranks[worker]) for partition, worker in worker_for.items()}
    return {partition: number for number, partition in enumerate(sorted(worker_for, key=rank_of.__getitem__))}
