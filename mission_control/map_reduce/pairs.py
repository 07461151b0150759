"""Pairs of keys and values on their way from map to reduce tasks.

A map task's part for a reduce task has *runs*: pairs in the order of their keys' numbers (or of the keys themselves).
A run lies in blocks, each pickled. A reduce task merges all runs; if they are more than its share of memory it merges
some of them first, to files.
"""

from __future__ import annotations

import heapq
import itertools
import pickle
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from typing import IO, Any

import cloudpickle  # type: ignore[import-untyped]

from mission_control.objects import Reference, allocate, data_plane, fetch, put

BLOCK_PAIRS, BLOCK_BYTES = 4096, 1 << 20
"""Of a block, at most about: a reduce task has one block of each run in memory as Python's objects."""
TABLE_PAIRS, TABLE_BYTES = 1 << 20, 64 << 20
"""A map task has no more pairs than this in memory as Python's objects, and about so many bytes of them."""
WEIGHED = 512
"""Of so many pairs one is weighed."""
MEMORY_FRACTION = 0.125
"""Of the worker's memory the runs of all its reduce tasks may take this; what is more is merged to files first."""
MERGED_MAX = 128
"""Parts that are merged at once."""
HEAD = struct.Struct("<?Q")
"""Of a block: whether it begins a run, and its bytes."""

Item = tuple[Any, Any, Any]
"""The number by which keys are in order, the key, and the value."""


class Table:
    """The pairs of a map task."""

    def __init__(
        self,
        partition: Callable[[Any, int], int],
        reducers: int,
        combine: Callable[[Any, Any], Any] | None,
        order: Callable[[Any], Any],
    ):
        self.partition, self.reducers, self.combine, self.order = partition, reducers, combine, order
        self.pieces: list[list[bytes]] = [[] for _ in range(reducers)]

    def add_all(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        if self.combine is None:
            self._add_each(pairs)
        else:
            self._add_combined(pairs, self.combine)

    def _add_each(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        held: list[tuple[Any, Any]] = []
        weight = 0
        for some, each in weighed(pairs):
            held += some
            weight += each * len(some)
            if len(held) >= TABLE_PAIRS or weight >= TABLE_BYTES:
                self._flush(held)
                held, weight = [], 0
        self._flush(held)

    def _add_combined(self, pairs: Iterable[tuple[Any, Any]], combine: Callable[[Any, Any], Any]) -> None:
        held: dict[Any, Any] = {}
        weight, weights = 0, 0
        for some, _ in weighed(pairs):
            for key, value in some:
                held[key] = combine(held[key], value) if key in held else value
            # Combined values may grow.
            weight, weights = weight + weight_of((some[0][0], held[some[0][0]])), weights + 1
            if len(held) >= TABLE_PAIRS or weight // weights * len(held) >= TABLE_BYTES:
                self._flush(held.items())
                held, weight, weights = {}, 0, 0
        self._flush(held.items())

    def _flush(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Make a run of these pairs for each reduce task that gets some."""
        by_reducer: list[list[Item]] = [[] for _ in range(self.reducers)]
        for key, value in pairs:
            if key != key:
                raise ValueError(f"a key is {key!r}, which is not equal to itself: leave such pairs out, or name them")
            place = self.partition(key, self.reducers)
            if not 0 <= place < self.reducers:
                raise ValueError(f"partition gave {place} for {key!r}: reduce tasks are 0 to {self.reducers - 1}")
            by_reducer[place].append((self.order(key), key, value))
        for items, pieces in zip(by_reducer, self.pieces, strict=True):
            items.sort(key=itemgetter(0))
            pieces += blocks_of(items)

    def put(self) -> Reference:
        """Put what each reduce task gets, as its part."""
        sizes = [sum(map(len, pieces)) for pieces in self.pieces]
        if not sum(sizes):
            return put([b""] * self.reducers)
        segment = allocate(sum(sizes))
        view = memoryview(segment)
        start = 0
        for pieces in self.pieces:
            for piece in pieces:
                view[start : start + len(piece)] = piece
                start += len(piece)
            # Not all of it twice in memory.
            pieces.clear()
        view.release()
        return put(segment, sizes=sizes)


def weighed(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[list[tuple[Any, Any]], int]]:
    """Return some pairs after the others, and about how many bytes each has."""
    if isinstance(pairs, Mapping):
        raise TypeError(f"map gave {type(pairs).__name__}, not pairs: yield each key with its value (.items())")
    pairs = iter(pairs)
    count = 1
    while some := list(itertools.islice(pairs, count)):
        weight = weight_of(some[0])
        yield some, weight
        count = min(WEIGHED, TABLE_BYTES // 8 // weight + 1)


def weight_of(value: Any) -> int:
    from dask.sizeof import sizeof

    return max(int(sizeof(value)), 1)


def pickled(value: Any) -> bytes:
    """Pickle it; classes of notebooks and scripts, which workers cannot import, with their code."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:
        return cloudpickle.dumps(value, protocol=5)


def blocks_of(items: Iterable[Item]) -> Iterator[bytes]:
    """Pickle a run."""
    items = iter(items)
    begins, count = True, 1
    while some := list(itertools.islice(items, count)):
        block = pickled(some)
        yield HEAD.pack(begins, len(block)) + block
        begins, count = False, of_a_block(some)


def of_a_block(some: list[Any]) -> int:
    """Return how many a block shall have that follows this one."""
    return max(min(BLOCK_PAIRS, BLOCK_BYTES // weight_of(some[0])), 1)


def runs_of(part: memoryview) -> list[Iterator[Item]]:
    """Return the runs of a part."""
    runs: list[list[memoryview]] = []
    start = 0
    while start < len(part):
        begins, length = HEAD.unpack_from(part, start)
        start += HEAD.size
        if begins:
            runs.append([])
        runs[-1].append(part[start : start + length])
        start += length
    return [items_in(run) for run in runs]


def items_in(blocks: Iterable[Any]) -> Iterator[Item]:
    for block in blocks:
        yield from pickle.loads(block)


def run_in(file: IO[bytes]) -> Iterator[Item]:
    """Return the run that a file has."""
    file.seek(0)
    while head := file.read(HEAD.size):
        _, length = HEAD.unpack(head)
        yield from pickle.loads(file.read(length))


@contextmanager
def merged(references: Sequence[Reference], index: int) -> Iterator[tuple[Groups, float]]:
    """Bring a reduce task's part of each object, and merge them.

    Yields:
        Each key with its values, and how many seconds it took to bring them and to merge what was too much.
    """
    worker, _, _ = data_plane("mapreduce")
    limit = worker.memory_manager.memory_limit or (1 << 30)
    began = time.monotonic()
    with ExitStack() as stack:
        runs: list[Iterator[Item]] = []
        groups = list(in_groups(references, index, int(limit * MEMORY_FRACTION / worker.state.nthreads)))
        for group in groups:
            found = [run for part in fetch(group, part=index) for run in runs_of(memoryview(part))]
            if len(groups) > 1:
                file = stack.enter_context(tempfile.TemporaryFile(dir=worker.local_directory))
                for block in blocks_of(heapq.merge(*found, key=itemgetter(0))):
                    file.write(block)
                found = [run_in(file)]
            runs += found
        yield Groups(heapq.merge(*runs, key=itemgetter(0))), time.monotonic() - began


def in_groups(references: Sequence[Reference], index: int, limit: int) -> Iterator[list[Reference]]:
    """Cut objects into groups of few whose parts have so many bytes together, or are one."""
    group: list[Reference] = []
    held = 0
    for reference in references:
        size = reference.sizes[index]
        if group and (held + size > limit or len(group) == MERGED_MAX):
            yield group
            group, held = [], 0
        group.append(reference)
        held += size
    if group:
        yield group


class Groups:
    """Each key with an iterator of its values, of items that are in order of the numbers of their keys."""

    def __init__(self, items: Iterator[Item]):
        self.items = items
        self.next = next(items, None)

    def __iter__(self) -> Iterator[tuple[Any, Iterator[Any]]]:
        while self.next is not None:
            number, key, _ = self.next
            others: dict[Any, list[Any]] = {}
            values = self._values(number, key, others)
            yield key, values
            # What the reducer did not take.
            for _ in values:
                pass
            # Keys that have the same number and are not equal are few.
            for other, its in others.items():
                yield other, iter(its)

    def _values(self, number: Any, key: Any, others: dict[Any, list[Any]]) -> Iterator[Any]:
        while self.next is not None and self.next[0] == number:
            _, other, value = self.next
            self.next = next(self.items, None)
            if other == key:
                yield value
            else:
                others.setdefault(other, []).append(value)
