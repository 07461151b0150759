"""What reduce tasks leave: objects, or files."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

from mission_control.map_reduce.pairs import of_a_block, pickled
from mission_control.objects import Reference, fetch, put

BUFFER_BYTES = 1 << 20


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
    for part in range(len(reference)):
        yield from pickle.loads(fetch(reference, part=part)[0])


def write_items(items: Iterable[Any], path: str) -> tuple[str, int]:
    """Write items to a file, whole or not at all.

    Raises:
        TypeError: An item is neither bytes nor a text.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    count = 0
    # Another run of the task may be at it, too.
    name = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}-{uuid4().hex}")
    try:
        with open(name, "xb", buffering=BUFFER_BYTES) as file:
            for item in items:
                if not isinstance(item, bytes | str):
                    raise TypeError(
                        f"reduce gave {item!r}: what goes to files is bytes or texts, with their ends of line"
                    )
                file.write(item if isinstance(item, bytes) else item.encode())
                count += 1
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    return path, count
