"""A program's access to its task's data plane and client, while the task runs."""

from __future__ import annotations

import os
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from distributed import Reschedule, get_client

from mission_control import _native
from mission_control.dask.seams.adopted import TaskThread
from mission_control.delegates import Delegation, delegate, name_of
from mission_control.interface.calls import Call
from mission_control.objects import Reference, allocate, fetch, put
from mission_control.streams import Stream, StreamReference, begin_stream, read_part

if TYPE_CHECKING:
    from distributed import Worker
    from typing_extensions import Buffer

    from mission_control.dask.worker import MissionControlWorker


class Stopped(RuntimeError):
    """The task of this credential is over, or runs again elsewhere, so its program's requests are useless."""


class Conflict(RuntimeError):
    """The task has already done something that is only possible once."""


TURN_AGAIN_S = 0.05
"""Pause before a task checks again whether there is room for one more writer of a stream."""
POLLS_S = (0.0002, 0.005)
"""Shortest and longest pause between two checks for more of a stream."""


class Leases:
    """Parts that a program maps. They do not change until it releases them, or ends."""

    def __init__(self) -> None:
        self.parts: dict[str, _native.Part] = {}

    def grant(self, part: _native.Part) -> str:
        """Add a lease on a part, and return its name."""
        name = secrets.token_hex(8)
        self.parts[name] = part
        return name

    def release(self, names: Iterable[str]) -> None:
        for name in names:
            self.parts.pop(name, None)


class Session:
    """One run of a task, made in its thread.

    Methods except :meth:`serve` and :meth:`close` may be called in any thread, and raise :class:`Stopped` once the task
    is over.

    Args:
        what: Describes the task to its program; JSON.
        leases: The leases of a process that runs many tasks. Such a process sends the result of each.
    """

    def __init__(
        self, worker: Worker, plugin: MissionControlWorker, what: dict[str, Any], leases: Leases | None = None
    ):
        self.plugin, self.thread = plugin, TaskThread(worker, plugin)
        self.what = {"key": str(self.thread.key), "worker": worker.address, **what}
        self.takes_result = leases is not None
        self.leases = leases if leases is not None else Leases()
        self.credential = secrets.token_urlsafe(32)
        self.jars: list[Reference] = []
        self.lock = threading.Lock()
        self.closed = False
        self.futures: dict[str, Any] = {}
        """Futures of spawned tasks, by name: the tasks live as long as their futures."""
        self.named: list[Reference] = []
        """Objects that the spawned calls name: they live at least until the task to which this one delegates has their
        results."""
        self.stream: Stream | None = None
        self.has_read = False
        """Whether it has read of a stream, from which another run cannot read the same data."""
        self.delegation: Delegation | None = None
        self.outcome: Future[Any] = Future()
        """The result that the program sent, or its error."""
        self.problem: BaseException | None = None
        """Why the task cannot go on."""
        self.waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        """Work that only the task's thread can do."""
        self.woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.open: set[socket.socket] = set()
        """Connections with a long operation in progress."""

    # --- in the task's thread ---------------------------------------------------------------------------------------

    def serve(self, seconds: float, *descriptors: int) -> None:
        """Do the work of the task's thread until the session ends, or one of these files can be read.

        Raises:
            BaseException: Why the task cannot go on.
        """
        self.check_problem()
        looked = select.poll()
        for descriptor in (self.woken, *descriptors):
            looked.register(descriptor, select.POLLIN)
        if any(descriptor == self.woken for descriptor, _ in looked.poll(seconds * 1000)):
            os.eventfd_read(self.woken)
        while not self.waiting.empty():
            done, call = self.waiting.get()
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)
        self.check_problem()

    def check_problem(self) -> None:
        """Raise the error with which the task ends, if there is one."""
        if self.problem is not None:
            raise self.problem

    def close(self) -> None:
        """End the session: the task is over, or will restart."""
        with self.lock:
            self.closed = True
            self.futures.clear()
            for connection in self.open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        while not self.waiting.empty():
            self.waiting.get()[0].set_exception(Stopped("the task is over"))
        with self.lock:
            os.close(self.woken)
        if not self.takes_result:
            self.leases.parts.clear()
        # Errors refer to frames, which refer to this object; its values would wait for the garbage collector.
        self.outcome, self.problem = Future(), None

    def handed_on(self) -> Delegation | None:
        """Return the task's return value, if its program has delegated."""
        if self.delegation is not None:
            # Detects a function that calls this and returns something else.
            self.plugin.thread.delegated = name_of(self.delegation.function)
        return self.delegation

    # --- in any thread ----------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        if self.closed or self.problem is not None:
            raise Stopped("the task of this credential is over, or cannot go on")

    def fail(self, problem: Exception) -> None:
        """End the task with an error, whatever its program does."""
        with self.lock:
            if self.problem is None:
                self.problem = problem
        self.wake()

    def wake(self) -> None:
        with self.lock:
            if not self.closed:
                os.eventfd_write(self.woken, 1)

    @contextmanager
    def ended_with(self, connection: socket.socket) -> Iterator[None]:
        """End this connection if the task ends meanwhile."""
        with self.lock:
            self.check_open()
            self.open.add(connection)
        try:
            yield
        finally:
            with self.lock:
                self.open.discard(connection)

    def allocate(self, nbytes: int) -> _native.Segment:
        self.check_open()
        return self.thread.call(allocate, nbytes)

    def put(self, segment: _native.Segment | None, sizes: Sequence[int], copies: int, keep: bool) -> Reference:
        """Put an object.

        Args:
            segment: Of :meth:`allocate`; ``None``: all parts are empty.
        """
        # Nobody would free objects that are put after the end of the task.
        with self.lock:
            self.check_open()
            if segment is None:
                return self.thread.call(put, [b""] * len(sizes), copies=copies, keep=keep)
            return self.thread.call(put, segment, sizes=sizes, copies=copies, keep=keep)

    def fetch(self, reference: Reference, part: int | None) -> list[_native.Part]:
        self.check_open()
        return list(self._or_again(fetch, reference, part))

    def lease(self, part: _native.Part) -> str:
        """Let the program map a part; return the name of the lease."""
        with self.lock:
            self.check_open()
            return self.leases.grant(part)

    def open_stream(self, parts: int, ahead: int, keep: bool) -> StreamReference:
        self.check_open()

        def begin() -> Stream | None:
            # Nobody would free objects that are put at the same time.
            with self.lock:
                return begin_stream(parts, ahead, keep, wait=False)

        # Only the task's thread can open the stream, because that thread leaves Dask's thread pool.
        while (opened := self._in_its_thread(begin)) is None:
            self.check_open()
            time.sleep(TURN_AGAIN_S)
        self.stream = opened
        return opened.reference

    def write(self, part: int, content: Buffer) -> None:
        self._opened().write(part, content)

    def close_stream(self, error: str | None) -> None:
        self._opened().close(error)

    def _opened(self) -> Stream:
        self.check_open()
        if self.stream is None:
            raise Conflict("this task has opened no stream: do that first (/stream/open)")
        return self.stream

    def read(
        self,
        reference: StreamReference,
        part: int,
        send: Callable[[memoryview], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Read a part of a stream to its end.

        Args:
            send: Called with each buffer.
            check: Called repeatedly; raises if nobody reads any more.
        """
        self.check_open()

        def read() -> None:
            for buffer in read_part(reference, part, self.pauses(check)):
                self.has_read = True
                self.check_open()
                send(buffer)
                # An error of the next read refers to this frame, so it must not hold the buffer.
                del buffer

        self._or_again(read)

    def pauses(self, check: Callable[[], None]) -> Callable[[bool], None]:
        """Return a function that waits a little for more of a stream, while the task runs."""
        shortest, longest = POLLS_S
        pause = shortest

        def wait(more: bool) -> None:
            nonlocal pause
            self.check_open()
            check()
            pause = shortest if more else min(2 * pause, longest)
            if not more:
                time.sleep(pause)

        return wait

    def spawn(self, call: Call) -> str:
        """Run a call as another task.

        Returns:
            Its name.
        """
        self.check_open()
        client = self.thread.call(get_client)
        key = f"{call.name}-{uuid4()}"
        future = self.thread.call(client.submit, call.function, *call.args, **call.kwargs, key=key, pure=False)
        with self.lock:
            self.check_open()
            self.futures[future.key] = future
            self.named += call.references
        return future.key

    def delegate(self, call: Call) -> None:
        """Delegate this task's result to a call, once the program is done."""
        with self.lock:
            self.check_open()
            if self.delegation is not None:
                raise Conflict("this task has delegated before: what it delegated to may delegate again")
            delegation = self.thread.call(delegate, call.function, *call.args, **call.kwargs)
            delegation.also = self.named
            self.delegation = delegation

    def end(self, result: Any = None, error: Exception | None = None) -> None:
        """Accept the program's result, or its error."""
        if not self.takes_result:
            raise Conflict("the result of a program are its outputs, and its exit status says whether it failed")
        with self.lock:
            self.check_open()
            if self.outcome.done():
                raise Conflict("this task has said its result before")
            if error is not None:
                self.outcome.set_exception(error)
            else:
                self.outcome.set_result(result)
        self.wake()

    def _or_again(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function as the task would; if the task has to run again, its program has to end."""
        try:
            return self.thread.call(function, *args)
        except Reschedule as error:
            self.fail(error)
            raise Stopped("an input was lost, and the task runs again once it is computed again") from None

    def _in_its_thread(self, call: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()
        self.waiting.put((done, call))
        self.wake()
        while True:
            try:
                return done.result(1)
            except TimeoutError:
                if done.done():
                    raise
                self.check_open()
