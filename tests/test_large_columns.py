"""Text of more bytes than 32-bit offsets can name, in one output partition."""

from __future__ import annotations

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pytest

from mission_control import _native, frames

TEXT = pd.ArrowDtype(pa.string())


def parts_of(own: _native.Endpoint, inputs: list[pd.DataFrame]) -> list[tuple[frames.Schema, bytes]]:
    """Encode inputs as a shuffle with one output does."""
    made = []
    for frame in inputs:
        schema, buffers = frames.encode(frame, frame.columns)
        split = _native.ColumnSplit(np.zeros(len(frame), dtype=np.int64).data, [0], 1, buffers)
        segment = own.allocate(sum(split.sizes), ("job", "{}"), 0)
        split.write([segment])
        made.append((schema, bytes(segment)))
    # Inputs with equal schemas share one.
    return [(made[0][0], part) for _, part in made]


def test_columns_are_joined_in_chunks(endpoint, monkeypatch):
    own = endpoint()
    inputs = [
        pd.DataFrame(
            {
                "text": pd.array([None if n % 7 == 0 else f"{number} {n}" * 20 for n in range(100)], dtype=TEXT),
                "number": np.arange(100) + number,
                "kind": pd.Categorical(["a", "b"] * 50, categories=["b", "a"]),
            },
            index=pd.Index(np.arange(100) * number, name="at"),
        )
        for number in range(1, 6)
    ]
    parts = parts_of(own, inputs)
    whole = frames.decode(own, parts, inputs[0])
    monkeypatch.setattr(frames, "OFFSETS_MAX", 2 * max(len(part) for _, part in parts))
    chunked = frames.decode(own, parts, inputs[0])
    assert pa.array(chunked["text"]).num_chunks == 3
    for joined in (whole, chunked):
        pd.testing.assert_frame_equal(joined, pd.concat(inputs))


@pytest.mark.long
@pytest.mark.skipif(psutil.virtual_memory().total < 16 << 30, reason="it is three times in memory")
def test_more_than_two_gibibytes_of_text_arrive(endpoint):
    own = endpoint(memory_limit=8 << 30)
    each = [pd.DataFrame({"text": pd.array([chr(97 + number) * (4 << 20)] * 180, dtype=TEXT)}) for number in range(3)]
    joined = frames.decode(own, parts_of(own, each), each[0])
    assert len(joined) == 540
    assert all(joined["text"].iloc[at] == chr(97 + at // 180) * (4 << 20) for at in range(0, 540, 20))
