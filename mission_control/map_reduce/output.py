"""What reduce tasks leave: objects, or files."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any
from uuid import uuid4

from mission_control.map_reduce.pairs import of_a_block, pickled
from mission_control.objects import Reference, fetch, put

BUFFER_BYTES = 1 << 20


ARROW_STREAM = 0xFF
"""First byte of a part that is a table (Arrow columnar format, "Encapsulated message format"); a pickle has another."""


def put_items(items: Iterable[Any]) -> tuple[Reference, int]:
    """Put items as an object; returns their number, too. A part has some of them, pickled."""
    items = iter(items)
    parts, count, taken = [], 0, 1
    while some := list(itertools.islice(items, taken)):
        parts.append(pickled(some))
        count, taken = count + len(some), of_a_block(some)
    return put(parts), count


def items_of(reference: Reference) -> Iterator[Any]:
    """Return the items that a reduce task has put. In a task."""
    for number in range(len(reference)):
        part = fetch(reference, part=number)[0]
        if memoryview(part)[0] == ARROW_STREAM:
            from mission_control.map_reduce.batches import read_table

            yield read_table(part)
        else:
            yield from pickle.loads(part)


def write_items(items: Iterable[Any], path: str) -> tuple[str, int]:
    """Write items to a file, whole or not at all.

    Raises:
        TypeError: An item is neither a text nor a buffer of bytes.
    """
    with whole_file(path) as file:
        count = 0
        for item in items:
            try:
                file.write(item.encode() if isinstance(item, str) else memoryview(item))
            except TypeError:
                what = "what goes to files is bytes or texts, with their ends of line"
                raise TypeError(f"reduce gave {item!r}: {what}") from None
            count += 1
    return path, count


@contextmanager
def whole_file(path: str) -> Iterator[IO[bytes]]:
    """Open a file that is there once the block has ended well."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # Another run of the task may be at it, too.
    name = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}-{uuid4().hex}")
    try:
        with open(name, "xb", buffering=BUFFER_BYTES) as file:
            yield file
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
