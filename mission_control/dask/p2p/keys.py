"""Keys of a join whose two sides have unlike types: place equal keys in the same output.

Dask places a row by the hash of its key's bytes. Times in nanoseconds and in microseconds, an Arrow truth value and a
number, or a decimal and a number are equal for pandas and have unlike hashes. Dask then loses the rows that it places
in unlike outputs, without a word. So such keys are converted to a common type before they are hashed. That is
the type that the result's key has, because Dask does not move a result again that is joined on the same key. Keys of
like types stay where Dask places them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa

Kind = Literal["s", "ms", "us", "ns", "number", "truth", "dask"]
"""The type in which a key is compared: a unit of time, a number, a truth value that may be missing, or as Dask does."""

UNITS: dict[str, int] = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Units of time of pandas, and how many of each are a second."""
NAT = np.iinfo(np.int64).min
"""How NumPy and pandas store a missing time."""
MISSING_TRUTH = 2


@dataclass(frozen=True)
class Keys:
    """The keys of one side of a join.

    Args:
        columns: Their labels, in the order in which the other side's are compared with them; ``None``: the index.
        kinds: The type in which each is compared.
    """

    columns: tuple[Hashable, ...] | None
    kinds: tuple[Kind, ...]

    def __str__(self) -> str:
        kinds = ", ".join(kind for kind in self.kinds if kind != "dask")
        return f"the sides of its join have keys of unlike types, which it compares as {kinds}"

    def places(self, frame: pd.DataFrame, npartitions: int) -> np.ndarray:
        """Return the output of each row: Dask's, had the keys the common type.

        Returns:
            int64, shape (rows,).
        """
        from dask.dataframe.shuffle import partitioning_index

        columns = (
            [frame.index.to_series(index=frame.index)] if self.columns is None else [frame[own] for own in self.columns]
        )
        keys = [compared(column, kind) for column, kind in zip(columns, self.kinds, strict=True)]
        index = pd.DataFrame(dict(enumerate(keys)), index=frame.index)
        return np.array(partitioning_index(index, npartitions), dtype=np.int64)


def common_kinds(left: list[Any], right: list[Any], how: str = "outer") -> tuple[Kind, ...] | None:
    """Return the types in which keys of two sides are compared.

    Args:
        left: The types of pandas of one side's keys.
        right: Those of the other side's.
        how: The kind of the join.

    Returns:
        ``None``: all are as Dask compares them.
    """
    pairs = zip(left, right, strict=True) if how != "right" else zip(right, left, strict=True)
    kinds = tuple(_common(*pair, how) for pair in pairs)
    return None if set(kinds) == {"dask"} else kinds


def _common(main: Any, other: Any, how: str) -> Kind:
    """`main` is the side whose type the result's key has, unless it has rows of both."""
    truth = pd.ArrowDtype(pa.bool_())
    if main == other:
        # The hash of Arrow's truth values depends on whether the partition has missing ones.
        return "truth" if main == truth else "dask"
    units = [unit for unit in (unit_of(main), unit_of(other)) if unit is not None]
    if len(units) == 2:
        alike = units[0] == units[1] and plain_time(main) and plain_time(other)
        unit: Any = max(units, key=UNITS.__getitem__) if how == "outer" else units[0]
        return "dask" if alike else unit
    numbers = [is_number(values_type(own)) for own in (main, other)]
    if not any(numbers) or (as_float(main) and as_float(other)):
        return "dask"
    if not all(numbers) and object not in (values_type(main), values_type(other)):
        return "dask"
    return "truth" if main == truth and how != "outer" else "number"


def values_type(dtype: Any) -> Any:
    """The type of a key's values: a category's values have one of their own."""
    return dtype.categories.dtype if isinstance(dtype, pd.CategoricalDtype) else dtype


def unit_of(dtype: Any) -> str | None:
    """The unit of a type of times or of spans of time; ``None``: it is neither."""
    dtype = values_type(dtype)
    if isinstance(dtype, pd.DatetimeTZDtype):
        return str(dtype.unit)
    if isinstance(dtype, pd.ArrowDtype):
        return getattr(dtype.pyarrow_dtype, "unit", None) if dtype.kind in "mM" else None
    if isinstance(dtype, np.dtype) and dtype.kind in "mM":
        return str(np.datetime_data(dtype)[0])
    return None


def plain_time(dtype: Any) -> bool:
    """Whether Dask hashes the times of this type as they are stored, whatever their zone."""
    return isinstance(dtype, pd.DatetimeTZDtype | np.dtype)


def is_number(dtype: Any) -> bool:
    return bool(pd.api.types.is_numeric_dtype(dtype) or pd.api.types.is_bool_dtype(dtype))


def as_float(dtype: Any) -> bool:
    """Whether Dask hashes values of this type as 64-bit floats."""
    return bool(pd.api.types.is_numeric_dtype(values_type(dtype)))


def compared(column: pd.Series, kind: Kind) -> Any:
    """Convert a key to the type in which it is compared."""
    if kind == "dask":
        return column.astype(np.float64, errors="ignore") if as_float(column.dtype) else column
    if isinstance(column.dtype, pd.CategoricalDtype):
        missing = {"number": np.nan, "truth": MISSING_TRUTH}.get(kind, NAT)
        of_categories = compared(column.dtype.categories.to_series(), kind)
        return np.append(of_categories, missing)[column.cat.codes.to_numpy()]
    if kind in UNITS:
        return in_unit(column, kind)
    if column.dtype == object:
        numbers = np.fromiter((_float(own) for own in column.to_numpy()), np.float64, len(column))
    else:
        numbers = column.to_numpy(np.float64, na_value=np.nan)
    if kind == "number":
        return numbers
    # Truth values have the hashes of these numbers. Others equal none of them, and may lie anywhere.
    truth = np.full(len(column), MISSING_TRUTH, dtype=np.int8)
    truth[numbers == 0], truth[numbers == 1] = 0, 1
    return truth


def _float(value: Any) -> float:
    """A value of a column of objects. What is no number equals none of the other side, so it may lie anywhere."""
    try:
        return float(value) if isinstance(value, Real | Decimal | np.bool_) else np.nan
    except (OverflowError, ValueError):
        return np.inf


def in_unit(column: pd.Series, unit: str) -> np.ndarray:
    """Return times as int64 in a unit, modulo 2**64: equal times stay equal, however far from 1970.

    Times between two of a coarser unit equal none of it, and may lie anywhere.

    Raises:
        ValueError: The column has something else than times.
    """
    own = unit_of(column.dtype)
    if own is None:
        # The partition is not of the type that the frame's meta has.
        try:
            column = pd.Series(pd.to_datetime(column)) if not column.isna().all() else column.astype("M8[s]")
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"key {column.name!r} has {column.dtype} where the frame's meta has times: {error}"
            ) from None
        own = str(unit_of(column.dtype))
    times: Any = column.array
    if isinstance(column.dtype, pd.ArrowDtype):
        stored = pa.array(times)
        stored = stored.combine_chunks() if isinstance(stored, pa.ChunkedArray) else stored
        values = stored.view(pa.int64()).fill_null(NAT).to_numpy(zero_copy_only=False)
    else:
        values = np.asarray(times.view("int64"))
    if own == unit:
        return values
    if UNITS[own] > UNITS[unit]:
        parts = UNITS[own] // UNITS[unit]
        return np.where((values == NAT) | (values % parts != 0), NAT, values // parts)
    with np.errstate(over="ignore"):
        return np.where(values == NAT, NAT, values * (UNITS[unit] // UNITS[own]))
