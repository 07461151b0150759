"""Input and output of a program: objects as files and pipes, and outputs as an object."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from mission_control.objects import Reference, allocate, data_plane, fetch, put
from mission_control.programs.process import ProgramFailed
from mission_control.streams import StreamReference, read_part, thread_released

logger = logging.getLogger(__name__)

PIPE_BYTES = 1 << 20
"""Bytes of each pipe, the most for a user without privileges; the kernel's default (64 KiB) wakes both sides more
often."""


class In(NamedTuple):
    """In a command: the path of an input."""

    number: int
    """Number of the input, from 0."""
    part: int | None = None
    """Part of the object, from 0; ``None``: all parts, concatenated."""
    pipe: bool = False
    """Whether it is a pipe instead of a file: it is read once, from the start, and needs no second copy in memory."""


class Out(NamedTuple):
    """In a command: the path where the program leaves an output."""

    number: int = 0
    """Number of the output, from 0: the part of the object that :func:`run` returns."""


class Pipe(NamedTuple):
    """An input that goes through a pipe."""

    file: FileIO
    """Descriptor for writing. It is open before a reader, so that the reader does not see the end before the first
    byte."""
    path: Path | None
    """Its name, if it has one."""
    parts: list[memoryview | StreamPart]


class StreamPart(NamedTuple):
    """A part of a stream that is read while the program runs."""

    reference: StreamReference
    part: int


class Files:
    """The input and output files of a program.

    Args:
        parent: The folder in which the program's folder is made.
        stack: Closes and removes all files.
        wait: Called repeatedly while a stream is read to its end, with whether there was more: waits a little, or
            raises.
    """

    def __init__(self, parent: str, inputs: Sequence[Reference], stack: ExitStack, wait: Callable[[bool], None]):
        self.inputs, self.stack, self.wait = inputs, stack, wait
        self.folder = folder = Path(tempfile.mkdtemp(prefix="program-", dir=parent))
        stack.callback(removed, folder)
        self.work, self.temporary = folder / "work", folder / "tmp"
        self.work.mkdir()
        self.temporary.mkdir()
        # Files without names, so that a program that clears its folder does not delete them.
        self.said = stack.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
        self.stdout = stack.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
        self.pipes: list[Pipe] = []
        self.made: dict[In, str] = {}

    def word(self, own: str | os.PathLike[str] | In | Out) -> str:
        """Convert a word of the command to the program's argument."""
        if isinstance(own, Out):
            return str(self.out(own.number))
        if not isinstance(own, In):
            return os.fspath(own)
        if own.pipe:
            # A pipe is read once, so each occurrence has its own.
            return self._pipe(own)
        if own not in self.made:
            self.made[own] = self._file(own)
        return self.made[own]

    def out(self, number: int) -> Path:
        return self.folder / f"out-{number}"

    def open(self, own: In) -> int:
        """Return a descriptor of an input."""
        if own.pipe:
            descriptor, write = os.pipe2(os.O_CLOEXEC)
            self._feeds(write, None, own)
        else:
            descriptor = os.open(self.word(own), os.O_RDONLY | os.O_CLOEXEC)
        self.stack.callback(os.close, descriptor)
        return descriptor

    def _content(self, own: In) -> list[memoryview | StreamPart]:
        reference = self.inputs[own.number]
        if isinstance(reference, StreamReference):
            parts = range(reference.parts) if own.part is None else [own.part]
            return [StreamPart(reference, part) for part in parts]
        return [memoryview(part) for part in fetch(reference, part=own.part)]

    def _file(self, own: In) -> str:
        """Make a read-only file in memory."""
        descriptor = os.memfd_create(f"in-{own.number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.stack.callback(os.close, descriptor)
        for part in self._content(own):
            with thread_released(data_plane("run")[1]) if isinstance(part, StreamPart) else nullcontext():
                for buffer in read_part(*part, self.wait) if isinstance(part, StreamPart) else [part]:
                    while buffer:
                        buffer = buffer[os.write(descriptor, buffer) :]
                    # A remaining view keeps all data that was read, and an error of the next read refers to this frame.
                    del buffer
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        path = self.folder / f"in-{own.number}{'' if own.part is None else f'-{own.part}'}"
        # The path of the worker's descriptor, which is valid in every process.
        path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        return str(path)

    def _pipe(self, own: In) -> str:
        path = self.folder / f"pipe-{len(self.pipes)}"
        os.mkfifo(path)
        # A pipe can only be opened for writing if it has a reader.
        reader = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            write = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        finally:
            os.close(reader)
        self._feeds(write, path, own)
        return str(path)

    def _feeds(self, write: int, path: Path | None, own: In) -> None:
        file = self.stack.enter_context(FileIO(write, "wb"))
        os.set_blocking(write, False)
        with suppress(OSError):
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        parts = self._content(own)
        # The error of a failed program refers to frames, and those would keep the buffers.
        self.stack.callback(parts.clear)
        self.pipes.append(Pipe(file, path, parts))

    def put(self, outputs: int, program: str, to_stdout: int | None) -> Reference:
        """Put the outputs of a program as the parts of an object.

        Raises:
            ProgramFailed: An output is missing, or no file.
        """
        with ExitStack() as stack:
            left: list[int] = []
            for number in range(outputs):
                if number == to_stdout:
                    left.append(self.stdout.fileno())
                    continue
                try:
                    # Without blocking, even if the output is a pipe.
                    descriptor = os.open(self.out(number), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
                except OSError as problem:
                    raise ProgramFailed(f"{program} ended well, but left nothing at Out({number}): {problem}") from None
                stack.callback(os.close, descriptor)
                left.append(descriptor)
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise ProgramFailed(f"{program} ended well, but what it left at Out({number}) is no file")
            sizes = [os.fstat(descriptor).st_size for descriptor in left]
            if not sum(sizes):
                return put([b""] * outputs)
            segment = allocate(sum(sizes))
            room = memoryview(segment)
            start = 0
            for number, (descriptor, size) in enumerate(zip(left, sizes, strict=True)):
                got = 0
                while got < size:
                    read = os.preadv(descriptor, [room[start + got : start + size]], got)
                    if not read:
                        raise ProgramFailed(f"Out({number}) of {program} became shorter while it was read")
                    got += read
                start += size
            room.release()
            return put(segment, sizes=sizes)


def removed(folder: Path) -> None:
    """Remove a program's folder, including folders without write permission."""

    def again(function: Any, path: Any, _: Any) -> None:
        with suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            os.chmod(path, 0o700)
            function(path)

    try:
        shutil.rmtree(folder, onerror=again)
    except (OSError, RecursionError) as error:
        logger.warning("%s could not be removed: %s", folder, error)
