"""The output of reduce tasks: objects, or files."""

from __future__ import annotations

import itertools
import os
import pickle
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any
from uuid import uuid4

from mission_control.map_reduce.pairs import of_a_block, pickled
from mission_control.objects import Reference, fetch, put

BUFFER_BYTES = 1 << 20
MARK = ".job"
"""In a folder of outputs: the file that names its job."""
MARK_LOOKS, MARK_LOOK_S = 100, 0.02
"""Number of checks whether that file is written, and the pause between them."""

ARROW_STREAM = 0xFF
"""First byte of a part that is a table (Arrow columnar format, "Encapsulated message format"); a pickle has another."""


def put_items(items: Iterable[Any]) -> tuple[Reference, int]:
    """Put items as an object; also return their number. A part has some of them, pickled."""
    items = iter(items)
    parts, count, taken = [], 0, 1
    while some := list(itertools.islice(items, taken)):
        parts.append(pickled(some))
        count, taken = count + len(some), of_a_block(some)
    return put(parts), count


def items_of(reference: Reference) -> Iterator[Any]:
    """Return the items that a reduce task has put. Must be called in a task."""
    for number in range(len(reference)):
        part = fetch(reference, part=number)[0]
        if memoryview(part)[0] == ARROW_STREAM:
            from mission_control.map_reduce.batches import read_table

            yield read_table(part)
        else:
            yield from pickle.loads(part)


def write_items(items: Iterable[Any], path: str, run: str) -> tuple[str, int]:
    """Write items to a file of this run of a job, whole or not at all.

    Raises:
        TypeError: An item is neither a text nor a buffer of bytes.
    """
    with whole_file(path, run) as file:
        count = 0
        for item in items:
            try:
                file.write(item.encode() if isinstance(item, str) else memoryview(item))
            except TypeError:
                what = "have reduce give bytes or texts, with their ends of line"
                raise TypeError(f"{item!r} cannot go to a file: {what}") from None
            count += 1
    return path, count


@contextmanager
def whole_file(path: str, run: str) -> Iterator[IO[bytes]]:
    """Open a file that is there once the block has ended well.

    Raises:
        ValueError: Its folder belongs to another run of a job.
    """
    folder, file_name = os.path.split(path)
    claim(folder, run)
    # Another run of the task may write it at the same time.
    name = os.path.join(folder, f".{file_name}-{uuid4().hex}")
    try:
        with open(name, "xb", buffering=BUFFER_BYTES) as file:
            yield file
        # An abandoned task may get here late, and find the files of the next job.
        claim(folder, run)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def claim(folder: str, run: str) -> None:
    """Reserve a folder for this run of a job.

    Raises:
        ValueError: The folder belongs to another run.
    """
    os.makedirs(folder, exist_ok=True)
    mark = os.path.join(folder, MARK)
    with suppress(FileExistsError), open(mark, "x") as file:
        file.write(run)
    whose = ""
    for _ in range(MARK_LOOKS):
        with open(mark) as file:
            if whose := file.read():
                break
        # The process that made the file has not written it yet.
        time.sleep(MARK_LOOK_S)
    if whose != run:
        raise ValueError(
            f"{folder} has files of another job, which may still run: give another folder as outputs, or remove it"
        )
