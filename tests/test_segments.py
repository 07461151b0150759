"""Output segments of calls: never of two calls at once, never also an input, never already put."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import numpy as np
import pytest

from mission_control import _native
from tests.conftest import TOKEN

RECORD, KEY = 100, 10


def records(count: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, count * RECORD, np.uint8).tobytes()


def test_an_input_that_lies_in_the_output_is_refused(endpoint):
    own, content = endpoint(), records(10)
    segment = own.allocate(len(content))
    memoryview(segment)[:] = content
    for overlapping in (segment, memoryview(segment)[-RECORD:], memoryview(segment)[RECORD:]):
        with pytest.raises(ValueError, match="lies in the output"):
            _native.rows_sort(
                [overlapping, content[: len(content) - len(memoryview(overlapping))]], RECORD, KEY, segment
            )
    assert bytes(segment) == content


def test_a_segment_that_was_put_is_written_to_no_more(endpoint):
    own, content = endpoint(), records(10)
    segment = own.allocate(len(content))
    _native.rows_sort([content], RECORD, KEY, segment)
    right = bytes(segment)
    name = own.adopt(segment, [len(content)], json.dumps({"encrypt": "none", "transport": None}))
    with pytest.raises(ValueError, match="was put already"):
        _native.rows_sort([records(10)], RECORD, KEY, segment)
    assert bytes(segment) == right and own.free(name)


def while_it_is_written(segment: _native.Segment, content: bytes, call: Callable[[], object]) -> list[str]:
    """Call repeatedly while another thread sorts into the segment; return the refusals."""
    errors: list[str] = []
    for _ in range(20):
        thread = threading.Thread(target=_native.rows_sort, args=([content], RECORD, KEY, segment))
        thread.start()
        while thread.is_alive() and not errors:
            try:
                call()
            except ValueError as error:
                errors.append(str(error))
        thread.join()
        if errors:
            break
    return errors


def test_two_calls_do_not_write_to_one_segment(endpoint):
    own, contents = endpoint(), [records(400_000, seed) for seed in range(4)]
    segment = own.allocate(len(contents[0]))
    errors, wrote = [], []

    def sort(number: int) -> None:
        try:
            _native.rows_sort([contents[number]], RECORD, KEY, segment)
            wrote.append(number)
        except ValueError as error:
            errors.append(str(error))

    for _ in range(20):
        threads = [threading.Thread(target=sort, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrote and _native.records_check(segment)[:2] == (400_000, True)
        # The last one wrote all of it.
        assert _native.records_check(segment)[4] == _native.records_check(contents[wrote[-1]])[4]
        if errors:
            break
    assert errors and all("another call uses the output" in error for error in errors), errors


def test_what_a_call_writes_is_neither_read_nor_put_meanwhile(endpoint):
    own, content = endpoint(), records(400_000)
    demands = json.dumps({"encrypt": "none", "transport": None})
    segment, other = own.allocate(len(content)), own.allocate(len(content))
    calls = {
        "adopt": lambda: own.adopt(segment, [len(content)], demands),
        "put": lambda: own.free(own.put([memoryview(segment)[RECORD:]], "job", demands)[0]),
        "sort": lambda: _native.rows_sort([segment], RECORD, KEY, other),
        "check": lambda: _native.records_check(memoryview(segment)[RECORD:]),
    }
    for name, call in reversed(calls.items()):
        errors = while_it_is_written(segment, content, call)
        assert errors and "another call writes to this segment" in errors[0], (name, errors)
    # Each call is over, and so is its hold.
    _native.rows_sort([content], RECORD, KEY, segment)


def test_an_identity_with_a_part_missing_is_refused(tmp_path):
    settings = {"memory_limit": 1 << 20, "spool_folder": tmp_path, "flows_per_host": 4}
    with pytest.raises(ValueError, match="all three or none"):
        _native.Endpoint("127.0.0.1", TOKEN, ca=b"x", certificate=b"y", **settings)
