"""The local socket for programs' requests to their worker: HTTP/1.1, one credential for each task
(docs/how-to/tasks.md)."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import socketserver
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mission_control import _native
from mission_control.interface.requests import BODY_BYTES_MAX, Handler
from mission_control.interface.session import Leases, Session

if TYPE_CHECKING:
    from mission_control.dask.worker import MissionControlWorker
    from mission_control.jvm.jars import Jars
    from mission_control.jvm.process import Jvm

logger = logging.getLogger(__name__)

CONNECTIONS_MAX, OF_ONE_MAX = 1024, 256
"""Most connections, each with a thread: of all programs, and of one process."""
NAME = "tasks"
"""Name of the socket in its folder."""
YOUNG_S = 60.0
"""Age from which a folder without a listener may be removed: a new socket refuses connections for some milliseconds."""
CREDENTIAL, SOCKET = "MISSION_CONTROL_CREDENTIAL", "MISSION_CONTROL_SOCKET"
"""Names of variables in the environment of a program."""


class Executor(Protocol):
    """A process that runs one task after another, or several at once."""

    credential: str
    leases: Leases

    def next(self, seconds: float) -> dict[str, Any] | None:
        """Return the next task, as JSON, or a cancelled one; ``None``: there was none."""

    def not_taken(self, task: dict[str, Any]) -> None:
        """Handle that the result of :meth:`next` did not reach the executor."""


class Interface:
    """The socket of one worker."""

    def __init__(self) -> None:
        # Not in the worker's folder: a socket's path has at most 107 bytes.
        where = tempfile.gettempdir() if len(tempfile.gettempdir()) < 70 else "/tmp"
        sweep(Path(where))
        self.folder = Path(tempfile.mkdtemp(prefix=prefix(), dir=where))
        self.path = str(self.folder / NAME)
        self.lock = threading.Lock()
        self.held_bytes = 0
        """Reserved memory of bodies that are incomplete, or are being parsed."""
        self.sessions: dict[str, Session] = {}
        """Sessions by credential."""
        self.executors: dict[str, Executor] = {}
        self.jvm: Jvm | None = None
        """The Java process, once a task needed it."""
        self.jars: Jars | None = None
        """The jars of its tasks, once one needed them."""
        self.alone = threading.Lock()
        """Held by a task that runs in a separate Java process."""
        self.closed = False
        try:
            self.server = Server(self.path, self)
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        threading.Thread(target=self.server.serve_forever, name="mission-tasks", daemon=True).start()

    @contextmanager
    def of(self, session: Session) -> Iterator[Session]:
        """Serve a task for the duration of the context."""
        with self.lock:
            self.sessions[session.credential] = session
        try:
            yield session
        finally:
            with self.lock:
                del self.sessions[session.credential]
            session.close()

    def holds(self, nbytes: int) -> bool:
        """Reserve a number of bytes, if there is room; a negative number releases them."""
        with self.lock:
            if nbytes > 0 and self.held_bytes + nbytes > BODY_BYTES_MAX:
                return False
            self.held_bytes += nbytes
            return True

    def environment(self, session: Session) -> dict[str, str]:
        """Return the environment variables by which a program finds its worker."""
        return {SOCKET: self.path, CREDENTIAL: session.credential}

    def close(self) -> None:
        with self.lock:
            self.closed = True
            jvm = self.jvm
        if jvm is not None:
            jvm.end()
        self.server.shutdown()
        self.server.server_close()
        self.server.end_all()
        shutil.rmtree(self.folder, ignore_errors=True)


def prefix() -> str:
    """Return the prefix of this host's socket folders: on a shared disk other hosts see them."""
    return f"mission-tasks-{Path('/proc/sys/kernel/random/boot_id').read_text()[:8]}-"


def sweep(where: Path) -> None:
    """Remove the folders of killed workers, on whose sockets nobody listens."""
    for folder in where.glob(f"{prefix()}*"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            if folder.stat().st_uid != os.geteuid() or time.time() - folder.stat().st_mtime < YOUNG_S:
                continue
            probe.setblocking(False)
            if probe.connect_ex(str(folder / NAME)) == errno.ECONNREFUSED:
                shutil.rmtree(folder, ignore_errors=True)


_making = threading.Lock()


def interface_of(plugin: MissionControlWorker) -> Interface:
    """Return the socket of a worker; the first program that needs it opens it."""
    with _making:
        if plugin.closing:
            raise _native.Cancelled("this worker is closing")
        if plugin.interface is None:
            plugin.interface = Interface()
        return plugin.interface


def close_interface(plugin: MissionControlWorker) -> None:
    """Close the socket of a worker, if it has one, and prevent another one."""
    with _making:
        interface, plugin.interface = plugin.interface, None
    if interface is not None:
        interface.close()


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, path: str, interface: Interface):
        self.interface = interface
        self.connections: dict[socket.socket, int] = {}
        """Open connections, with the process at the other end."""
        super().__init__(path, Handler)
        os.chmod(path, 0o600)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        credentials = request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        with self.interface.lock:
            its = sum(own == pid for own in self.connections.values())
            if uid not in (0, os.geteuid()) or its >= OF_ONE_MAX or len(self.connections) >= CONNECTIONS_MAX:
                return False
            self.connections[request] = pid
            return True

    def shutdown_request(self, request: Any) -> None:
        with self.interface.lock:
            self.connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a program's connection ended", exc_info=True)

    def end_all(self) -> None:
        with self.interface.lock:
            left = list(self.connections)
        for connection in left:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
