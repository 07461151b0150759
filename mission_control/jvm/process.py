"""A Java process that runs the tasks of a worker, each in a thread."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
from distributed.system import MEMORY_LIMIT

from mission_control import _native
from mission_control.interface.server import SOCKET
from mission_control.interface.session import Leases
from mission_control.programs.process import (
    ENDS_WITHIN_S,
    LOOK_S,
    ProgramFailed,
    end_of,
    is_cancelled,
    name_of_signal,
)

if TYPE_CHECKING:
    from distributed import Worker

    from mission_control.interface.server import Interface
    from mission_control.interface.session import Session

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).parent / "mission-control.jar"
MEMORY_FRACTION = 0.25
"""Java's heap as a fraction of the worker's memory: by default Java takes this fraction of a machine's."""


class JvmDied(RuntimeError):
    """The process ended while a task ran in it; the text has its status and its output."""


def command(limit_bytes: int) -> list[str]:
    """Return the command that starts Java.

    Raises:
        ProgramFailed: There is no Java, or the library was not built.
    """
    home = os.environ.get("JAVA_HOME")
    program = dask.config.get("mission-control.java.command", os.path.join(home, "bin", "java") if home else "java")
    if shutil.which(program) is None:
        raise ProgramFailed(
            f"this worker has no {program}: install Java 17 or newer there, or name it (mission-control.java.command)"
        )
    if not LIBRARY.exists():
        raise ProgramFailed(f"{LIBRARY.name} is not there: build it with 'make java', which needs Maven")
    options = dask.config.get("mission-control.java.options", [])
    options = shlex.split(options) if isinstance(options, str) else list(options)
    heap = f"-Xmx{max(int(limit_bytes * MEMORY_FRACTION) >> 20, 64)}m"
    # If an option occurs twice, Java uses the last one.
    own = [heap, "-XX:+ExitOnOutOfMemoryError"]
    return [program, *own, *options, "-cp", str(LIBRARY), "org.missioncontrol.Host"]


class Jvm:
    """One Java process.

    Raises:
        ProgramFailed: Java cannot be started.
    """

    def __init__(self, worker: Worker, interface: Interface):
        self.interface = interface
        self.credential = secrets.token_urlsafe(32)
        self.tasks: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.running = 0
        self.leases = Leases()
        self.freed = False
        words = command(worker.memory_manager.memory_limit or MEMORY_LIMIT)
        self.said = tempfile.TemporaryFile(dir=worker.local_directory)  # noqa: SIM115
        with interface.lock:
            interface.executors[self.credential] = self
        try:
            # The process ends when its standard input closes: with this worker, however that ends.
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=self.said,
                stderr=self.said,
                cwd=worker.local_directory,
                env={**os.environ, SOCKET: interface.path},
                process_group=0,
            )
        except OSError as problem:
            self._forget()
            raise ProgramFailed(f"{words[0]} cannot be started on this worker: {problem}") from None
        self.ended = os.pidfd_open(self.process.pid)
        assert self.process.stdin is not None
        # Not in the environment, because programs that a task starts would inherit it.
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{self.credential}\n".encode())
            self.process.stdin.flush()

    def next(self, seconds: float) -> dict[str, Any] | None:
        with suppress(queue.Empty):
            return self.tasks.get(timeout=seconds)
        return None

    def not_taken(self, task: dict[str, Any]) -> None:
        self.tasks.put(task)

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def run(self, worker: Worker, session: Session, timeout: float | None) -> Any:
        """Run a task to its end; return its result.

        Raises:
            JvmDied: The process ended meanwhile.
        """
        deadline = time.monotonic() + timeout if timeout is not None else None
        name, key = session.what["class"], worker.get_current_task()
        with self.lock:
            if self.freed:
                raise JvmDied("the process of Java has ended")
            self.running += 1
        self.tasks.put({**session.what, "credential": session.credential})
        try:
            while not session.outcome.done():
                session.serve(LOOK_S, self.ended)
                if self.is_over and not session.outcome.done():
                    raise JvmDied(
                        f"the process of Java {self._how()} while {self.running} tasks ran in it{end_of(self.said)}"
                    )
                if deadline is not None and time.monotonic() > deadline and not session.outcome.done():
                    raise ProgramFailed(f"{name} was interrupted after {timeout:g} s")
                if is_cancelled(worker, key):
                    raise _native.Cancelled(f"{name} was interrupted: nobody wants its task any more")
            return session.outcome.result()
        except BaseException:
            self.tasks.put({"cancelled": session.credential})
            raise
        finally:
            with self.lock:
                self.running -= 1
            self.free_if_over()

    def end(self) -> None:
        """Kill the process, and what its tasks have started in its group. Its running tasks report that."""
        with self.lock:
            if self.freed:
                return
            with suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDS_WITHIN_S)
        self.free_if_over()

    def free_if_over(self) -> None:
        """Free its resources, once it has ended and no task needs to report its status."""
        with self.lock:
            if self.freed or self.running or not self.is_over:
                return
            self.freed = True
            assert self.process.stdin is not None
            with suppress(OSError):
                self.process.stdin.close()
            os.close(self.ended)
            self.leases.parts.clear()
            self._forget()

    def _forget(self) -> None:
        with self.interface.lock:
            self.interface.executors.pop(self.credential, None)
        self.said.close()

    def _how(self) -> str:
        status = self.process.returncode
        return f"was ended by signal {name_of_signal(-status)}" if status < 0 else f"ended with status {status}"


_starting = threading.Lock()


def shared(worker: Worker, interface: Interface) -> Jvm:
    """Return the process that all tasks of a worker share; start one if there is none, or it has ended.

    Raises:
        mission_control.Cancelled: The worker closes.
    """
    with _starting:
        jvm = interface.jvm
        if jvm is None or jvm.is_over:
            if jvm is not None:
                # Otherwise the last of its tasks frees it, because they have to report how it ended.
                jvm.free_if_over()
            jvm = interface.jvm = Jvm(worker, interface)
        if interface.closed:
            jvm.end()
            raise _native.Cancelled("this worker is closing")
        return jvm
