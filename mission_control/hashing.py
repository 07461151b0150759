"""Hashes of rows, bit for bit those of pandas: Dask places a row by the hash of its key.

pandas hashes in several passes with new memory, and texts as individual Python objects. `crates/columns` needs one pass
over the values, without a copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from mission_control import _native
from mission_control.columns import cut

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

Described = tuple[str, int, "Buffer", "Buffer | None", "tuple[Buffer, int] | None"]
"""A column, as :func:`mission_control._native.columns_hash` takes it."""

DEFAULT_KEY = "0123456789123456"
"""The key of pandas (`pandas.core.util.hashing._default_hash_key`)."""

TEXTS = ["", "a", "ß€", "longer than eight bytes", None]
TRIED: dict[str, Any] = {
    "signed": np.array([0, 1, -1, 2**62, -(2**63)]),
    "short": np.array([0, 1, -1, -128], dtype="int8"),
    "unsigned": np.array([0, 2**16 - 1], dtype="uint16"),
    "float": np.array([0.0, -0.0, 1.5, np.inf, -np.inf, np.nan]),
    "half": np.array([0.0, -0.0, 1.5, np.nan], dtype="float16"),
    "truth": np.array([True, False]),
    "time": np.array([0, 10**15, "NaT"], dtype="M8[us]"),
    "double": np.array([0.0, -0.0, 1.5, np.nan], dtype="float32"),
    "span": np.array([0, 10**15, "NaT"], dtype="m8[ns]"),
    "zone": pd.to_datetime(np.array([0, 10**18, "NaT"], dtype="M8[ns]")).tz_localize("UTC").tz_convert("Europe/Paris"),
    "text": pd.array(TEXTS, dtype="str"),
    "arrow text": pd.array(TEXTS, dtype="string[pyarrow]"),
    "cut text": pd.array([*TEXTS, *TEXTS], dtype="string[pyarrow]")[2:9],
    "chunks of text": pd.arrays.ArrowStringArray(pa.chunked_array([pa.array(TEXTS), pa.array(TEXTS)])),
}
"""Values for which both must give the same hashes before anything is hashed natively."""


def describe(values: Any) -> Described | None:
    """Describe one column's values; ``None``: pandas has to hash them."""
    dtype = values.dtype
    if isinstance(dtype, pd.DatetimeTZDtype) or (isinstance(dtype, np.dtype) and dtype.kind in "mM"):
        values = np.asarray(values.view("int64"))
        dtype = values.dtype
    if isinstance(dtype, np.dtype) and dtype.kind in "biuf" and dtype.itemsize <= 8 and dtype.isnative:
        kind = "floats" if dtype.kind == "f" else "words"
        return kind, dtype.itemsize, np.ascontiguousarray(values).view(np.uint8).data, None, None
    if isinstance(dtype, pd.StringDtype) and dtype.storage == "pyarrow":
        return texts(values)
    return None


def texts(values: Any) -> Described | None:
    column = pa.array(values)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    width = 8 if pa.types.is_large_string(column.type) else 4
    validity, offsets, data = column.buffers()
    places = cut(offsets, column.offset * width, (len(column) + 1) * width)
    valid = (validity, column.offset) if validity is not None and column.null_count else None
    return "texts", width, data if data is not None else b"", places if places is not None else b"", valid


def hash_object(
    obj: pd.DataFrame | pd.Series | pd.Index,
    index: bool = True,
    encoding: str = "utf8",
    hash_key: str | None = None,
    categorize: bool = True,
) -> pd.Series:
    """As :func:`pandas.util.hash_pandas_object`, with the same results."""
    is_default = not index and categorize and encoding == "utf8" and hash_key in (None, DEFAULT_KEY)
    if not is_default or isinstance(obj, pd.MultiIndex):
        return pd.util.hash_pandas_object(obj, index, encoding, hash_key, categorize)
    is_frame = isinstance(obj, pd.DataFrame)
    columns = [obj.iloc[:, place]._values for place in range(obj.shape[1])] if is_frame else [obj._values]
    described = [describe(values) for values in columns]
    if not any(described):
        return pd.util.hash_pandas_object(obj, index, encoding, hash_key, categorize)
    given: list[Described] = [
        own or ("hashed", 8, np.ascontiguousarray(pd.util.hash_array(values)).view(np.uint8).data, None, None)
        for own, values in zip(described, columns, strict=True)
    ]
    hashes = np.empty(len(obj), dtype=np.uint64)
    _native.columns_hash(given, is_frame, hashes.data)
    return pd.Series(hashes, index=obj if isinstance(obj, pd.Index) else obj.index, dtype="uint64", copy=False)


def differs() -> str | None:
    """Return the kind of values for which the two differ; ``None``: they agree."""
    for name, values in TRIED.items():
        column = pd.Series(values)
        if not hash_object(column, index=False).equals(pd.util.hash_pandas_object(column, index=False)):
            return name
    frame = pd.DataFrame({"a": [1, 2, 3], "b": [0.5, np.nan, 1.0], "c": ["x", None, "y"]})
    same = hash_object(frame, index=False).equals(pd.util.hash_pandas_object(frame, index=False))
    return None if same else "rows of several columns"


def install() -> None:
    """Make Dask hash natively in this process, if both agree on the test values."""
    from dask.dataframe.dispatch import hash_object_dispatch

    if hash_object_dispatch.dispatch(pd.DataFrame) is hash_object:
        return
    try:
        which = differs()
    except Exception as error:
        which = f"something ({type(error).__name__}: {error})"
    if which is not None:
        logger.warning("Keys are hashed by pandas: this version hashes %s in another way than Mission Control", which)
        return
    hash_by(hash_object)


def uninstall() -> None:
    """Restore pandas' hashing."""
    from dask.dataframe import backends
    from dask.dataframe.dispatch import hash_object_dispatch

    if hash_object_dispatch.dispatch(pd.DataFrame) is hash_object:
        hash_by(backends.hash_object_pandas)


def hash_by(function: Callable[..., Any]) -> None:
    from dask.dataframe import backends  # noqa: F401 - registers pandas' own first
    from dask.dataframe.dispatch import hash_object_dispatch

    hash_object_dispatch.register((pd.DataFrame, pd.Series, pd.Index), function)
