"""The hash of a key decides the place of a row, so native hashes are those of pandas, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from mission_control import hashing

NUMBERS = [f"{kind}{width}" for kind in "iu" for width in (1, 2, 4, 8)] + ["f2", "f4", "f8", "?"]
TIMES = [f"{kind}[{unit}]" for kind in ("M8", "m8") for unit in ("s", "ms", "us", "ns")]


def same(column: Any) -> None:
    expected = pd.util.hash_pandas_object(column, index=False)
    pd.testing.assert_series_equal(hashing.hash_object(column, index=False), expected)


@pytest.mark.parametrize("dtype", NUMBERS + TIMES)
def test_numbers_and_times_of_any_bits(dtype):
    """Any bit patterns: all kinds of NaN, both zeros, the smallest and the largest."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        memory = random.bytes(8 * random.integers(0, 300))
        memory += b"\0" * 8 + b"\xff" * 8 + b"\0" * 7 + b"\x80" + b"\0" * 6 + b"\xf8\x7f"
        values = np.frombuffer(memory, "u1") % 2 if dtype == "?" else np.frombuffer(memory, dtype)
        values = values.astype("?") if dtype == "?" else values
        same(pd.Series(values))
        same(pd.Series(values[::3]))
        if dtype != "f2":  # pandas has no such index
            same(pd.Index(values))


@pytest.mark.parametrize("dtype", ["str", "string[pyarrow]", "string[python]", object, pd.ArrowDtype(pa.string())])
def test_texts_of_any_length_and_missing_ones(dtype):
    letters = ["", "a", "ß", "€", "🙂", "\0", "word "]
    for seed in range(30):
        random = np.random.default_rng(seed)
        texts = ["".join(random.choice(letters, random.integers(0, 40))) for _ in range(random.integers(0, 60))]
        missing = [None if random.random() < 0.2 else text for text in texts]
        for values in (texts, missing):
            column = pd.Series(pd.array(values, dtype=dtype) if dtype is not object else np.array(values, dtype=object))
            same(column)
            same(column[1:-1])
            same(pd.concat([column, column[::-1]]))


def test_everything_else_and_rows_of_several_columns():
    random = np.random.default_rng(1)
    frame = pd.DataFrame(
        {
            "number": random.integers(-9, 9, 200),
            "text": pd.array(random.choice(["a", "b", None], 200), dtype="str"),
            "zone": pd.to_datetime(random.integers(0, 1 << 60, 200)).tz_localize("UTC").tz_convert("Asia/Kolkata"),
            "kind": pd.Categorical(random.choice(["x", "y"], 200)),
            "masked": pd.array(random.choice([1, 2, None], 200), dtype="Int32"),
            "complex": random.random(200) * 1j,
            "mixed": np.array([1, "a"] * 100, dtype=object),
        }
    )
    same(frame)
    same(frame[["number"]])
    same(frame[["kind", "number"]])
    same(frame[[]])
    same(frame[:0])
    for name in frame:
        same(frame[name])
    same(pd.Index(frame["zone"]))
    assert hashing.hash_object(frame).equals(pd.util.hash_pandas_object(frame)), "with the index, as pandas does"
    assert hashing.differs() is None


def test_a_version_of_pandas_that_hashes_otherwise_hashes_itself(monkeypatch, caplog):
    from dask.dataframe.dispatch import hash_object_dispatch

    before = hash_object_dispatch.dispatch(pd.Series)
    real = pd.util.hash_pandas_object
    monkeypatch.setattr(pd.util, "hash_pandas_object", lambda *given, **named: real(*given, **named) + 1)
    hashing.install()
    assert hash_object_dispatch.dispatch(pd.Series) is before and "hashed by pandas" in caplog.text
    monkeypatch.undo()
    hashing.install()
    assert hash_object_dispatch.dispatch(pd.Series) is hashing.hash_object
    hashing.uninstall()
    assert hash_object_dispatch.dispatch(pd.Series) is not hashing.hash_object
