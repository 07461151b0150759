"""What one task lends to a program: its data plane and its client, for as long as the task runs."""

from __future__ import annotations

import os
import queue
import secrets
import select
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from distributed import Reschedule, get_client

from mission_control import _native
from mission_control.dask.seams.adopted import TaskThread
from mission_control.delegates import Delegation, delegate
from mission_control.interface.calls import Call
from mission_control.objects import Reference, allocate, fetch, put
from mission_control.streams import Stream, StreamReference, open_stream, stream

if TYPE_CHECKING:
    from distributed import Worker

    from mission_control.dask.worker import MissionControlWorker


class Stopped(RuntimeError):
    """The task of this credential is over, or runs again elsewhere: what its program does is of no use any more."""


class Conflict(RuntimeError):
    """The task has done already what can be done once."""


class Session:
    """One run of a task, made in its thread.

    All other methods but :meth:`serve` and :meth:`close` may be called in any thread, and raise :class:`Stopped` once
    the task is over.

    Args:
        what: What the program is told of its task, as JSON.
        takes_result: Whether the program says what the result is.
    """

    def __init__(self, worker: Worker, plugin: MissionControlWorker, what: dict[str, Any], takes_result: bool = False):
        self.thread = TaskThread(worker, plugin)
        self.what = {"key": str(self.thread.key), "worker": worker.address, **what}
        self.takes_result = takes_result
        self.credential = secrets.token_urlsafe(32)
        self.jars: list[Reference] = []
        self.lock = threading.Lock()
        self.closed = False
        self.futures: dict[str, Any] = {}
        """Tasks that it has spawned, by name: they live as long as somebody holds them."""
        self.stream: Stream | None = None
        self.delegation: Delegation | None = None
        self.outcome: Future[Any] = Future()
        """What the program says is the result, or why there is none."""
        self.problem: BaseException | None = None
        """Why the task cannot go on."""
        self.waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        """What only the task's own thread can do."""
        self.woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    # --- in the task's thread ---------------------------------------------------------------------------------------

    def serve(self, seconds: float, *descriptors: int) -> None:
        """Do what only the task's thread can, until something has happened, or one of these can be read.

        Raises:
            BaseException: Why the task cannot go on.
        """
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
        if self.problem is not None:
            raise self.problem

    def close(self) -> None:
        """The task is over, or is going to begin again."""
        with self.lock:
            self.closed = True
            self.futures.clear()
        while not self.waiting.empty():
            self.waiting.get()[0].set_exception(Stopped("the task is over"))
        with self.lock:
            os.close(self.woken)
        # Errors have frames, which have this; what it holds would wait for the garbage collector.
        self.outcome, self.problem = Future(), None

    # --- in any thread ----------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        if self.closed:
            raise Stopped("the task of this credential is over")

    def wake(self) -> None:
        with self.lock:
            if not self.closed:
                os.eventfd_write(self.woken, 1)

    def allocate(self, nbytes: int) -> _native.Segment:
        self.check_open()
        return self.thread.call(allocate, nbytes)

    def put(self, segment: _native.Segment | None, sizes: Sequence[int], copies: int, keep: bool) -> Reference:
        """Put an object.

        Args:
            segment: Of :meth:`allocate`; ``None``: all parts are empty.
        """
        # What is put after the end of the task would be freed by nobody.
        with self.lock:
            self.check_open()
            if segment is None:
                return self.thread.call(put, [b""] * len(sizes), copies=copies, keep=keep)
            return self.thread.call(put, segment, sizes=sizes, copies=copies, keep=keep)

    def fetch(self, reference: Reference, part: int | None) -> list[_native.Part]:
        self.check_open()
        return list(self._or_again(fetch, reference, part))

    def open_stream(self, parts: int, ahead: int, keep: bool) -> StreamReference:
        self.check_open()
        # Dask's thread pool loses the thread that opens it.
        self.stream = self._in_its_thread(lambda: open_stream(parts, ahead=ahead, keep=keep))
        return self.stream.reference

    def write(self, part: int, content: bytes) -> None:
        self._opened().write(part, content)

    def close_stream(self, error: str | None) -> None:
        self._opened().close(error)

    def _opened(self) -> Stream:
        self.check_open()
        if self.stream is None:
            raise Conflict("this task has opened no stream: do that first (/stream/open)")
        return self.stream

    def read(self, reference: StreamReference, part: int, send: Callable[[memoryview], None]) -> None:
        """Read a part of a stream to its end; `send` is called with each buffer."""
        self.check_open()

        def read() -> None:
            for buffer in stream(reference, part):
                self.check_open()
                send(buffer)

        self._or_again(read)

    def spawn(self, call: Call) -> str:
        """Have a call run as another task.

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
        return future.key

    def delegate(self, call: Call) -> None:
        """Have a call give this task's result, once the program is done."""
        with self.lock:
            self.check_open()
            if self.delegation is not None:
                raise Conflict("this task has delegated before: what it delegated to may delegate again")
            self.delegation = self.thread.call(delegate, call.function, *call.args, **call.kwargs)

    def end(self, result: Any = None, error: Exception | None = None) -> None:
        """Take what the program says is the result, or its error."""
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
        """Call a function as the task would; where that has to run again, its program has to end."""
        try:
            return self.thread.call(function, *args)
        except Reschedule as error:
            self.problem = error
            self.wake()
            raise Stopped("an input was lost, and the task runs again once it is computed again") from None

    def _in_its_thread(self, call: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()
        self.waiting.put((done, call))
        self.wake()
        while True:
            try:
                return done.result(1)
            except TimeoutError:
                if self.closed and not done.done():
                    raise Stopped("the task is over") from None
