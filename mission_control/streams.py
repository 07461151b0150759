"""Streams: tasks read data while another task still writes it (CIEL's streaming references: paper 001, table 4.1)."""

from __future__ import annotations

import json
import operator
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mission_control import _native
from mission_control.objects import Reference, contiguous, current_task, data_plane

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from mission_control.dask.worker import MissionControlWorker

AHEAD_BYTES = 256 << 20
"""Default of ``ahead``: a few seconds of a fast link, so that short pauses of a reader do not block its writer."""

CONTINUES = "mission_control_continues"
"""Name of the annotation with which a task returns to a worker where its thread waits: for each lost stream the new
one, and the address of its writer's data plane."""


class StreamReference(Reference):
    """Names a stream; small, and picklable.

    It is the result of the task that writes the stream, and available as soon as the stream begins. The stream lives as
    long as a result on the scheduler carries its reference. If the worker of the writer is lost, even after the stream
    was written, the task runs again, and so do its readers; or they continue, if the stream is `deterministic`.
    """

    __slots__ = ("deterministic", "parts")

    def __init__(
        self, object: str, worker: str, address: str, job: str, stage: str, parts: int, deterministic: bool = False
    ):
        # The stream stays where it is written: no other worker may have a copy.
        super().__init__(object, worker, address, job, stage, b"", copies=0)
        self.parts = parts
        self.deterministic = deterministic

    def __len__(self) -> int:
        """Number of parts."""
        return self.parts

    def __reduce__(self) -> tuple[Any, ...]:
        place = (self.object, self.worker, self.address)
        return StreamReference, (*place, self.job, self.stage, self.parts, self.deterministic)

    def __repr__(self) -> str:
        return f"<Reference to a stream of {self.parts} parts that {self.stage} writes on {self.worker}>"


class Stream:
    """A stream that a task writes: ``with open_stream(parts=n) as out: out.write(part, buffer)``.

    Several threads may write. If the block ends with an error, readers get that error at once.
    """

    def __init__(self, writer: _native.StreamWriter, reference: StreamReference):
        self._writer = writer
        self.reference = reference
        """The reference for readers."""

    def write(self, part: int, buffer: Buffer) -> None:
        """Add a buffer to a part; readers get it as it was written, neither split nor joined with others.

        The buffer is copied, and may change afterwards. The call blocks while an active reader of this part is more
        than ``ahead`` bytes behind.

        Raises:
            mission_control.Cancelled: Nobody wants the stream any more.
            OSError: There is no memory, or the disk is full.
            TypeError: The data is no buffer, or holds Python objects.
            ValueError: The stream has no such part.
        """
        if type(buffer) is not bytes:
            buffer = contiguous(buffer, part)
        self._writer.write(part, buffer)

    def close(self, error: str | None = None) -> None:
        """End the stream; `error`: why it is incomplete. Only the first call has an effect."""
        # Texts of the operating system may have bytes that are no characters.
        self._writer.end(error.encode(errors="backslashreplace").decode() if error is not None else None)

    def over(self, error: BaseException | None) -> None:
        """Handle the end of the task: a stream that is not closed is incomplete, for any reason."""
        from distributed import Reschedule

        if isinstance(error, Reschedule):
            # An input of the task was lost, so its stream is lost, too: the task and its readers run again.
            self._writer.free()
        why = f"{type(error).__name__}: {error}" if error is not None else "its task ended and did not close it"
        self.close(why)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.over(error)


def open_stream(parts: int = 1, *, ahead: int = AHEAD_BYTES, keep: bool = False, deterministic: bool = False) -> Stream:
    """Begin a stream. Its reference becomes the result of the task at once, so dependent tasks start while this one
    runs.

    The return value of the task is ignored. A task opens at most one stream. It leaves the worker's thread pool, so
    that a reading task can run on the same worker.

    Args:
        parts: Number of parts; each is read separately.
        ahead: Bytes of a part by which its reader may be behind; beyond this the writer waits, as long as the reader
            reads something at least every ten seconds. The writer does not wait for a part that nobody reads: data that
            does not fit into memory goes to the disk, so no order of readers and writers can deadlock.
        keep: Any number of tasks may read each part, also repeatedly; the data stays until the reference is released.
            Otherwise each part has one reader, and data is freed once read: if the reading task runs again, so does
            this one.
        deterministic: This task writes the same data each time it runs. If it is lost and runs again, readers continue
            where they are. A checksum compares the data that they have read with the new data.

    Raises:
        RuntimeError: This is no task in the worker's own thread pool, or it has opened a stream before, or it demands
            resources, which Dask would give to other tasks while it writes.
        mission_control.Cancelled: The worker closes.
        ValueError: `parts` or `ahead` is invalid.
    """
    opened = begin_stream(parts, ahead, keep, wait=True, deterministic=deterministic)
    assert opened is not None
    return opened


def begin_stream(parts: int, ahead: int, keep: bool, wait: bool, deterministic: bool = False) -> Stream | None:
    """As :func:`open_stream`; without `wait` it returns ``None`` if too many streams are being written here."""
    parts, ahead = whole_number("parts", parts), whole_number("ahead", ahead)
    if parts < 1 or ahead < 0:
        raise ValueError(
            f"open_stream(parts={parts}, ahead={ahead}): a stream has at least one part, and no negative bytes"
        )
    worker, plugin, endpoint = data_plane("open_stream")
    task = current_task(worker)
    plugin.early.check(task.key)
    if not plugin.early.has_turn():
        if not wait:
            return None
        plugin.early.wait_for_turn(task.key)
    writer = endpoint.open_stream(task.job, json.dumps(task.demands), parts, ahead, keep)
    place = (writer.object, worker.address, endpoint.address)
    reference = StreamReference(*place, task.job, task.stage, parts, bool(deterministic))
    plugin.objects.put(task.key, writer.object)
    made = Stream(writer, reference)
    plugin.early.finish(task, reference, made.over)
    return made


def stream(reference: StreamReference, part: int = 0) -> Iterator[memoryview]:
    """Read a part of a stream: yield each buffer as it was written, as soon as it is available.

    While it waits, other tasks may use the task's thread.

    Raises:
        mission_control.StreamFailed: The task that writes it raised an error.
        mission_control.Denied: Another task reads this part, and the stream has no `keep`.
        mission_control.TransferError: Its writer cannot be reached.
        IndexError: There is no such part.
        distributed.Reschedule: The writer was lost; this task runs again once that runs.
    """
    return read_part(reference, part, None)


def read_part(reference: StreamReference, part: int, wait: Callable[[bool], None] | None) -> Iterator[memoryview]:
    """As :func:`stream`.

    Args:
        wait: Called before each check for more data, with whether the last check found some: if not, waits a little; or
            raises.
    """
    if not isinstance(reference, StreamReference):
        raise TypeError(f"stream takes a reference that open_stream gave, not {type(reference).__name__}")
    part = whole_number("part", part)
    if not 0 <= part < reference.parts:
        raise IndexError(f"part {part} of a stream of {reference.parts} parts: they are numbered from 0")
    return _read(reference, part, wait)


def _read(reference: StreamReference, part: int, wait: Callable[[bool], None] | None) -> Iterator[memoryview]:
    worker, plugin, endpoint = data_plane("stream")
    task = current_task(worker)
    transfer = (task.job, reference.stage, task.stage, json.dumps(task.demands))
    # A reader with `wait`, such as that of a program, restarts instead of continuing.
    read = _native.StreamPrefix() if reference.deterministic and wait is None else None
    stream, address = reference.object, reference.address
    while True:
        reader = endpoint.read_stream(*transfer, (stream, part, reference.parts, address), str(task.key), task.run)
        try:
            yield from _buffers(reader, read, plugin, wait)
            return
        except _native.Lost as error:
            again = plugin.written_again(task.key, reference.object, stream, error) if read is not None else None
            if again is None:
                plugin.reschedule_if_lost(task.key, {stream}, error)
                raise
            stream, address = again
        finally:
            reader.close()
        assert read is not None
        read.begin_again()


def _buffers(
    reader: _native.StreamReader,
    read: _native.StreamPrefix | None,
    plugin: MissionControlWorker,
    wait: Callable[[bool], None] | None,
) -> Iterator[memoryview]:
    """Yield data of the reader, without the bytes that were `read` from an earlier run of the writer."""
    found = True
    while True:
        if wait is not None:
            # An error of this call refers to this frame, which must not hold a chunk.
            wait(found)
        chunk, sizes, more = reader.next(wait=False)
        found = chunk is not None or not more
        if wait is not None and not found:
            continue
        if chunk is None and more:
            with thread_released(plugin):
                chunk, sizes, more = reader.next()
        if chunk is None:
            if read is not None:
                read.end()
            return
        before = read.take(chunk, sizes) if read is not None else 0
        yield from islice(_writes(memoryview(chunk), sizes), before, None)
        # An error of the next call refers to this frame.
        del chunk, sizes


def thread_released(plugin: MissionControlWorker) -> AbstractContextManager[None]:
    """Let other tasks use this task's thread, if its worker supports that."""
    return plugin.turns.thread_released() if plugin.turns is not None else nullcontext()


def _writes(chunk: memoryview, sizes: Buffer | None) -> Iterator[memoryview]:
    """Split a chunk into the written buffers."""
    if sizes is None:
        yield chunk
        return
    start = 0
    for size in array("Q", bytes(sizes)):
        yield chunk[start : start + size]
        start += size


def whole_number(name: str, value: Any) -> int:
    try:
        return int(operator.index(value))
    except TypeError:
        raise TypeError(f"{name}={value!r}: give a whole number") from None
