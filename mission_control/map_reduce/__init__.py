"""MapReduce over objects of the data plane: the library with which the paper's jobs were written (paper 001, 5.2)."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from mission_control.jobs import refuse_asynchronous
from mission_control.map_reduce.keys import Ranges, hash_of, partition_by_hash
from mission_control.map_reduce.output import items_of, put_items, write_items
from mission_control.map_reduce.pairs import Table, merged
from mission_control.objects import Reference

if TYPE_CHECKING:
    from distributed import Client, Future

__all__ = ["Output", "items_of", "mapreduce"]

SAMPLES_PER_INPUT = 1000
"""As in the sort workload: with 16 inputs the largest part is within some 10 % of the mean."""

Pairs = Iterable[tuple[Any, Any]]
Mapper = Callable[[Any], Pairs]
Reducer = Callable[[Any, Iterable[Any]], Iterable[Any]]
Combiner = Callable[[Any, Any], Any]
Partitioner = Callable[[Any, int], int]


class Output(NamedTuple):
    """What a reduce task returns."""

    value: Reference | str
    """An object, for :func:`items_of`; or the path of a file."""
    items: int
    map_s: float
    """Seconds of all map tasks together; the same in each output."""
    shuffle_s: float
    """Seconds until this task had what it reduces: fetched, and merged to files where it was too much."""
    reduce_s: float


class Mapped(NamedTuple):
    """What a map task returns."""

    reference: Reference
    seconds: float


def mapreduce(
    inputs: Sequence[Any],
    *,
    map: Mapper,
    reduce: Reducer,
    partition: Partitioner | str = "hash",
    combine: Combiner | None = None,
    reducers: int | None = None,
    sample: Callable[[Any], Iterable[Any]] | None = None,
    outputs: str | os.PathLike[str] | None = None,
    client: Client | None = None,
    name: str = "mapreduce",
) -> list[Future]:
    """Map each input to pairs of keys and values, bring all values of a key together, and reduce them.

    ``mapreduce(paths, map=words, reduce=count, combine=operator.add)`` counts words, if ``words(path)`` yields
    ``(word, 1)`` and ``count(word, counts)`` yields ``(word, sum(counts))``.

    Args:
        inputs: A map task for each: paths, futures, references, whatever `map` takes.
        map: Called with an input; gives pairs. Keys can be hashed.
        reduce: Called with a key and an iterator of its values, in no order; gives any number of items. The values are
            not all in memory, so one key may have half of them.
        partition: Which reduce task gets a key: ``"hash"``; ``"range"``: in order, by a sample of the keys, for which
            the call waits, and each reduce task gets its keys in order; or a function of the key and the number of
            reduce tasks.
        combine: Makes one value of two of the same key, in the map tasks. In any order: it has to be associative and
            commutative. It changes neither, as values may be one and the same object.
        reducers: How many reduce tasks; as many as workers if not given.
        sample: For ``"range"``: some keys of an input; the first 1,000 of `map` if not given, which does for inputs
            that are mixed well.
        outputs: A folder that all workers see: items are bytes or texts, and go to a file for each reduce task.
        client: The cluster; the current one if not given.
        name: Of the stages, as people see them.

    Returns:
        A future of an :class:`Output` for each reduce task.

    Raises:
        ValueError: There are no inputs, or no reducers, or no such partitioner; or `outputs` has files of another job.
        TypeError: The client is asynchronous, or `inputs` is no list.
    """
    from distributed import get_client

    client = client if client is not None else get_client()
    refuse_asynchronous(client)
    if isinstance(inputs, str | bytes | os.PathLike):
        raise TypeError(f"mapreduce({inputs!r}, ..): give a list of inputs, each for a map task")
    inputs = list(inputs)
    count = reducers if reducers is not None else max(len(client.scheduler_info(n_workers=-1)["workers"]), 1)
    if not inputs or count < 1:
        raise ValueError(f"mapreduce of {len(inputs)} inputs to {count} reducers: give at least one of each")
    if not callable(partition) and partition not in ("hash", "range"):
        raise ValueError(f"partition={partition!r}: give 'hash', 'range', or a function of a key and a number")
    if outputs is not None and any(Path(outputs).glob("part-*")):
        raise ValueError(f"outputs={os.fspath(outputs)!r} has files of another job: give a folder without them")
    run = uuid4().hex
    # Dask tells stages by words of letters.
    name = re.sub("[^A-Za-z]", "_", name) or "mapreduce"
    by: Any = partition_by_hash if partition == "hash" else partition
    order: Callable[[Any], Any] = hash_of if partition == "hash" else itself
    if partition == "range":
        keys = partial(sampled, map=map) if sample is None else partial(sampled_by, sample=sample)
        taken = [client.submit(keys, own, key=(f"{name}-sample-{run}", n)) for n, own in enumerate(inputs)]
        # By value: a sample that is taken again may be another one, and keys would go elsewhere.
        by = Ranges.of(client.gather(taken), count)
        del taken
    given = {"map": map, "partition": by, "combine": combine, "reducers": count, "order": order}
    mapped = [
        client.submit(map_one, own, key=(f"{name}-map-{run}", n), pure=False, **given) for n, own in enumerate(inputs)
    ]
    made = []
    for index in range(count):
        path = None if outputs is None else str(Path(outputs).absolute() / f"part-{index:05}")
        key = (f"{name}-reduce-{run}", index)
        made.append(client.submit(reduce_one, mapped, index, reduce, order, path, key=key, pure=False))
    return made


def itself(key: Any) -> Any:
    return key


def sampled(given: Any, map: Mapper) -> list[Any]:
    return [key for key, _ in itertools.islice(map(given), SAMPLES_PER_INPUT) if key == key]


def sampled_by(given: Any, sample: Callable[[Any], Iterable[Any]]) -> list[Any]:
    return [key for key in sample(given) if key == key]


def map_one(
    given: Any,
    map: Mapper,
    partition: Partitioner,
    combine: Combiner | None,
    reducers: int,
    order: Callable[[Any], Any],
) -> Mapped:
    """A map task."""
    began = time.monotonic()
    table = Table(partition, reducers, combine, order)
    table.add_all(map(given))
    return Mapped(table.put(), time.monotonic() - began)


def items_from(reduce: Reducer, key: Any, values: Iterable[Any]) -> Iterable[Any]:
    """Reduce a key.

    Raises:
        TypeError: It gave an item in place of items.
    """
    items = reduce(key, values)
    if isinstance(items, str | bytes | tuple):
        raise TypeError(f"reduce gave {items!r} for {key!r}: yield each item, or return a list of them")
    return items


def reduce_one(
    mapped: list[Mapped], index: int, reduce: Reducer, order: Callable[[Any], Any], path: str | None
) -> Output:
    """A reduce task."""
    began = time.monotonic()
    with merged([own.reference for own in mapped], index) as (groups, shuffle_s):
        items = itertools.chain.from_iterable(items_from(reduce, key, values) for key, values in groups)
        value, count = put_items(items) if path is None else write_items(items, path)
    reduce_s = time.monotonic() - began - shuffle_s
    return Output(value, count, sum(own.seconds for own in mapped), shuffle_s, reduce_s)
