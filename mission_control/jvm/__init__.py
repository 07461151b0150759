"""Tasks in Java: classes of a jar, which run in one Java process per worker (CIEL's first-class Java executor:
paper 001, listing 4.1 and table 4.2)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mission_control._native import Cancelled
from mission_control.objects import Reference, check_has_result, data_plane
from mission_control.programs import ProgramFailed
from mission_control.programs.process import LOOK_S, is_cancelled

if TYPE_CHECKING:
    from distributed import Worker

    from mission_control.interface.server import Interface
    from mission_control.jvm.jars import Jars

__all__ = ["java"]

ATTEMPTS = 3
"""As Dask's ``allowed-failures``: the number of processes that may end while one task runs in them. All but the first
run it alone, so that a task that ends its process does not affect others repeatedly."""


def java(
    name: str,
    *,
    jars: Iterable[Reference] = (),
    inputs: Sequence[Reference] = (),
    arguments: Any = None,
    timeout: float | None = None,
) -> Any:
    """Run a task in Java: ``client.submit(mission_control.java, "org.example.Sort", jars=[jar], inputs=[future])``.

    One Java process for each worker runs all tasks, each in a thread. It starts with the first task. The class
    implements ``org.missioncontrol.Task`` (docs/how-to/java.md).

    Args:
        name: Of the class.
        jars: References from :func:`put`: archives with the class and its dependencies, except the library.
        inputs: Objects or streams, for the task to read.
        arguments: Any value that JSON can represent.
        timeout: Seconds after which the thread is interrupted.

    Returns:
        The task's result: ``None``, a reference, a list of references, or a value of JSON. If the task has delegated,
        the delegation.

    Raises:
        ProgramFailed: The task raised an exception or timed out, or Java cannot be started, or ended several times
            during the task.
        TypeError: An argument is of the wrong kind.
        RuntimeError: This is no task, or the method of an actor, or the task has opened a stream.
        mission_control.TransferError: A jar cannot be fetched.
        mission_control.Cancelled: Nobody wants the task any more.
    """
    # Imported only in workers: a client does not need it.
    from mission_control.interface.calls import described
    from mission_control.interface.server import interface_of

    worker, plugin, _ = data_plane("java")
    check_has_result("java", plugin)
    for what, own in (("jars", jars), ("inputs", inputs)):
        if isinstance(own, Reference):
            raise TypeError(f"java({name!r}, {what}={own!r}): give a list of references")
    jars = list(jars)
    check(name, jars, inputs, arguments, timeout)
    interface = interface_of(plugin)
    given = {"class": name, "arguments": arguments, "inputs": [described(own) for own in inputs]}
    with jars_of(worker, interface).of(jars) as files:
        given["jars"] = [str(path) for path in files]
        return run(name, plugin, interface, given, jars, timeout)


_first = threading.Lock()


def jars_of(worker: Worker, interface: Interface) -> Jars:
    """Return the files of jars of a worker."""
    from mission_control.jvm.jars import Jars

    with _first:
        if interface.jars is None:
            interface.jars = Jars(Path(worker.local_directory, "jars"))
        return interface.jars


def run(
    name: str, plugin: Any, interface: Interface, given: dict[str, Any], jars: list[Reference], timeout: float | None
) -> Any:
    """Run a task in the shared process, and again alone if that ended during it."""
    from mission_control.interface.session import Session
    from mission_control.jvm.process import Jvm, JvmDied, shared

    worker = plugin.worker
    died: JvmDied | None = None
    for attempt in range(ATTEMPTS):
        try:
            with ExitStack() as stack:
                if attempt == 0:
                    jvm = shared(worker, interface)
                else:
                    # One at a time, because the shared process may have ended for lack of memory.
                    alone(worker, interface, stack)
                    jvm = Jvm(worker, interface)
                    stack.callback(jvm.end)
                session = stack.enter_context(interface.of(Session(worker, plugin, given, jvm.leases)))
                session.jars = jars
                result = jvm.run(worker, session, timeout)
                return session.handed_on() or (None if session.stream is not None else result)
        except JvmDied as error:
            died = error
            if session.stream is not None:
                # Its result is known, so it cannot run again here.
                break
            if session.has_read:
                # Data that was read from a stream is gone, so the stream has to be written again.
                plugin.run_again(worker.get_current_task(), error)
                break
    raise ProgramFailed(f"{name}: {died}")


def alone(worker: Worker, interface: Interface, stack: ExitStack) -> None:
    """Wait until no other task runs in a separate Java process."""
    key = worker.get_current_task()
    while not interface.alone.acquire(timeout=LOOK_S):
        if is_cancelled(worker, key):
            raise Cancelled("nobody wants the task any more")
    stack.callback(interface.alone.release)


def check(name: Any, jars: list[Any], inputs: Sequence[Any], arguments: Any, timeout: Any) -> None:
    """Validate the arguments of :func:`java`."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"java({name!r}, ..): give the name of a class, as in 'org.example.Sort'")
    for jar in jars:
        if not isinstance(jar, Reference) or jar.copies == 0:
            raise TypeError(f"java({name!r}, jars=..): {jar!r} is no reference that put gave")
    for reference in inputs:
        if not isinstance(reference, Reference):
            raise TypeError(f"java({name!r}, inputs=..): {reference!r} is no reference")
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise ValueError(f"java({name!r}, timeout={timeout!r}): give a number of seconds above 0")
    try:
        json.dumps(arguments)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"java({name!r}, arguments=..): JSON cannot say it: {error}; put data, and give it as an input"
        ) from None
