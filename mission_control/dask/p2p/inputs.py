"""The objects of a shuffle's input partitions, and the parts that each worker's outputs take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as counting
from typing import Any

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


@dataclass(frozen=True)
class Inputs:
    """The parts that the outputs of one worker take: a line for each part, by output and then by input partition."""

    stage: str
    puts: list[tuple[Any, str, str, int]]
    """Input partition, object, the data plane that has it, and the number of its schema."""
    schemas: list[tuple[str, str, int]]
    """For each schema: its object, the object's data plane, and its bytes."""
    outputs: np.ndarray
    put: np.ndarray
    """For each line: the number of its put, the part of the object, its bytes and rows."""
    part: np.ndarray
    sizes: np.ndarray
    rows: np.ndarray

    def lines(self, output: int) -> range:
        """Return the lines of an output."""
        first, last = np.searchsorted(self.outputs, [output, output + 1])
        return range(int(first), int(last))


def inputs_of(added: Sequence[Added], outputs_of: Mapping[str, Sequence[int]]) -> dict[str, Inputs]:
    """Select the parts of each worker's outputs. `added` is in the order of the input partitions."""
    puts = [(own, put) for own in added for put in own.puts]
    lengths = [len(put.outputs) for _, put in puts]
    nothing = np.zeros(0, dtype=np.uint32)
    table = {
        "outputs": np.concatenate([nothing, *(put.outputs for _, put in puts)]),
        "put": np.repeat(np.arange(len(puts), dtype=np.uint32), lengths),
        "part": np.concatenate([nothing, *(np.arange(length, dtype=np.uint32) for length in lengths)]),
        "sizes": np.concatenate([nothing.astype(np.uint64), *(put.sizes for _, put in puts)]),
        "rows": np.concatenate([nothing.astype(np.uint64), *(put.rows for _, put in puts)]),
    }
    # A stable sort, so that the parts of an output stay in the order of the inputs.
    order = np.argsort(table["outputs"], kind="stable")
    table = {name: column[order] for name, column in table.items()}
    return {
        worker: picked(puts, table, np.isin(table["outputs"], np.array(outputs, dtype=np.uint32)))
        for worker, outputs in outputs_of.items()
    }


def picked(puts: Sequence[tuple[Added, Put]], table: dict[str, np.ndarray], wanted: np.ndarray) -> Inputs:
    """Return the wanted lines, with the puts that they name."""
    lines = {name: column[wanted] for name, column in table.items()}
    used, lines["put"] = np.unique(lines["put"], return_inverse=True)
    schemas: dict[bytes, tuple[int, tuple[str, str, int]]] = {}
    kept = []
    for added, put in (puts[number] for number in used):
        name, size = added.schema_at
        number, _ = schemas.setdefault(added.schema, (len(schemas), (name, added.address, size)))
        kept.append((added.partition, put.object, added.address, number))
    stage = puts[0][0].stage if puts else ""
    return Inputs(stage, kept, [place for _, place in schemas.values()], **lines)


def numbered(worker_for: Mapping[Any, str]) -> dict[Any, int]:
    """Number output partitions by their rank among those of their worker: the first of each worker, then the second."""
    ranks: defaultdict[str, Iterator[int]] = defaultdict(counting)
    rank_of = {partition: next(ranks[worker]) for partition, worker in worker_for.items()}
    return {partition: number for number, partition in enumerate(sorted(worker_for, key=rank_of.__getitem__))}
