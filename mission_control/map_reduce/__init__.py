"""MapReduce over objects of the data plane: the library with which the paper's jobs were written (paper 001, 5.2)."""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import cloudpickle  # type: ignore[import-untyped]

from mission_control.jobs import refuse_unusable
from mission_control.map_reduce import pairs
from mission_control.map_reduce.given import are_items, shown
from mission_control.map_reduce.keys import Ranges, hash_of, partition_by_hash
from mission_control.map_reduce.output import items_of, put_items, write_items
from mission_control.map_reduce.pairs import Table
from mission_control.map_reduce.phases import note_phases
from mission_control.objects import Reference
from mission_control.workers import workers_of

if TYPE_CHECKING:
    from distributed import Client, Future

__all__ = ["Output", "items_of", "mapreduce"]

SAMPLES_PER_INPUT = 1000
"""Default sample of an input, as in the sort workload: with 16 inputs the largest part is within about 10 % of the
mean."""

Mapper = Callable[[Any], Iterable[Any]]
Reducer = Callable[[Any, Iterable[Any]], Iterable[Any]]


class Output(NamedTuple):
    """The result of a reduce task."""

    value: Reference | str
    """An object, for :func:`items_of`; or the path of a file."""
    items: int
    map_s: float
    """Seconds of all map tasks together; the same in each output."""
    shuffle_s: float
    """Seconds until this task had its input: fetched, and merged to files if it was too large."""
    reduce_s: float


class Mapped(NamedTuple):
    """The result of a map task."""

    references: list[Reference]
    """Objects, each with a part for each reduce task."""
    schema: Any
    """Schema of tables; ``None``: the items are pairs, or there are none."""
    seconds: float


def mapreduce(
    inputs: Sequence[Any],
    *,
    map: Mapper,
    reduce: Callable[..., Any] | None = None,
    partition: Callable[[Any, int], Any] | str = "hash",
    combine: Callable[..., Any] | None = None,
    reducers: int | None = None,
    sample: Callable[[Any], Iterable[Any]] | None = None,
    outputs: str | os.PathLike[str] | None = None,
    client: Client | None = None,
    name: str = "mapreduce",
) -> list[Future]:
    """Map each input to pairs of keys and values, group the values by key, and reduce each group.

    Instead of pairs `map` may return tables of Arrow (`pyarrow.Table`, `RecordBatch`), whose first column is the key.
    Then `combine` makes a table with the same columns and fewer rows of a table. `reduce` is called with tables in
    order of their keys, each of which has all rows of its keys, and returns a table, bytes or a text, ``None``, or an
    iterable of them. A function as `partition` is called with the array of keys, and returns an array of numbers.

    ``mapreduce(paths, map=words, reduce=count, combine=operator.add)`` counts words, if ``words(path)`` yields
    ``(word, 1)`` and ``count(word, counts)`` yields ``(word, sum(counts))``.

    Args:
        inputs: One map task for each: paths, futures, references, any value that `map` takes.
        map: Called with an input; returns pairs. Keys must be hashable.
        reduce: Called with a key and an iterator of its values, in no order; returns any number of items. The values
            are not all in memory, so one key may have half of them. By default the pairs are the items, or the tables
            (in which a key may continue in the next table).
        partition: Chooses the reduce task of a key. ``"hash"``; ``"range"``: ranges of keys from a sample, for which
            this call waits, and each reduce task gets its keys in order; or a function of the key and the number of
            reduce tasks.
        combine: Combines two values of a key to one, in the map tasks; without `reduce` also in the reduce tasks, so
            that each key is one item. The order is undefined, so it must be associative and commutative. It must not
            modify its arguments, which may be the same object.
        reducers: Number of reduce tasks; by default the number of workers.
        sample: For ``"range"``: returns some keys of an input; by default the first 1,000 of `map`, which is enough for
            well mixed inputs.
        outputs: A folder shared by all workers: items are bytes or texts, written to one file for each reduce task.
        client: The Dask client; by default the current one.
        name: Name of the stages, as shown to users.

    Returns:
        A future of an :class:`Output` for each reduce task.

    Raises:
        ValueError: There are no inputs, or no reducers, or no such partitioner; or `outputs` has files of another job.
        TypeError: The client is asynchronous, or `inputs` is no list.
    """
    from distributed import get_client

    client = client if client is not None else get_client()
    refuse_unusable(client)
    if isinstance(inputs, str | bytes | os.PathLike):
        raise TypeError(f"mapreduce({inputs!r}, ..): give a list of inputs, each for a map task")
    inputs = list(inputs)
    count = reducers if reducers is not None else max(len(workers_of(client)), 1)
    if not inputs or count < 1:
        raise ValueError(f"mapreduce of {len(inputs)} inputs to {count} reducers: give at least one of each")
    if not callable(partition) and partition not in ("hash", "range"):
        raise ValueError(f"partition={partition!r}: give 'hash', 'range', or a function of a key and a number")
    if outputs is not None and any(Path(outputs).glob("part-*")):
        raise ValueError(f"outputs={os.fspath(outputs)!r} has files of another job: give a folder without them")
    run = uuid4().hex
    # Dask recognises stages by words of letters.
    name = re.sub("[^A-Za-z]", "_", name) or "mapreduce"
    by: Any = partition
    if partition == "range":
        keys = partial(sampled, map=map) if sample is None else partial(sampled_by, sample=sample)
        taken = [client.submit(keys, own, key=(f"{name}-sample-{run}", n)) for n, own in enumerate(inputs)]
        # Passed by value: another sample would differ, and send keys to other reduce tasks.
        by = Ranges.of((pickle.loads(own) for own in client.gather(taken)), count)
        del taken
    given = {"map": map, "partition": by, "combine": combine, "reducers": count}
    mapped = [
        client.submit(map_one, own, key=(f"{name}-map-{run}", n), pure=False, **given) for n, own in enumerate(inputs)
    ]
    made = []
    for index in range(count):
        path = None if outputs is None else str(Path(outputs).absolute() / f"part-{index:05}")
        key = (f"{name}-reduce-{run}", index)
        made.append(client.submit(reduce_one, mapped, index, reduce, combine, path, run, key=key, pure=False))
    return made


def itself(key: Any) -> Any:
    return key


def sampled(given: Any, map: Mapper) -> bytes:
    """Return some keys of an input, pickled as one value: Dask would send a list item by item."""
    return cloudpickle.dumps(sample_of(given, map))


def sample_of(given: Any, map: Mapper) -> list[Any]:
    first, items = peeked(map(given))
    if is_batch(first):
        from mission_control.map_reduce.batches import sample_of_all

        return sample_of_all(items, SAMPLES_PER_INPUT)
    return [key for key, _ in itertools.islice(items, SAMPLES_PER_INPUT) if key == key]


def sampled_by(given: Any, sample: Callable[[Any], Iterable[Any]]) -> bytes:
    """As :func:`sampled`, with the user's function."""
    return cloudpickle.dumps([key for key in sample(given) if key == key])


def peeked(given: Any) -> tuple[Any, Iterable[Any]]:
    """Return the first item of `map`, ``None`` if there is none, and an iterator of all.

    Raises:
        TypeError: `map` returned something else.
    """
    if is_batch(given):
        return given, [given]
    if not are_items(given):
        raise TypeError(
            f"map gave {shown(given)}: yield pairs of a key and a value, or return a list of them; or tables of Arrow"
        )
    items = iter(given)
    first = list(itertools.islice(items, 1))
    if first and not is_batch(first[0]) and not (isinstance(first[0], tuple | list) and len(first[0]) == 2):
        raise TypeError(f"map gave {shown(first[0])}, which is no pair: yield a key and a value")
    return first[0] if first else None, itertools.chain(first, items)


def is_batch(item: Any) -> bool:
    """Whether an item is a table of Arrow, without importing Arrow."""
    if "pyarrow" not in sys.modules:
        return False
    from mission_control.map_reduce import batches

    return batches.is_batch(item)


def map_one(given: Any, map: Mapper, partition: Any, combine: Any, reducers: int) -> Mapped:
    """A map task."""
    began = time.monotonic()
    first, items = peeked(map(given))
    made: Any
    if is_batch(first):
        from mission_control.map_reduce.batches import Batches

        made = Batches(partition, reducers, combine)
    else:
        by, order = (partition_by_hash, hash_of) if partition == "hash" else (partition, itself)
        made = Table(by, reducers, combine, order)
    made.add_all(items)
    seconds = time.monotonic() - began
    note_phases(map_s=seconds)
    return Mapped(made.references, getattr(made, "schema", None), seconds)


def items_from(reduce: Reducer | None, combine: Any, key: Any, values: Iterable[Any]) -> Iterable[Any]:
    """Reduce a key; without `reduce` its pairs are the items.

    Raises:
        TypeError: `reduce` returned an item instead of items.
    """
    if reduce is None:
        return [(key, functools.reduce(combine, values))] if combine is not None else ((key, own) for own in values)
    items = reduce(key, values)
    if not are_items(items):
        raise TypeError(f"reduce gave {shown(items)} for {key!r}: yield each item, or return a list of them")
    return items


def reduce_one(mapped: list[Mapped], index: int, reduce: Any, combine: Any, path: str | None, run: str) -> Output:
    """A reduce task."""
    began = time.monotonic()
    references = list(itertools.chain.from_iterable(own.references for own in mapped))
    schemas = [own.schema for own in mapped if own.schema is not None]
    # The types of empty columns are undefined, so they do not count.
    schemas = [own.schema for own in mapped if own.references and own.schema is not None] or schemas[:1]
    with ExitStack() as stack:
        if schemas:
            from mission_control.map_reduce import batches

            if any(own.references and own.schema is None for own in mapped):
                raise TypeError("map gave tables of Arrow for some inputs, and pairs for others: give the same for all")
            merged = batches.merged(references, schemas, index, combine)
            tables, shuffle_s, limit = stack.enter_context(merged)
            items = batches.items_from(reduce, tables, schemas[0], limit)
            value, count = batches.put_tables(items) if path is None else batches.write_tables(items, path, run)
        else:
            groups, shuffle_s = stack.enter_context(pairs.merged(references, index))
            each = (items_from(reduce, combine, key, values) for key, values in groups)
            items = itertools.chain.from_iterable(each)
            value, count = put_items(items) if path is None else write_items(items, path, run)
    reduce_s = time.monotonic() - began - shuffle_s
    note_phases(shuffle_s=shuffle_s, reduce_s=reduce_s)
    return Output(value, count, sum(own.seconds for own in mapped), shuffle_s, reduce_s)
