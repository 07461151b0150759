"""Programs as tasks: any binary, unchanged, reads objects as files and leaves files that become objects (CIEL's
``exec``: paper 001, table 4.2)."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import secrets
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mission_control import _native
from mission_control.objects import Fetched, Reference, data_plane, fetch, put

if TYPE_CHECKING:
    from distributed import Worker

LOOK_S = 0.1
"""How often it is looked whether the task is still wanted, while its program runs."""
SAID_BYTES = 4096
"""Of what a program that fails has said on its standard error, the end is part of the error."""
ENDS_WITHIN_S = 10.0
"""A process that was killed is gone by then, unless the kernel holds it: in a disk that does not answer, say."""
PIPE_BYTES = 1 << 20
"""Of each pipe; the kernel's default (64 KiB) wakes both sides more often. What a user may have without privileges."""
MARK = "MISSION_CONTROL_PROGRAM"
"""In the environment of a program and of all that it starts: by it those are found that have left its group."""
SUPERVISOR = "read _; kill -s KILL 0"
"""Runs in the program's group, and ends it when nobody holds the other end of its standard input: the worker is
gone."""


class In(NamedTuple):
    """In a command: the path of an input."""

    number: int
    """Of the input, from 0."""
    part: int | None = None
    """Of the object, from 0; ``None``: all parts, one after another."""
    pipe: bool = False
    """A pipe, and not a file: what is larger than memory comes piece by piece, and can be read once, from the start."""


class Out(NamedTuple):
    """In a command: the path where the program leaves an output."""

    number: int = 0
    """Of the output, from 0: the part of the object that :func:`run` returns."""


class ProgramFailed(RuntimeError):
    """A program could not be started, or ended with an error, or was ended; the text says which, and what it said."""


def run(
    command: Sequence[str | os.PathLike[str] | In | Out],
    *,
    inputs: Sequence[Reference] = (),
    outputs: int = 1,
    stdin: In | None = None,
    timeout: float | None = None,
    memory: int | None = None,
    env: Mapping[str, str] | None = None,
) -> Reference:
    """Run a program in this task, to its end.

    ``client.submit(mission_control.run, ["sort", In(0)], inputs=[future])`` sorts the lines of an object.

    The program runs in a folder of its own, which is removed afterwards. It and all that it has started are ended when
    the task is cancelled, the time is over, or the worker dies.

    Args:
        command: The program, and its arguments: texts, and inputs and outputs, in whose places their paths are.
        inputs: Objects that :func:`put` gave. As files they can be read, mapped and searched, and not be changed; they
            are copied into memory once.
        outputs: How many. Each that is not an ``Out`` of the command is what the program writes to its standard output;
            that is one at most.
        stdin: An input that it reads from its standard input; ``None``: nothing.
        timeout: Seconds.
        memory: Bytes that the program, and each that it starts, may map.
        env: Added to the worker's environment.

    Returns:
        A reference to an object of so many parts.

    Raises:
        ProgramFailed: It could not be started, or its exit status is not 0, or the time is over, or an output is not
            there.
        ValueError: The command names an input or an output that is not there.
        TypeError: An argument is of the wrong kind.
        mission_control.TransferError: An input cannot be had.
        mission_control.Cancelled: Nobody wants the task any more.
        OSError: No memory, or no room on the disk.
    """
    worker, _, _ = data_plane("run")
    given = list(command)
    to_stdout = check(given, list(inputs), outputs, stdin)
    with ExitStack() as stack:
        there = {number: fetch(reference) for number, reference in enumerate(inputs)}
        folder = Path(tempfile.mkdtemp(prefix="program-", dir=worker.local_directory))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        files = Files(folder, there, stack)
        words = [files.word(own) for own in given]
        program = Program(words, folder, {**os.environ, **(env or {})}, memory, timeout)
        program.run(worker, files, stdin, to_stdout)
        paths = [files.out(number) for number in range(outputs)]
        return put_files(paths, words[0], stack)


def check(command: Sequence[Any], inputs: Sequence[Any], outputs: Any, stdin: In | None) -> int | None:
    """See that a command makes sense.

    Returns:
        The number of the output that the program writes to its standard output, if it does.
    """
    if not command or isinstance(command[0], In | Out):
        raise ValueError("run takes a command, as in ['sort', In(0)]: the program, and its arguments")
    for word in command:
        if not isinstance(word, str | os.PathLike | In | Out):
            raise TypeError(
                f"run({command[0]!r}, ..): {word!r} is no word of a command: give texts, In(number) or Out(number)"
            )
    for reference in inputs:
        if not isinstance(reference, Reference) or reference.copies == 0:
            raise TypeError(f"run({command[0]!r}, inputs=..): {reference!r} is no reference that put gave")
    if not isinstance(outputs, int) or outputs < 0:
        raise ValueError(f"run(.., outputs={outputs!r}): give the number of outputs")
    for own in [own for own in (*command, stdin) if isinstance(own, In)]:
        if not 0 <= own.number < len(inputs):
            raise ValueError(f"{own}: there are {len(inputs)} inputs, numbered from 0")
        parts = len(inputs[own.number])
        if own.part is not None and not 0 <= own.part < parts:
            raise ValueError(f"{own}: the parts of this object are numbered from 0 to {parts - 1}")
    named = {own.number for own in command if isinstance(own, Out)}
    if named - set(range(outputs)):
        raise ValueError(f"Out({max(named)}): with outputs={outputs} they are numbered from 0 to {outputs - 1}")
    rest = set(range(outputs)) - named
    if len(rest) > 1:
        raise ValueError(f"outputs={outputs}: write Out(number) for all but one; that one is the standard output")
    return rest.pop() if rest else None


class Files:
    """What a program reads and writes."""

    def __init__(self, folder: Path, inputs: Mapping[int, Fetched], stack: ExitStack):
        self.folder, self.inputs, self.stack = folder, inputs, stack
        self.pipes: list[tuple[Path | FileIO, list[memoryview]]] = []
        """Named or open, and what goes there."""
        self.made: dict[In, str] = {}

    def word(self, own: str | os.PathLike[str] | In | Out) -> str:
        """Return a word of the command as the program gets it."""
        if isinstance(own, Out):
            return str(self.out(own.number))
        if isinstance(own, In):
            if own not in self.made:
                self.made[own] = self._pipe(own) if own.pipe else self._file(own)
            return self.made[own]
        return os.fspath(own)

    def out(self, number: int) -> Path:
        return self.folder / f"out-{number}"

    def content(self, own: In) -> list[memoryview]:
        parts = self.inputs[own.number]
        return [memoryview(part) for part in (parts if own.part is None else [parts[own.part]])]

    def _file(self, own: In) -> str:
        """A file in memory, which nobody can change."""
        descriptor = os.memfd_create(f"in-{own.number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.stack.callback(os.close, descriptor)
        for part in self.content(own):
            while part:
                part = part[os.write(descriptor, part) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        path = self.folder / f"in-{own.number}{'' if own.part is None else f'-{own.part}'}"
        # The worker's own descriptor, by a name that holds in every process.
        path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        return str(path)

    def open(self, own: In) -> int:
        """Return a descriptor of an input."""
        if own.pipe:
            # Without a name: one that has no writer yet would be at its end.
            descriptor, write = os.pipe2(os.O_CLOEXEC)
            self.pipes.append((self.stack.enter_context(FileIO(write, "wb")), self.content(own)))
        else:
            descriptor = os.open(self.word(own), os.O_RDONLY | os.O_CLOEXEC)
        self.stack.callback(os.close, descriptor)
        return descriptor

    def _pipe(self, own: In) -> str:
        path = self.folder / f"pipe-{len(self.pipes)}"
        os.mkfifo(path)
        self.pipes.append((path, self.content(own)))
        return str(path)


class Program:
    """A program that runs, with all that it starts."""

    def __init__(self, words: list[str], folder: Path, env: dict[str, str], memory: int | None, timeout: float | None):
        self.words, self.folder, self.timeout = words, folder, timeout
        self.mark = secrets.token_hex(16)
        self.env = {**env, MARK: self.mark}
        self.memory = memory
        self.over = threading.Event()
        self.problem: Exception | None = None
        """Why an input did not come to its end."""

    def run(self, worker: Worker, files: Files, stdin: In | None, to_stdout: int | None) -> None:
        """Run it to its end.

        Args:
            stdin: The input that it reads from its standard input.
            to_stdout: The output that it writes to its standard output.
        """
        key = worker.get_current_task()
        deadline = time.monotonic() + self.timeout if self.timeout is not None else None
        said = self.folder / "said"
        with ExitStack() as stack:
            source = files.open(stdin) if stdin is not None else subprocess.DEVNULL
            out = stack.enter_context(files.out(to_stdout).open("wb")) if to_stdout is not None else subprocess.DEVNULL
            error = stack.enter_context(said.open("wb"))
            process = self._start(source, out, error)
            stack.callback(self._end, process)
            stack.enter_context(self._supervised(process))
            for pipe, parts in files.pipes:
                stack.enter_context(self._fed(pipe, parts))
            while (status := self._waited(process)) is None:
                if deadline is not None and time.monotonic() > deadline:
                    raise ProgramFailed(f"{self.words[0]} was ended after {self.timeout:g} s{last_of(said)}")
                if is_cancelled(worker, key):
                    raise _native.Cancelled(f"{self.words[0]} was ended: nobody wants its task any more")
        if self.problem is not None:
            raise ProgramFailed(f"{self.words[0]} did not get all of an input: {self.problem}")
        if status:
            how = f"was ended by signal {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            raise ProgramFailed(f"{self.words[0]} {how}{last_of(said)}")

    def _start(self, source: Any, out: Any, error: Any) -> subprocess.Popen[bytes]:
        limit = self.memory

        def limited() -> None:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

        given: dict[str, Any] = {"preexec_fn": limited} if limit is not None else {}
        try:
            given |= {"stdin": source, "stdout": out, "stderr": error}
            return subprocess.Popen(self.words, cwd=self.folder, env=self.env, process_group=0, **given)
        except (OSError, ValueError, subprocess.SubprocessError) as problem:
            raise ProgramFailed(f"{self.words[0]} cannot be started on this worker: {problem}") from None

    @contextmanager
    def _supervised(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Have the program end with this worker, however that ends."""
        heard, held = os.pipe2(os.O_CLOEXEC)
        try:
            given: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": self.env}
            try:
                command = ["/bin/sh", "-c", SUPERVISOR]
                supervisor = subprocess.Popen(command, stdin=heard, process_group=process.pid, cwd="/", **given)
            finally:
                os.close(heard)
            try:
                yield
            finally:
                supervisor.kill()
                supervisor.wait()
        finally:
            os.close(held)

    def _waited(self, process: subprocess.Popen[bytes]) -> int | None:
        try:
            return process.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            return None

    @contextmanager
    def _fed(self, pipe: Path | FileIO, parts: list[memoryview]) -> Iterator[None]:
        """Write an input into a pipe, for as long as somebody reads it."""
        feeder = threading.Thread(target=self._feed, args=(pipe, parts), name="mission-pipe", daemon=True)
        feeder.start()
        try:
            yield
        finally:
            self.over.set()
            feeder.join()

    def _feed(self, pipe: Path | FileIO, parts: list[memoryview]) -> None:
        try:
            opened = pipe if isinstance(pipe, FileIO) else self._opened(pipe)
            if opened is None:
                return  # it was never read
            with opened as file:
                os.set_blocking(file.fileno(), False)
                with suppress(OSError):
                    fcntl.fcntl(file.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
                room = select.poll()
                room.register(file.fileno(), select.POLLOUT)
                for part in parts:
                    while part and not self.over.is_set():
                        if room.poll(LOOK_S * 1000) and (wrote := file.write(part)) is not None:
                            part = part[wrote:]
        except BrokenPipeError:
            pass  # it has read enough
        except Exception as error:
            self.problem = error

    def _opened(self, path: Path) -> FileIO | None:
        while not self.over.wait(0.01):
            with suppress(OSError):
                # Fails as long as nobody has opened it to read.
                return FileIO(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC), "wb")
        return None

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End what is left of the program, and of all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + ENDS_WITHIN_S
        while (left := marked(self.mark)) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_WITHIN_S)


def last_of(said: Path) -> str:
    """Return the end of what a program has said, for an error."""
    with said.open("rb") as file:
        file.seek(max(said.stat().st_size - SAID_BYTES, 0))
        text = file.read().decode(errors="replace").strip()
    return f": {text}" if text else ", and said nothing"


def is_cancelled(worker: Worker, key: Any) -> bool:
    from distributed.core import Status

    state = worker.state.tasks.get(key)
    gone = state is None or state.state in ("cancelled", "resumed")
    return gone or worker.status not in (Status.running, Status.paused, Status.closing_gracefully)


def marked(mark: str) -> list[int]:
    """Return the processes that have this mark in their environment, and have not ended."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        # Those of others cannot be read; those that have ended have none.
        with suppress(OSError):
            if name.isdigit() and wanted in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def put_files(paths: Sequence[Path], program: str, stack: ExitStack) -> Reference:
    """Put files as the parts of an object."""
    parts: list[Any] = []
    for number, path in enumerate(paths):
        try:
            file = stack.enter_context(path.open("rb"))
        except FileNotFoundError:
            raise ProgramFailed(f"{program} ended well, but left nothing at Out({number})") from None
        size = os.fstat(file.fileno()).st_size
        parts.append(stack.enter_context(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)) if size else b"")
    return put(parts)
