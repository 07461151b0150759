"""Arrow tables on their way from map to reduce tasks. The key is the first column.

A map task splits rows by their keys (`crates/columns`), 64 MiB at a time, and puts the parts. A reduce task sorts its
parts. If they are larger than its share of memory, it sorts groups of them to files, and merges the files by blocks.
"""

from __future__ import annotations

import bisect
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mission_control import _native
from mission_control.columns import arrow_array, arrow_buffers, flat_kinds
from mission_control.map_reduce.given import are_items
from mission_control.map_reduce.groups import in_groups, share_of_memory
from mission_control.map_reduce.keys import Ranges
from mission_control.map_reduce.output import whole_file, write_items
from mission_control.map_reduce.pairs import pickled
from mission_control.objects import Reference, allocate, data_plane, fetch, put

TABLE_BYTES = 64 << 20
"""Bytes of rows that a map task holds in memory before it puts them, unless one table is larger."""
SAMPLED_TABLES = 8
"""Tables from which keys are sampled: the rows of one table may be in order, so several are needed."""
BLOCK_BYTES = 1 << 20
"""Bytes of a block of a file: a reduce task holds one block of each file in memory."""
GROUP_BYTES_MAX = 1 << 30
"""Most bytes of a group, so that texts, whose offsets have 31 bits, fit into one array."""

Combiner = Callable[[pa.Table], pa.Table]
Partitioner = Callable[[pa.Array, int], Any]


def is_batch(item: Any) -> bool:
    return isinstance(item, pa.Table | pa.RecordBatch)


def table_of(item: Any) -> pa.Table:
    """Return a table without dictionaries.

    Raises:
        TypeError: The item is no table, or a column is nested.
        ValueError: The table has no column.
    """
    if isinstance(item, pa.RecordBatch):
        item = pa.Table.from_batches([item])
    if not isinstance(item, pa.Table):
        raise TypeError(f"map gave a table of Arrow, and then {type(item).__name__}: give tables, or pairs")
    if not item.num_columns:
        raise ValueError("map gave a table without columns: the first one is the key")
    if item.schema.field(0).type in (pa.float32(), pa.float64()):
        # -0.0 is equal to 0.0, but a function that combines tables may not know.
        item = item.set_column(0, item.schema.field(0), pc.add(item.column(0), pa.scalar(0.0, item.schema.types[0])))
    for place, field in enumerate(item.schema):
        if pa.types.is_dictionary(field.type):
            values = field.type.value_type
            item = item.set_column(place, pa.field(field.name, values), item.column(place).cast(values))
        elif flat_kinds(field.type) is None:
            raise TypeError(f"column {field.name!r} is of type {field.type}, which is nested: give one that is flat")
    return plain(item)


def plain(table: pa.Table) -> pa.Table:
    """Return a table whose columns have only names and types, without nullability and metadata."""
    return pa.Table.from_arrays(table.columns, names=table.column_names)


class Batches:
    """The tables of a map task."""

    def __init__(self, partition: Partitioner | str | Ranges, reducers: int, combine: Combiner | None):
        self.partition, self.reducers, self.combine = partition, reducers, combine
        self.references: list[Reference] = []
        self.schema: pa.Schema | None = None
        self.empty: pa.Schema | None = None
        """Schema of a table without rows."""

    def add_all(self, tables: Iterable[Any]) -> None:
        held: list[pa.Table] = []
        size = 0
        for table in map(table_of, tables):
            if not len(table):
                # Its columns may have the type null.
                self.empty = table.schema
                continue
            self.schema = self.schema or table.schema
            check_schema("map", table.schema, self.schema)
            held.append(table)
            size += table.nbytes
            if size >= TABLE_BYTES:
                held = self._shrunk(held)
                size = sum(own.nbytes for own in held)
        self._put(held)
        self.schema = self.schema or self.empty

    def _shrunk(self, held: list[pa.Table]) -> list[pa.Table]:
        """Put the held rows, or keep them if combining has made them few."""
        if self.combine is not None:
            held = [combined_once(pa.concat_tables(held), self.combine)]
            if held[0].nbytes < TABLE_BYTES // 2:
                return held
        self._put(held, is_combined=True)
        return []

    def _put(self, held: list[pa.Table], is_combined: bool = False) -> None:
        if not held:
            return
        table = pa.concat_tables(held)
        if self.combine is not None and not is_combined:
            table = combined_once(table, self.combine)
        for batch in table.combine_chunks().to_batches():
            if len(batch):
                self.references.append(put_split(batch, self.partition, self.reducers))


def check_schema(who: str, given: pa.Schema, schema: pa.Schema) -> None:
    """Require the same columns.

    Raises:
        ValueError: The columns differ.
    """
    if not given.equals(schema):
        columns = [", ".join(f"{field.name}: {field.type}" for field in own) for own in (given, schema)]
        raise ValueError(f"{who} gave a table of {columns[0]}, where others are of {columns[1]}: give the same columns")


def combined_once(table: pa.Table, combine: Combiner) -> pa.Table:
    made = combine(table)
    if not isinstance(made, pa.Table):
        raise TypeError(f"combine gave {type(made).__name__}: give a table of the same columns")
    made = plain(made)
    check_schema("combine", made.schema, table.schema)
    return made


def put_split(batch: pa.RecordBatch, by: Partitioner | str | Ranges, reducers: int) -> Reference:
    """Put the rows for each reduce task as its part."""
    rows_to = np.ascontiguousarray(places(batch.column(0), by, reducers), np.int64)
    if len(rows_to) != len(batch) or rows_to.min() < 0 or rows_to.max() >= reducers:
        raise ValueError(
            f"partition gave {len(rows_to)} numbers from {rows_to.min() if len(rows_to) else 'none'} to "
            f"{rows_to.max() if len(rows_to) else 'none'} for {len(batch)} keys: reduce tasks are 0 to {reducers - 1}"
        )
    buffers = [own for column in batch.columns for own in arrow_buffers(column, flat_kinds(column.type) or ())]
    split = _native.ColumnSplit(rows_to.data, list(range(reducers)), reducers, buffers)
    segment = allocate(sum(split.sizes))
    split.write([segment])
    return put(segment, sizes=split.sizes)


# --- partition --------------------------------------------------------------------------------------------------------


def places(keys: pa.Array, by: Partitioner | str | Ranges, reducers: int) -> Any:
    """Return the number of the reduce task of each key.

    Raises:
        ValueError: A key is NaN.
        TypeError: There is no hash for such keys.
    """
    if pa.types.is_floating(keys.type) and pc.any(pc.is_nan(keys)).as_py():
        raise ValueError("a key is nan, which is not equal to itself: leave such rows out, or name them")
    if by == "hash":
        return (hashes(keys) % np.uint64(reducers)).astype(np.int64)
    if isinstance(by, Ranges):
        return ranges(keys, by.splitters)
    assert callable(by)
    return by(keys, reducers)


def is_bytes(type: pa.DataType) -> bool:
    """Whether values are texts or bytes, which are ordered by their bytes."""
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(check(type) for check in checks) or pa.types.is_fixed_size_binary(type)


def numbers(keys: pa.Array) -> np.ndarray | None:
    """Convert keys to numbers in the same order, a gap to 0; ``None``: there are no such numbers."""
    if pa.types.is_boolean(keys.type):
        keys = keys.cast(pa.int8())
    if pa.types.is_temporal(keys.type) and keys.type.bit_width in (32, 64):
        keys = keys.view(pa.int32() if keys.type.bit_width == 32 else pa.int64())
    if not pa.types.is_integer(keys.type) and not pa.types.is_floating(keys.type):
        return None
    return pc.fill_null(keys, pa.scalar(0, keys.type)).to_numpy(zero_copy_only=False)


def numbers_of(values: Sequence[Any], type: pa.DataType) -> np.ndarray:
    made = numbers(pa.array(values, type))
    assert made is not None
    return made


def hashes(keys: pa.Array) -> np.ndarray:
    """Return a number for each key, the same in all processes."""
    out = np.empty(len(keys), np.uint64)
    described: Any = None
    if (values := numbers(keys)) is not None:
        kind = "floats" if values.dtype.kind == "f" else "words"
        described = (kind, values.dtype.itemsize, np.ascontiguousarray(values).view(np.uint8).data, None, None)
    elif is_bytes(keys.type):
        if pa.types.is_fixed_size_binary(keys.type):
            keys = keys.cast(pa.large_binary())
        (bits, (_, width, data, offsets)) = arrow_buffers(keys, flat_kinds(keys.type) or ())
        valid = (bits[2], bits[1]) if bits[0] == "bits" else None
        described = ("texts", width, data if data is not None else b"", offsets, valid)
    else:
        raise TypeError(
            f"keys are of type {keys.type}: with partition='hash' they are texts, bytes, numbers or times; give "
            "partition='range', or a function"
        )
    _native.columns_hash([described], False, out.data)
    return out


def ranges(keys: pa.Array, splitters: Sequence[Any]) -> np.ndarray:
    """Return the range of each key; gaps are in the last one."""
    if (values := numbers(keys)) is not None:
        # Python compares times of a zone by their local clock, which is another order.
        found = np.searchsorted(np.sort(numbers_of(splitters, keys.type)), values, side="right")
    elif is_bytes(keys.type):
        found = np.empty(len(keys), np.int64)
        encoded = [own.encode() if isinstance(own, str) else bytes(own) for own in splitters]
        _, column = arrow_buffers(keys, flat_kinds(keys.type) or ())
        _native.columns_ranges(column, encoded, found.data)
    else:
        found = np.array(
            [own is not None and bisect.bisect_right(splitters, own) for own in keys.to_pylist()], np.int64
        )
    if keys.null_count:
        found = np.where(keys.is_null().to_numpy(zero_copy_only=False), len(splitters), found)
    return found


def sample_of(table: pa.Table, count: int) -> list[Any]:
    """Return a number of keys, from all of a table."""
    rows = np.linspace(0, len(table) - 1, min(count, len(table))).astype(np.int64)
    keys = table.column(0).take(pa.array(rows)).combine_chunks().drop_null()
    if pa.types.is_temporal(keys.type) and (values := numbers(keys)) is not None:
        # Python's times have no nanoseconds, and end with the year 9999.
        return values.tolist()
    return [key for key in keys.to_pylist() if key == key]


def sample_of_all(tables: Iterable[Any], count: int) -> list[Any]:
    """Return a number of keys of the first tables that have rows."""
    filled = (table for table in map(table_of, tables) if len(table))
    first = list(itertools.islice(filled, SAMPLED_TABLES))
    return sample_of(pa.concat_tables(own.select([0]) for own in first), count) if first else []


# --- in a reduce task -------------------------------------------------------------------------------------------------


@contextmanager
def merged(
    references: Sequence[Reference], schemas: Sequence[pa.Schema], index: int, combine: Combiner | None
) -> Iterator[tuple[Iterator[pa.Table], float, int]]:
    """Fetch a reduce task's part of each object, and sort its rows by their keys.

    Yields:
        Tables in order; the seconds of fetching, and of sorting to files; and the bytes that the task may hold in
        memory. With `combine` each key is in one table; without, it may continue in the next one.

    Raises:
        ValueError: Map tasks returned different columns.
    """
    schema = schemas[0]
    for other in schemas:
        check_schema("map", other, schema)
    worker, _, endpoint = data_plane("mapreduce")
    limit = min(share_of_memory(worker), GROUP_BYTES_MAX)
    began = time.monotonic()
    with ExitStack() as stack:
        runs: list[Iterator[pa.Table]] = []
        groups = in_groups(references, index, limit)
        for group in groups:
            parts = fetch(group, part=index)
            if combine is not None:
                table = in_order(combined_once(joined(endpoint, parts, schema), combine))
            else:
                table = joined_in_order(endpoint, parts, schema)
            del parts
            if len(groups) > 1:
                file = stack.enter_context(tempfile.TemporaryFile(dir=worker.local_directory))
                write_run(table, file)
                runs.append(read_run(file))
            else:
                runs.append(iter([table]))
            # Freed before the next group is fetched.
            del table
        tables = runs[0] if len(runs) == 1 else merge(runs)
        if combine is not None and len(runs) > 1:
            tables = combined(tables, combine, limit)
        yield tables, time.monotonic() - began, limit


def joined(endpoint: _native.Endpoint, parts: Sequence[Any], schema: pa.Schema) -> pa.Table:
    kinds = [flat_kinds(field.type) or () for field in schema]
    rows, places = endpoint.join_columns(parts, kinds)
    arrays = [arrow_array(field.type, own, rows, at) for field, own, at in zip(schema, kinds, places, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def joined_in_order(endpoint: _native.Endpoint, parts: Sequence[Any], schema: pa.Schema) -> pa.Table:
    """Join and sort; rows of one column of fixed width without an intermediate copy, and several times faster than
    Arrow."""
    type = schema.field(0).type
    if len(schema) == 1 and pa.types.is_fixed_size_binary(type) and type.byte_width:
        made = endpoint.sort_parts(parts, type.byte_width)
        if made is not None:
            column = pa.Array.from_buffers(type, made[0], [None, pa.py_buffer(made[1])])
            return pa.Table.from_arrays([column], schema=schema)
    return in_order(joined(endpoint, parts, schema))


def in_order(table: pa.Table) -> pa.Table:
    """Sort rows by their keys; gaps are last."""
    (first, *others), type = table.columns, table.schema.field(0).type
    if not others and pa.types.is_fixed_size_binary(type) and not first.null_count and len(table):
        return pa.Table.from_arrays([rows_in_order(first.combine_chunks())], schema=table.schema)
    return table.take(pc.sort_indices(first))


def rows_in_order(column: pa.Array) -> pa.Array:
    """Sort rows of one width: several times faster than Arrow, which sorts row numbers with a lookup for each
    comparison."""
    width = column.type.byte_width
    out = allocate(len(column) * width, scratch=True)
    _, (_, _, values, _) = arrow_buffers(column, flat_kinds(column.type) or ())
    assert values is not None
    _native.rows_sort([values], width, width, out)
    return pa.Array.from_buffers(column.type, len(column), [None, pa.py_buffer(out)])


def write_run(table: pa.Table, file: IO[bytes]) -> None:
    rows = max(1, len(table) * BLOCK_BYTES // max(table.nbytes, 1))
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def read_run(file: IO[bytes]) -> Iterator[pa.Table]:
    file.seek(0)
    with pa.ipc.open_stream(file) as reader:
        for batch in reader:
            yield pa.Table.from_batches([batch])


Key = tuple[bool, Any]
"""The sort key of a row: whether its key is a gap, and the key; gaps are last."""


def key_at(table: pa.Table, row: int) -> Key:
    scalar = table.column(0)[row]
    # Times are compared as numbers, because Python's have no nanoseconds.
    value = scalar.value if pa.types.is_temporal(scalar.type) else scalar.as_py()
    return value is None, value


def rows_until(table: pa.Table, key: Key) -> int:
    """Return how many rows of an ordered table have this key, or an earlier one."""
    return bisect.bisect_right(range(len(table)), key, key=lambda row: key_at(table, row))


def rows_before(table: pa.Table, key: Key) -> int:
    return bisect.bisect_left(range(len(table)), key, key=lambda row: key_at(table, row))


def merge(runs: Sequence[Iterator[pa.Table]]) -> Iterator[pa.Table]:
    """Merge runs by blocks: rows up to the smallest last key of the blocks precede all rows that are still to be
    read."""
    heads = [(table, run) for run in runs if (table := next_of(run)) is not None]
    while heads:
        bound = min(key_at(table, len(table) - 1) for table, _ in heads)
        taken, left = [], []
        for table, run in heads:
            count = rows_until(table, bound)
            taken.append(table.slice(0, count))
            rest = table.slice(count) if count < len(table) else next_of(run)
            if rest is not None:
                left.append((rest, run))
        heads = left
        yield in_order(pa.concat_tables(taken))


def next_of(run: Iterator[pa.Table]) -> pa.Table | None:
    return next((table for table in run if len(table)), None)


def combined(tables: Iterable[pa.Table], combine: Combiner, limit: int) -> Iterator[pa.Table]:
    """Combine the rows of keys that continue in the next table."""
    for table in whole_keys(tables, limit, combine):
        yield in_order(combined_once(table, combine))


def whole_keys(tables: Iterable[pa.Table], limit: int, combine: Combiner | None = None) -> Iterator[pa.Table]:
    """Yield tables with all rows of each of their keys; the last key of a table waits for the next table.

    Raises:
        ValueError: The rows of a key have more than `limit` bytes.
    """
    held: pa.Table | None = None
    for table in tables:
        table = table if held is None else pa.concat_tables([held, table])
        if not len(table):
            # The rows that combining left.
            continue
        start = rows_before(table, key_at(table, len(table) - 1))
        if start:
            yield table.slice(0, start)
        held = table.slice(start)
        if combine is not None:
            held = combined_once(held, combine)
        if held.nbytes > limit:
            raise ValueError(
                f"the rows of key {key_at(held, 0)[1]!r} have more than {_native.format_bytes(limit)}: give combine, "
                "or yield pairs, whose values come one after another; or workers with more memory for each thread"
            )
    if held is not None:
        yield held


# --- output -----------------------------------------------------------------------------------------------------------

Reducer = Callable[[pa.Table], Any]


def items_from(reduce: Reducer | None, tables: Iterable[pa.Table], schema: pa.Schema, limit: int) -> Iterator[Any]:
    """Reduce tables in order; without `reduce` they are the items, at least one."""
    if reduce is None:
        first = next(tables := iter(tables), None)
        yield first if first is not None else schema.empty_table()
        yield from tables
        return
    for table in whole_keys(tables, limit):
        made = reduce(table)
        if isinstance(made, pa.Table | pa.RecordBatch | pa.Buffer | bytes | str | memoryview):
            yield made
        elif are_items(made):
            yield from (item for item in made if item is not None)
        elif made is not None:
            raise TypeError(
                f"reduce gave {type(made).__name__}: give a table of Arrow, bytes or a text, or a list of them"
            )


def put_tables(items: Iterable[Any]) -> tuple[Reference, int]:
    """Put items as an object, each as a part; also return their number, for tables that of their rows."""
    parts: list[Any] = []
    count = 0
    for item in items:
        if is_batch(item):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, item.schema) as writer:
                writer.write(item)
            parts.append(sink.getvalue())
            count += item.num_rows
        else:
            parts.append(pickled([item]))
            count += 1
    return put(parts), count


def read_table(part: Any) -> pa.Table:
    with pa.ipc.open_stream(part) as reader:
        return reader.read_all()


def write_tables(items: Iterable[Any], path: str, run: str) -> tuple[str, int]:
    """Write tables to a file of Arrow, or plain bytes; whole or not at all.

    Raises:
        TypeError: An item is neither.
    """
    items = iter(items)
    first: Any = next(items, None)
    if not is_batch(first):
        return write_items(items if first is None else itertools.chain([first], items), path, run)
    count = 0
    with whole_file(path, run) as file, pa.ipc.new_file(file, first.schema) as writer:
        for item in itertools.chain([first], items):
            if not is_batch(item):
                raise TypeError(f"reduce gave a table, and then {item!r}: give tables, or bytes or texts")
            writer.write(item)
            count += item.num_rows
    return path, count
