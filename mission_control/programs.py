"""Programs as tasks: any binary, unchanged, reads objects as files and leaves files that become objects (CIEL's
``exec``: paper 001, table 4.2)."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import select
import shutil
import signal
import stat
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
from mission_control.objects import Reference, _in_actor, allocate, data_plane, fetch, put

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger(__name__)

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
SUPERVISOR = 'trap "" HUP INT QUIT TERM USR1 USR2 ALRM; read _; kill -s KILL 0'
"""Runs in the program's group, and ends it when nobody holds the other end of its standard input: the worker is
gone."""


class In(NamedTuple):
    """In a command: the path of an input."""

    number: int
    """Of the input, from 0."""
    part: int | None = None
    """Of the object, from 0; ``None``: all parts, one after another."""
    pipe: bool = False
    """A pipe, and not a file: it is read once, from the start, and takes no second copy in memory."""


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
    the task is cancelled, the time is over, or the worker dies. It has the rights of the worker: this is no sandbox.

    Args:
        command: The program, and its arguments: texts, and inputs and outputs, in whose places their paths are.
        inputs: Objects that :func:`put` gave. As files they can be read, mapped and searched, and not be changed; they
            are copied into memory once. Only parts that the command names are fetched.
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
        RuntimeError: This is no task, or the method of an actor, or the task has opened a stream.
        mission_control.TransferError: An input cannot be had.
        mission_control.Cancelled: Nobody wants the task any more.
        OSError: No memory, or no room on the disk.
    """
    worker, plugin, _ = data_plane("run")
    if _in_actor() or plugin.early.is_done:
        raise RuntimeError(
            "mission_control.run in a method of an actor, or after open_stream: there is no result to carry what it "
            "makes. Call it in a task of its own"
        )
    to_stdout = check(command, inputs, outputs, stdin, timeout, memory)
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="program-", dir=worker.local_directory))
        stack.callback(removed, folder)
        files = Files(folder, inputs, stack)
        words = [files.word(own) for own in command]
        source = files.open(stdin) if stdin is not None else subprocess.DEVNULL
        program = Program(words, files, env or {}, memory, timeout)
        program.run(worker, source, to_stdout)
        return put_files(files, outputs, words[0], to_stdout)


def check(command: Any, inputs: Sequence[Any], outputs: Any, stdin: Any, timeout: Any, memory: Any) -> int | None:
    """See that a command makes sense.

    Returns:
        The number of the output that the program writes to its standard output, if it does.
    """
    if isinstance(command, str | bytes):
        raise TypeError(f"run({command!r}): give the words of the command one by one, as in ['sort', '-n', In(0)]")
    if not command or isinstance(command[0], In | Out):
        raise ValueError("run takes a command, as in ['sort', In(0)]: the program, and its arguments")
    for word in command:
        if not isinstance(word, str | os.PathLike | In | Out):
            raise TypeError(
                f"run({command[0]!r}, ..): {word!r} is no word of a command: give texts, In(number) or Out(number)"
            )
    if stdin is not None and not isinstance(stdin, In):
        raise TypeError(f"run({command[0]!r}, stdin={stdin!r}): give an input, as in stdin=In(0)")
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise ValueError(f"run({command[0]!r}, timeout={timeout!r}): give a number of seconds above 0")
    if memory is not None and not (isinstance(memory, int) and memory > 0):
        raise ValueError(f"run({command[0]!r}, memory={memory!r}): give a number of bytes, as in 1 << 30")
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


class Pipe(NamedTuple):
    """An input that goes through a pipe."""

    file: FileIO
    """To write to. It is open before somebody reads, so that who reads is not at the end before the first byte."""
    path: Path | None
    """Its name, if it has one."""
    parts: list[memoryview]


class Files:
    """What a program reads and writes."""

    def __init__(self, folder: Path, inputs: Sequence[Reference], stack: ExitStack):
        self.folder, self.inputs, self.stack = folder, inputs, stack
        self.work, self.temporary = folder / "work", folder / "tmp"
        self.work.mkdir()
        self.temporary.mkdir()
        # Without names: a program that clears its folder does not lose them.
        self.said = stack.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
        self.stdout = stack.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
        self.pipes: list[Pipe] = []
        self.made: dict[In, str] = {}

    def word(self, own: str | os.PathLike[str] | In | Out) -> str:
        """Return a word of the command as the program gets it."""
        if isinstance(own, Out):
            return str(self.out(own.number))
        if not isinstance(own, In):
            return os.fspath(own)
        if own.pipe:
            # Each is read once, so each mention has one of its own.
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

    def _content(self, own: In) -> list[memoryview]:
        return [memoryview(part) for part in fetch(self.inputs[own.number], part=own.part)]

    def _file(self, own: In) -> str:
        """A file in memory, which nobody can change."""
        descriptor = os.memfd_create(f"in-{own.number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.stack.callback(os.close, descriptor)
        for part in self._content(own):
            while part:
                part = part[os.write(descriptor, part) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        path = self.folder / f"in-{own.number}{'' if own.part is None else f'-{own.part}'}"
        # The worker's own descriptor, by a name that holds in every process.
        path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        return str(path)

    def _pipe(self, own: In) -> str:
        path = self.folder / f"pipe-{len(self.pipes)}"
        os.mkfifo(path)
        # Only with a reader can it be opened to write.
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
        # The error of a program that fails has frames, and those would hold them.
        self.stack.callback(parts.clear)
        self.pipes.append(Pipe(file, path, parts))


class Program:
    """A program that runs, with all that it starts."""

    def __init__(
        self, words: list[str], files: Files, env: Mapping[str, str], memory: int | None, timeout: float | None
    ):
        self.words, self.files, self.memory, self.timeout = words, files, memory, timeout
        self.mark = secrets.token_hex(16)
        self.env = {**os.environ, "TMPDIR": str(files.temporary), **env, MARK: self.mark}
        self.over = threading.Event()
        self.problem: Exception | None = None
        """Why an input did not come to its end."""

    def run(self, worker: Worker, source: int, to_stdout: int | None) -> None:
        """Run it to its end.

        Args:
            source: Descriptor of its standard input.
            to_stdout: The output that it writes to its standard output.
        """
        key, files = worker.get_current_task(), self.files
        deadline = time.monotonic() + self.timeout if self.timeout is not None else None
        with ExitStack() as stack:
            # In this order: the program is ended before the end of an input that is not whole can be seen.
            for pipe in files.pipes:
                stack.enter_context(self._fed(pipe))
            process = self._start(source, files.stdout if to_stdout is not None else subprocess.DEVNULL)
            stack.enter_context(self._supervised(process))
            stack.callback(self._end, process)
            while (status := self._waited(process)) is None or (status == 0 and self._is_written()):
                if deadline is not None and time.monotonic() > deadline:
                    raise ProgramFailed(f"{self.words[0]} was ended after {self.timeout:g} s{self._said()}")
                if self.problem is not None:
                    raise ProgramFailed(f"{self.words[0]} was ended: an input cannot be read: {self.problem}")
                if is_cancelled(worker, key):
                    raise _native.Cancelled(f"{self.words[0]} was ended: nobody wants its task any more")
        if self.problem is not None:
            raise ProgramFailed(f"{self.words[0]} did not get all of an input: {self.problem}")
        if status:
            how = f"was ended by signal {name_of_signal(-status)}" if status < 0 else f"ended with status {status}"
            raise ProgramFailed(f"{self.words[0]} {how}{self._said()}")

    def _start(self, source: int, out: Any) -> subprocess.Popen[bytes]:
        words = self.words
        if self.memory is not None:
            if shutil.which(words[0], path=self.env.get("PATH")) is None:
                raise ProgramFailed(f"{words[0]} cannot be started on this worker: it is not there, or may not be run")
            words = ["/bin/sh", "-c", 'ulimit -v "$0" && exec "$@"', str(max(self.memory // 1024, 1)), *words]
        given: dict[str, Any] = {"stdin": source, "stdout": out, "stderr": self.files.said}
        try:
            return subprocess.Popen(words, cwd=self.files.work, env=self.env, process_group=0, **given)
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

    def _is_written(self) -> bool:
        """Whether something that the program started still writes a named output; a shell does not wait for all."""
        outputs = set()
        for path in self.files.folder.glob("out-*"):
            with suppress(OSError):
                found = path.lstat()
                outputs.add((found.st_dev, found.st_ino))
        return bool(outputs) and any(writes(pid, outputs) for pid in marked(self.mark)) and not self.over.wait(LOOK_S)

    @contextmanager
    def _fed(self, pipe: Pipe) -> Iterator[None]:
        """Write an input into a pipe, for as long as somebody reads it."""
        feeder = threading.Thread(target=self._feed, args=(pipe,), name="mission-pipe", daemon=True)
        feeder.start()
        try:
            yield
        finally:
            self.over.set()
            feeder.join()

    def _feed(self, pipe: Pipe) -> None:
        try:
            self._write(pipe)
        except BrokenPipeError:
            pass  # it has read enough
        except Exception as error:
            self.problem = error
            self.over.wait()
        finally:
            pipe.file.close()

    def _write(self, pipe: Pipe) -> None:
        room = select.poll()
        room.register(pipe.file.fileno(), select.POLLOUT)
        while pipe.path is not None and any(event & select.POLLERR for _, event in room.poll(0)):
            # Nobody has opened it to read.
            if self.over.wait(0.01):
                return
        if pipe.path is not None:
            # Who opens it again gets an error, and does not wait for ever.
            pipe.path.unlink(missing_ok=True)
        for part in pipe.parts:
            while part:
                if self.over.is_set():
                    return
                if room.poll(LOOK_S * 1000) and (wrote := pipe.file.write(part)) is not None:
                    part = part[wrote:]

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End what is left of the program, and of all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + ENDS_WITHIN_S
        while (left := marked(self.mark)) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_WITHIN_S)
        if left:
            logger.warning("%s was ended, but processes %s that it started were not", self.words[0], left)

    def _said(self) -> str:
        """Return the end of what the program has said, for an error."""
        descriptor = self.files.said.fileno()
        start = max(os.fstat(descriptor).st_size - SAID_BYTES, 0)
        text = os.pread(descriptor, SAID_BYTES, start).decode(errors="replace").strip()
        return f": {text}" if text else ", and said nothing"


def name_of_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def removed(folder: Path) -> None:
    """Remove a program's folder, also what it may not write to itself."""

    def again(function: Any, path: Any, _: Any) -> None:
        with suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            os.chmod(path, 0o700)
            function(path)

    try:
        shutil.rmtree(folder, onerror=again)
    except (OSError, RecursionError) as error:
        logger.warning("%s could not be removed: %s", folder, error)


def writes(pid: int, files: set[tuple[int, int]]) -> bool:
    """Return whether a process has one of these files, by device and inode, open to write."""
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found = os.stat(f"/proc/{pid}/fd/{name}")
                if (found.st_dev, found.st_ino) in files:
                    flags = Path(f"/proc/{pid}/fdinfo/{name}").read_text().split("flags:")[1].split()[0]
                    if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                        return True
    return False


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


def put_files(files: Files, outputs: int, program: str, to_stdout: int | None) -> Reference:
    """Put what a program has left as the parts of an object."""
    with ExitStack() as stack:
        left: list[int] = []
        for number in range(outputs):
            if number == to_stdout:
                left.append(files.stdout.fileno())
                continue
            try:
                # Whatever it is, to open it waits for nobody.
                descriptor = os.open(files.out(number), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
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
