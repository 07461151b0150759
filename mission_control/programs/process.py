"""A running program with all processes that it starts, until its end or that of its task."""

from __future__ import annotations

import logging
import os
import secrets
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mission_control import _native

if TYPE_CHECKING:
    from distributed import Worker

    from mission_control.interface.session import Session
    from mission_control.programs.files import Files, Pipe

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""How often to check whether the task is still wanted while its program runs."""
SAID_BYTES = 4096
"""Last bytes of a failed program's standard error that become part of the error."""
ENDS_WITHIN_S = 10.0
"""Seconds in which a killed process ends, unless the kernel blocks it, for example in I/O to a disk that does not
answer."""
MARK = "MISSION_CONTROL_PROGRAM"
"""Variable in the environment of a program and of all its processes, to find those that have left its process group."""
SUPERVISOR = 'trap "" HUP INT QUIT TERM USR1 USR2 ALRM; read _; kill -s KILL 0'
"""Runs in the program's process group, and kills it when its standard input closes because the worker is gone."""


class ProgramFailed(RuntimeError):
    """A program could not be started, or ended with an error, or was killed; the text has the reason and its output."""


class _Over(Exception):
    """The program has ended, so nobody reads its inputs any more."""


class Until:
    """Limits of a program's run: the time until its task is not wanted any more, and at most `timeout` seconds from
    now."""

    def __init__(self, worker: Worker, name: str, timeout: float | None):
        self.worker, self.key, self.name, self.timeout = worker, worker.get_current_task(), name, timeout
        self.deadline = time.monotonic() + timeout if timeout is not None else None

    def check(self, said: Callable[[], str] = str) -> None:
        """Raise the reason why the program must end, if there is one; `said` adds its output."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise ProgramFailed(f"{self.name} was ended after {self.timeout:g} s{said()}")
        if is_cancelled(self.worker, self.key):
            raise _native.Cancelled(f"{self.name} was ended: nobody wants its task any more")


class Program:
    """A running program with all processes that it starts."""

    def __init__(self, words: list[str], files: Files, env: Mapping[str, str], memory: int | None, until: Until):
        self.words, self.files, self.memory, self.until = words, files, memory, until
        self.mark = secrets.token_hex(16)
        self.env = {**os.environ, "TMPDIR": str(files.temporary), **env, MARK: self.mark}
        self.over = threading.Event()
        self.problem: Exception | None = None
        """Why an input was not delivered completely."""

    def run(self, session: Session, source: int, to_stdout: int | None) -> None:
        """Run the program to its end.

        Args:
            session: Serves the program's requests.
            source: Descriptor of its standard input.
            to_stdout: The output that it writes to its standard output.
        """
        files = self.files
        with ExitStack() as stack:
            # In this order: the program is killed before it can read the end of an incomplete input.
            for pipe in files.pipes:
                stack.enter_context(self._fed(pipe, session))
            process = self._start(source, files.stdout if to_stdout is not None else subprocess.DEVNULL)
            stack.enter_context(self._supervised(process))
            stack.callback(self._end, process)
            ended = os.pidfd_open(process.pid)
            stack.callback(os.close, ended)
            while (status := self._waited(process, session, ended)) is None or (status == 0 and self._is_written()):
                self.until.check(self._said)
                if self.problem is not None:
                    session.check_problem()
                    raise ProgramFailed(f"{self.words[0]} was ended: an input cannot be read: {self.problem}")
        session.check_problem()
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
        """Make the program end with this worker, however that ends."""
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

    def _waited(self, process: subprocess.Popen[bytes], session: Session, ended: int) -> int | None:
        """Return its exit status, if it ends within a short time."""
        session.serve(LOOK_S if process.returncode is None else 0, ended)
        return process.poll()

    def _is_written(self) -> bool:
        """Whether a process that the program started still writes a named output; a shell does not wait for all."""
        outputs = set()
        for path in self.files.folder.glob("out-*"):
            with suppress(OSError):
                found = path.lstat()
                outputs.add((found.st_dev, found.st_ino))
        written = bool(outputs) and any(writes(pid, outputs) for pid in marked(self.mark))
        if written:
            time.sleep(LOOK_S)
        return written

    @contextmanager
    def _fed(self, pipe: Pipe, session: Session) -> Iterator[None]:
        """Write an input into a pipe, for as long as somebody reads it."""
        feeder = threading.Thread(target=self._feed, args=(pipe, session), name="mission-pipe", daemon=True)
        feeder.start()
        try:
            yield
        finally:
            self.over.set()
            feeder.join()

    def _feed(self, pipe: Pipe, session: Session) -> None:
        try:
            self._write(pipe, session)
        except (BrokenPipeError, _Over):
            pass  # the program has read enough, or has ended
        except Exception as error:
            self.problem = error
            self.over.wait()
        finally:
            pipe.file.close()

    def _write(self, pipe: Pipe, session: Session) -> None:
        room = select.poll()
        room.register(pipe.file.fileno(), select.POLLOUT)
        while pipe.path is not None and any(event & select.POLLERR for _, event in room.poll(0)):
            # Nobody has opened the pipe for reading.
            if self.over.wait(0.01):
                return
        if pipe.path is not None:
            # Opening it again fails, and does not block for ever.
            pipe.path.unlink(missing_ok=True)

        def write(buffer: memoryview) -> None:
            while buffer:
                self._check_over()
                if room.poll(LOOK_S * 1000) and (wrote := pipe.file.write(buffer)) is not None:
                    buffer = buffer[wrote:]

        for part in pipe.parts:
            if isinstance(part, memoryview):
                write(part)
            else:
                session.read(part.reference, part.part, write, self._check_over)

    def _check_over(self) -> None:
        if self.over.is_set():
            raise _Over

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill what is left of the program and of all processes that it started."""
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
        """Return the last output of the program, for an error."""
        return end_of(self.files.said)


def end_of(said: IO[bytes]) -> str:
    """Return the last output of a process, for an error."""
    start = max(os.fstat(said.fileno()).st_size - SAID_BYTES, 0)
    text = os.pread(said.fileno(), SAID_BYTES, start).decode(errors="replace").strip()
    return f": {text}" if text else ", without output"


def name_of_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def writes(pid: int, files: set[tuple[int, int]]) -> bool:
    """Return whether a process has one of these files, by device and inode, open for writing."""
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
        # Other users' processes cannot be read; ended ones have no environment.
        with suppress(OSError):
            if name.isdigit() and wanted in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found
