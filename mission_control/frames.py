"""Data frames as buffers of columns, which `crates/columns` splits by output partition and joins again.

Numbers, times and the codes of categories are read from pandas' memory and returned in memory of the data plane. Other
columns are converted by Arrow, as in Dask's shuffle. Columns that Arrow cannot hold in flat buffers are pickled value
by value.
"""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from mission_control import _native
from mission_control.columns import Described, Place, arrow_array, arrow_buffers, flat_kinds

if TYPE_CHECKING:
    from typing_extensions import Buffer

UNWANTED = 2**32 - 1
"""The part of an output partition that nobody wants (``Split::new``)."""
OFFSETS_MAX = 2**31 - 1
"""Bytes that Arrow's offsets of 32 bits can name."""


class Encoding(NamedTuple):
    """How to make a column of its buffers."""

    name: str
    """One of ``numpy``, ``time-zone``, ``category``, ``arrow``, ``pickle``."""
    dtype: Any
    """Type in pandas."""
    arrow: pa.DataType | None
    kinds: tuple[tuple[str, int], ...]
    """Kinds of its buffers, as :meth:`mission_control._native.Endpoint.join_columns` takes them."""


@dataclass(frozen=True)
class Schema:
    """The encodings of a frame's columns, then those of its index."""

    columns: tuple[Encoding, ...]
    index: Encoding
    index_name: Any


def unknown_kind(meta: Any) -> str | None:
    """Return why frames like `meta` cannot be encoded; ``None``: they can."""
    if type(meta) is not pd.DataFrame:
        return f"its frames are of {type(meta).__module__}.{type(meta).__name__}, not of pandas"
    if isinstance(meta.index, pd.MultiIndex):
        return "its frames have an index of several levels"
    if meta.columns.has_duplicates or isinstance(meta.columns, pd.MultiIndex):
        return "names of its columns are not unique, or have several levels"
    for name, dtype in [*meta.dtypes.items(), ("index", meta.index.dtype)]:
        known = (
            dtype.kind in "biufmMO"
            if isinstance(dtype, np.dtype)
            else isinstance(
                dtype,
                pd.CategoricalDtype | pd.DatetimeTZDtype | pd.StringDtype | pd.ArrowDtype | pd.BooleanDtype | _Masked,
            )
        )
        if not known:
            return f"column {name!r} is of type {dtype}"
    return None


_Masked = (
    pd.Int8Dtype
    | pd.Int16Dtype
    | pd.Int32Dtype
    | pd.Int64Dtype
    | pd.UInt8Dtype
    | pd.UInt16Dtype
    | pd.UInt32Dtype
    | pd.UInt64Dtype
    | pd.Float32Dtype
    | pd.Float64Dtype
)


# --- from pandas ------------------------------------------------------------------------------------------------------


def dumps(schema: Schema) -> bytes:
    """Return the bytes of a schema; frames that are alike have the same."""
    # Pickled separately, so that objects shared by two columns make no difference.
    return pickle.dumps([pickle.dumps(own) for own in (*schema.columns, schema.index, schema.index_name)])


def loads(described: Buffer) -> Schema:
    """Parse a schema; the bytes come from another worker of the cluster."""
    *columns, index, index_name = (pickle.loads(own) for own in pickle.loads(described))
    return Schema(tuple(columns), index, index_name)


def encode(frame: pd.DataFrame, names: Sequence[Any]) -> tuple[Schema, list[Described]]:
    """Describe the buffers of a frame's columns and its index; they use its memory where possible."""
    buffers: list[Described] = []
    encodings = []
    for column in [*(frame[name] for name in names), frame.index]:
        encoding, own = encode_column(column)
        encodings.append(encoding)
        buffers.extend(own)
    return Schema(tuple(encodings[:-1]), encodings[-1], frame.index.name), buffers


def encode_column(column: pd.Series | pd.Index) -> tuple[Encoding, list[Described]]:
    """Describe the buffers of one column."""
    dtype = column.dtype
    values: Any = column.to_numpy() if isinstance(dtype, np.dtype) else column.array
    if isinstance(dtype, np.dtype) and dtype.kind != "O":
        return fixed("numpy", dtype, values)
    if isinstance(dtype, pd.DatetimeTZDtype):
        return fixed("time-zone", dtype, values.view("int64"))
    if isinstance(dtype, pd.CategoricalDtype):
        return fixed("category", dtype, values.codes)
    arrow: Any = None
    try:
        arrow = objects(values) if isinstance(dtype, np.dtype) else pa.array(values, from_pandas=True)
        if isinstance(arrow, pa.ChunkedArray):
            arrow = arrow.combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, UnicodeEncodeError):
        # Arrow cannot hold these values (half of a character, say), or not so many in one array of the column's type.
        return encode_pickled(dtype, values)
    kinds = flat_kinds(arrow.type) if arrow is not None else None
    if kinds is None:
        return encode_pickled(dtype, values)
    return Encoding("arrow", dtype, arrow.type, kinds), arrow_buffers(arrow, kinds)


EXACT: dict[type, pa.DataType] = {
    str: pa.large_string(),
    bytes: pa.large_binary(),
    bool: pa.bool_(),
    int: pa.int64(),
    datetime.date: pa.date32(),
}
"""Types of Python objects that Arrow preserves; not their subclasses."""


def objects(values: np.ndarray) -> pa.Array | None:
    """Convert Python objects to an Arrow array, if Arrow preserves them and ``None``; it does not preserve other
    gaps."""
    gaps = np.array([value is None for value in values], dtype=bool)
    kinds = {type(value) for value in values[~gaps]}
    exact = EXACT.get(kinds.pop()) if len(kinds) == 1 else None if kinds else pa.null()
    return pa.array(values, type=exact, mask=gaps, from_pandas=False) if exact is not None else None


def fixed(name: str, dtype: Any, values: np.ndarray) -> tuple[Encoding, list[Described]]:
    values = np.ascontiguousarray(values)
    kind = ("fixed", values.dtype.itemsize)
    # Cast to bytes, because Python's buffers have no format for times.
    return Encoding(name, dtype, None, (kind,)), [(*kind, values.view(np.uint8).data, None)]


def encode_pickled(dtype: Any, values: Any) -> tuple[Encoding, list[Described]]:
    column = pa.array([pickle.dumps(value, protocol=5) for value in values], type=pa.large_binary())
    kinds = flat_kinds(column.type)
    assert kinds is not None
    return Encoding("pickle", dtype, column.type, kinds), arrow_buffers(column, kinds)


# --- to pandas --------------------------------------------------------------------------------------------------------


def decode(endpoint: _native.Endpoint, pieces: Sequence[tuple[Schema, Any]], meta: pd.DataFrame) -> pd.DataFrame:
    """Join the parts of an output partition.

    Args:
        pieces: The parts that have rows, in the order of the inputs, each with the schema of its input. Inputs with
            equal schemas share one schema object. Equality is not enough: types of unordered categories are equal in
            any order.
        meta: A frame with the columns' names; its types apply if those of the inputs differ. Its rows do not count:
            Dask makes frames of one row where it derives types (dask/dask issue 11572).
    """
    frames: list[pd.DataFrame] = []
    for _, alike in groupby(pieces, key=lambda piece: id(piece[0])):
        (schema, first), *others = alike
        parts = [first, *(part for _, part in others)]
        frames.extend(decode_alike(endpoint, schema, some, meta) for some in that_fit(schema, parts))
    if not frames:
        return meta.iloc[:0].copy()
    if len(frames) > 1:
        for place in range(len(meta.columns)):
            unite_categories(frames, place)
    frame = frames[0] if len(frames) == 1 else pd.concat(frames)
    return reconciled(frame, meta)


def that_fit(schema: Schema, parts: list[Any]) -> list[list[Any]]:
    """Divide parts so that offsets of 32 bits can name all bytes of a column that is made of some of them."""
    narrow = any(kind == ("variable", 4) for own in (*schema.columns, schema.index) for kind in own.kinds)
    groups: list[list[Any]] = [[]]
    size = 0
    for part in parts:
        size += len(part)
        if narrow and groups[-1] and size > OFFSETS_MAX:
            groups.append([])
            size = len(part)
        groups[-1].append(part)
    return groups


def decode_alike(endpoint: _native.Endpoint, schema: Schema, parts: list[Any], meta: pd.DataFrame) -> pd.DataFrame:
    encodings = (*schema.columns, schema.index)
    rows, places = endpoint.join_columns(parts, [encoding.kinds for encoding in encodings])
    *columns, index = (decode_column(encoding, rows, own) for encoding, own in zip(encodings, places, strict=True))
    for place, (encoding, dtype) in enumerate(zip(schema.columns, meta.dtypes, strict=True)):
        if encoding.arrow == pa.null() and isinstance(encoding.dtype, np.dtype) and dtype != np.dtype(object):
            columns[place] = gaps_of(dtype, rows)
    made = pd.Index(index, dtype=object_or_none(schema.index), name=schema.index_name, copy=False)
    for place, encoding in enumerate(schema.columns):
        if (dtype := object_or_none(encoding)) is not None and meta.dtypes.iloc[place] == dtype:
            columns[place] = pd.Series(columns[place], index=made, dtype=dtype, copy=False)
    frame = pd.DataFrame(dict(enumerate(columns)), index=made, copy=False)
    frame.columns = meta.columns
    return frame


def object_or_none(encoding: Encoding) -> np.dtype | None:
    """Return the type of Python objects that pandas would convert to times; ``None``: they are none."""
    return encoding.dtype if isinstance(encoding.dtype, np.dtype) and encoding.dtype.kind == "O" else None


def decode_column(encoding: Encoding, rows: int, places: Sequence[Place]) -> Any:
    if encoding.name in ("arrow", "pickle"):
        return decode_arrow(encoding, rows, places)
    ((segment, start, length, _, _),) = places
    assert segment is not None
    memory = memoryview(segment)[start : start + length]
    if encoding.name == "numpy":
        return np.frombuffer(memory, encoding.dtype)
    if encoding.name == "time-zone":
        times = pd.DatetimeIndex(np.frombuffer(memory, f"M8[{encoding.dtype.unit}]"), copy=False)
        return times.tz_localize("UTC").tz_convert(encoding.dtype.tz).array
    codes = np.frombuffer(memory, f"i{encoding.kinds[0][1]}")
    return pd.Categorical.from_codes(codes, dtype=encoding.dtype, validate=False)


def decode_arrow(encoding: Encoding, rows: int, places: Sequence[Place]) -> Any:
    assert encoding.arrow is not None
    column = arrow_array(encoding.arrow, encoding.kinds, rows, places)
    dtype = encoding.dtype
    if encoding.name == "pickle":
        return decode_pickled(dtype, column)
    if isinstance(dtype, np.dtype):
        if pa.types.is_large_string(column.type):
            # pandas would make NaN of None.
            return column.to_numpy(zero_copy_only=False)
        return column.to_pandas(date_as_object=True, integer_object_nulls=True).astype(object).array
    return dtype.__from_arrow__(column)


def decode_pickled(dtype: Any, column: pa.Array) -> Any:
    values = np.empty(len(column), dtype=object)
    for row, value in enumerate(column):
        values[row] = pickle.loads(value.as_buffer())
    if isinstance(dtype, pd.ArrowDtype):
        return pd.array([None if value is pd.NA else value for value in values], dtype=dtype)
    return values


def gaps_of(dtype: Any, rows: int) -> Any:
    """Return a column without values, as it would be among others of this type."""
    if isinstance(dtype, pd.CategoricalDtype):
        return pd.Categorical.from_codes(np.full(rows, -1), dtype=dtype)
    if not isinstance(dtype, np.dtype):
        return pd.array([None] * rows, dtype=dtype)
    if dtype.kind in "mM":
        return np.full(rows, "NaT", dtype=dtype)
    return np.full(rows, None, dtype=object) if dtype.kind == "b" else np.full(rows, np.nan)


def unite_categories(frames: list[pd.DataFrame], place: int) -> None:
    """Unify the categories of a column in all frames: those of the first, then those of the others."""
    columns = [frame.iloc[:, place] for frame in frames]
    if not all(isinstance(column.dtype, pd.CategoricalDtype) for column in columns):
        return
    same = len({column.dtype for column in columns}) == 1
    alike = len({column.cat.categories.dtype for column in columns}) == 1
    if same or not alike:
        # Columns that cannot be unified become objects, as in pandas.concat.
        return
    # Different orders result in unordered categories.
    united = pd.api.types.union_categoricals(columns, ignore_order=True)
    for frame, column in zip(frames, columns, strict=True):
        frame.isetitem(place, column.cat.as_unordered().cat.set_categories(united.categories))


def reconciled(frame: pd.DataFrame, meta: pd.DataFrame) -> pd.DataFrame:
    """Convert columns to the types of `meta`, as far as Dask's shuffle does (``convert_shards``)."""
    from pandas.core.dtypes.cast import find_common_type

    other = {}
    for name, dtype in meta.dtypes.items():
        actual = frame[name].dtype
        if actual == dtype or (isinstance(actual, pd.CategoricalDtype) and isinstance(dtype, pd.CategoricalDtype)):
            continue
        both_strings = isinstance(actual, pd.StringDtype) and isinstance(dtype, pd.StringDtype)
        other[name] = dtype if both_strings else find_common_type([actual, dtype])
    return frame.astype(other) if other else frame
