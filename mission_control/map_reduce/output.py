"""What reduce tasks leave: objects, or files."""

from __future__ import annotations

import itertools
import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

from mission_control.objects import Reference, fetch, put

ITEMS = 4096
"""Of a part of an object."""
BUFFER_BYTES = 1 << 20


def put_items(items: Iterable[Any]) -> tuple[Reference, int]:
    """Put items as an object; returns their number, too. A part has some of them, pickled."""
    items = iter(items)
    parts, count = [], 0
    while some := list(itertools.islice(items, ITEMS)):
        parts.append(pickle.dumps(some, protocol=5))
        count += len(some)
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
    descriptor, name = tempfile.mkstemp(prefix=f".{os.path.basename(path)}-", dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb", buffering=BUFFER_BYTES) as file:
            for item in items:
                if not isinstance(item, bytes | str):
                    raise TypeError(
                        f"reduce gave {item!r}: what goes to files is bytes or texts, with their ends of line"
                    )
                file.write(item if isinstance(item, bytes) else item.encode())
                count += 1
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path, count
