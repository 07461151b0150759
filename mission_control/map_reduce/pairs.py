"""Pairs of keys and values on their way from map to reduce tasks.

A map task puts an object for about 64 MiB of pairs. Its part for a reduce task is a *run*: pairs in the order of their
keys' numbers (or of the keys themselves), in blocks, each pickled. A reduce task merges all runs; if they are larger
than its share of memory, it first merges groups of them to files.
"""

from __future__ import annotations

import heapq
import itertools
import operator
import pickle
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from typing import IO, Any

import cloudpickle  # type: ignore[import-untyped]

from mission_control import _native
from mission_control.map_reduce.groups import in_groups, share_of_memory
from mission_control.map_reduce.keys import is_equal_to_itself
from mission_control.objects import Reference, allocate, data_plane, fetch, put

BLOCK_PAIRS, BLOCK_BYTES = 4096, 1 << 20
"""Approximate limit of a block: a reduce task holds one block of each run in memory as Python objects."""
TABLE_PAIRS, TABLE_BYTES = 1 << 20, 64 << 20
"""Most pairs that a map task holds in memory as Python objects, and approximate limit of their bytes."""
SUMS = 1 << 19
"""Most keys that are added up natively: with their sums they have about 64 MiB as Python objects."""
WEIGHED = 512
"""One of this number of pairs is measured."""
LOOKS_LARGE_BYTES = 64 << 10
"""A value that Dask estimates to be larger than this is not pickled to be measured."""
HEAD = struct.Struct("<Q")
"""Header of a block: its bytes."""

Item = tuple[Any, Any, Any]
"""The number by which keys are ordered, the key, and the value."""


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
        self.references: list[Reference] = []

    def add_all(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        if self.combine is None:
            self._add_each(pairs)
        elif self.combine is operator.add:
            sums = _native.Sums()
            self._add_combined(self._others(iter(pairs), sums), self.combine)
            self._flush(sums.take())
        else:
            self._add_combined(pairs, self.combine)

    def _others(self, pairs: Iterator[tuple[Any, Any]], sums: _native.Sums) -> Iterator[tuple[Any, Any]]:
        """Add up natively what is possible, and return the rest."""
        ended = False
        while not ended:
            ended, full, others = sums.add(pairs, SUMS, TABLE_BYTES // 2, WEIGHED)
            yield from others
            if full:
                self._flush(sums.take())

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
            # Combined values may grow, so they are measured again.
            weight, weights = weight + weight_of((some[0][0], held[some[0][0]])), weights + 1
            if len(held) >= TABLE_PAIRS or weight // weights * len(held) >= TABLE_BYTES:
                self._flush(held.items())
                held, weight, weights = {}, 0, 0
        self._flush(held.items())

    def _flush(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Put a run of these pairs for each reduce task that gets some."""
        by_reducer: list[list[Item]] = [[] for _ in range(self.reducers)]
        for key, value in pairs:
            if key != key or (isinstance(key, tuple) and not is_equal_to_itself(key)):
                raise ValueError(f"a key is {key!r}, which is not equal to itself: leave such pairs out, or name them")
            place = self.partition(key, self.reducers)
            item = (self.order(key), key, value)
            try:
                by_reducer[place if place >= 0 else self.reducers].append(item)
            except (TypeError, IndexError) as error:
                why = f"partition gave {place!r} for {key!r}: reduce tasks are 0 to {self.reducers - 1}"
                raise (ValueError if isinstance(error, IndexError) else TypeError)(why) from None
        if not any(by_reducer):
            return
        runs: list[list[bytes]] = []
        for items in by_reducer:
            items.sort(key=itemgetter(0))
            runs.append(list(blocks_of(items)))
            # Freed one by one, so that not all is in memory twice.
            items.clear()
        self.references.append(put_runs(runs))


def put_runs(runs: list[list[bytes]]) -> Reference:
    """Put the part of each reduce task."""
    sizes = [sum(map(len, blocks)) for blocks in runs]
    segment = allocate(sum(sizes))
    view = memoryview(segment)
    start = 0
    for blocks in runs:
        for block in blocks:
            view[start : start + len(block)] = block
            start += len(block)
        blocks.clear()
    view.release()
    return put(segment, sizes=sizes)


def weighed(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[list[tuple[Any, Any]], int]]:
    """Yield batches of pairs, with the approximate bytes of a pair."""
    pairs = iter(pairs)
    count = 1
    while some := list(itertools.islice(pairs, count)):
        weight = weight_of(some[0])
        yield some, weight
        count = min(WEIGHED, TABLE_BYTES // 8 // weight + 1)


def weight_of(value: Any) -> int:
    """Estimate the bytes of a value."""
    from dask.sizeof import sizeof

    weight = max(int(sizeof(value)), 1)
    # For a user's class that may only include its outermost object.
    return weight if weight > LOOKS_LARGE_BYTES else max(weight, len(pickled(value)))


def pickled(value: Any) -> bytes:
    """Pickle a value; classes of notebooks and scripts, which workers cannot import, are pickled with their code."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:
        return cloudpickle.dumps(value, protocol=5)


def blocks_of(items: Iterable[Item]) -> Iterator[bytes]:
    """Pickle a run."""
    items = iter(items)
    count = 1
    while some := list(itertools.islice(items, count)):
        block = pickled(some)
        yield HEAD.pack(len(block)) + block
        count = of_a_block(some)


def of_a_block(some: list[Any]) -> int:
    """Return how many pairs the next block should have."""
    return max(min(BLOCK_PAIRS, BLOCK_BYTES // weight_of(some[0])), 1)


def run_of(part: memoryview) -> Iterator[Item]:
    """Return the run in a part."""
    start = 0
    while start < len(part):
        (length,) = HEAD.unpack_from(part, start)
        start += HEAD.size
        yield from pickle.loads(part[start : start + length])
        start += length


def run_in(file: IO[bytes]) -> Iterator[Item]:
    """Return the run in a file."""
    file.seek(0)
    while head := file.read(HEAD.size):
        (length,) = HEAD.unpack(head)
        yield from pickle.loads(file.read(length))


@contextmanager
def merged(references: Sequence[Reference], index: int) -> Iterator[tuple[Groups, float]]:
    """Fetch a reduce task's part of each object, and merge the parts.

    Yields:
        Each key with its values, and the seconds of fetching, and of merging to files.
    """
    worker, _, _ = data_plane("mapreduce")
    began = time.monotonic()
    with ExitStack() as stack:
        runs: list[Iterator[Item]] = []
        groups = in_groups(references, index, share_of_memory(worker))
        for group in groups:
            found = [run_of(memoryview(part)) for part in fetch(group, part=index)]
            if len(groups) > 1:
                file = stack.enter_context(tempfile.TemporaryFile(dir=worker.local_directory))
                for block in blocks_of(heapq.merge(*found, key=itemgetter(0))):
                    file.write(block)
                found = [run_in(file)]
            runs += found
        yield Groups(heapq.merge(*runs, key=itemgetter(0))), time.monotonic() - began


class Groups:
    """Keys, each with an iterator of its values, from items that are ordered by the numbers of their keys."""

    def __init__(self, items: Iterator[Item]):
        self.items = items
        self.next = next(items, None)

    def __iter__(self) -> Iterator[tuple[Any, Iterator[Any]]]:
        while self.next is not None:
            number, key, _ = self.next
            others: dict[Any, list[Any]] = {}
            values = self._values(number, key, others)
            yield key, values
            # Skip values that the reducer did not read.
            for _ in values:
                pass
            # Few different keys have the same number.
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
