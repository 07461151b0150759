"""Memory that calls fill: never two at once, never what they read, never what was put."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from mission_control import _native
from tests.conftest import TOKEN

RECORD = 100


def records(count: int) -> bytes:
    return np.random.default_rng(1).integers(0, 256, count * RECORD, np.uint8).tobytes()


def test_an_input_that_lies_in_the_output_is_refused(endpoint):
    own, content = endpoint(), records(10)
    segment = own.allocate(len(content))
    memoryview(segment)[:] = content
    for overlapping in (segment, memoryview(segment)[-RECORD:], memoryview(segment)[RECORD:]):
        with pytest.raises(ValueError, match="lies in the output"):
            _native.records_sort([overlapping, content[: len(content) - len(memoryview(overlapping))]], segment)
    assert bytes(segment) == content


def test_a_segment_that_was_put_is_written_to_no_more(endpoint):
    own, content = endpoint(), records(10)
    segment = own.allocate(len(content))
    _native.records_sort([content], segment)
    right = bytes(segment)
    name = own.adopt(segment, [len(content)], json.dumps({"encrypt": "none", "transport": None}))
    with pytest.raises(ValueError, match="was put already"):
        _native.records_sort([records(10)], segment)
    assert bytes(segment) == right and own.free(name)


def test_two_calls_do_not_write_to_one_segment(endpoint):
    own, content = endpoint(), records(400_000)
    segment = own.allocate(len(content))
    errors: list[str] = []

    def sort() -> None:
        try:
            _native.records_sort([content], segment)
        except ValueError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=sort) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("another call writes" in error for error in errors), errors
    count, ordered, _, _, checksum = _native.records_check(segment)
    assert (count, ordered, checksum) == (400_000, True, _native.records_check(content)[4])


def test_an_identity_with_a_part_missing_is_refused(tmp_path):
    settings = {"memory_limit": 1 << 20, "spool_folder": tmp_path, "flows_per_host": 4}
    with pytest.raises(ValueError, match="all three or none"):
        _native.Endpoint("127.0.0.1", TOKEN, ca=b"x", certificate=b"y", **settings)
