"""Programs as tasks: any unmodified binary reads objects as files, and writes files that become objects (CIEL's
``exec``: paper 001, table 4.2)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from mission_control.delegates import Delegation
from mission_control.objects import Reference, check_has_result, data_plane
from mission_control.programs.files import Files, In, Out
from mission_control.programs.process import Program, ProgramFailed, Until

__all__ = ["In", "Out", "ProgramFailed", "run"]


def run(
    command: Sequence[str | os.PathLike[str] | In | Out],
    *,
    inputs: Sequence[Reference] = (),
    outputs: int = 1,
    stdin: In | None = None,
    timeout: float | None = None,
    memory: int | None = None,
    env: Mapping[str, str] | None = None,
) -> Reference | Delegation | None:
    """Run a program in this task to its end.

    ``client.submit(mission_control.run, ["sort", In(0)], inputs=[future])`` sorts the lines of an object.

    The program runs in a temporary folder. It and all processes that it has started are killed when the task is
    cancelled, the time is over, or the worker dies. It has the rights of the worker: this is no sandbox. While it runs
    it may put, fetch, spawn, and read and write streams itself (docs/how-to/tasks.md).

    Args:
        command: The program and its arguments: texts, and inputs and outputs, which are replaced by their paths.
        inputs: References from :func:`put`, or streams. As files they are read-only, and can be mapped and sought; they
            are copied into memory once, a stream only when it has ended. A pipe (``In(0, pipe=True)``) delivers a
            stream while it is written. Only parts that the command names are fetched.
        outputs: Number of outputs. An output that is not an ``Out`` of the command is the program's standard output; at
            most one.
        stdin: An input for its standard input; ``None``: nothing.
        timeout: Seconds, from the start of the task: also while it waits for a stream that it gets as a file.
        memory: Bytes that the program, and each process that it starts, may map.
        env: Added to the worker's environment.

    Returns:
        A reference to an object with a part for each output. If the program has delegated, the delegation. If it has
        opened a stream, that is the result already, and its outputs are dropped.

    Raises:
        ProgramFailed: It could not be started, or its exit status is not 0, or the time is over, or an output is
            missing.
        ValueError: The command names an input or an output that does not exist.
        TypeError: An argument is of the wrong kind.
        RuntimeError: This is no task, or the method of an actor, or the task has opened a stream.
        mission_control.TransferError: An input cannot be fetched.
        mission_control.Cancelled: Nobody wants the task any more.
        OSError: No memory, or no room on the disk.
    """
    # Imported here because of a cycle: that module imports this one.
    from mission_control.interface.calls import described
    from mission_control.interface.server import interface_of
    from mission_control.interface.session import Session

    worker, plugin, _ = data_plane("run")
    check_has_result("run", plugin)
    to_stdout = check(command, inputs, outputs, stdin, timeout, memory, env)
    until = Until(worker, os.fspath(command[0]), timeout)  # type: ignore[arg-type]
    with ExitStack() as stack:
        interface = interface_of(plugin)
        what = {"inputs": [described(own) for own in inputs], "outputs": outputs}
        session = stack.enter_context(interface.of(Session(worker, plugin, what)))
        files = Files(worker.local_directory, inputs, stack, session.pauses(until.check))
        words = [files.word(own) for own in command]
        source = files.open(stdin) if stdin is not None else subprocess.DEVNULL
        env = {**(env or {}), **interface.environment(session)}
        Program(words, files, env, memory, until).run(session, source, to_stdout)
        if session.stream is not None:
            return None
        return session.handed_on() or files.put(outputs, words[0], to_stdout)


def check(
    command: Any, inputs: Any, outputs: Any, stdin: Any, timeout: Any, memory: Any, env: Any = None
) -> int | None:
    """Validate a command.

    Returns:
        The number of the output that is the program's standard output, if there is one.
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
    if isinstance(inputs, Reference):
        raise TypeError(f"run({command[0]!r}, inputs={inputs!r}): give a list of references")
    if env is not None and not all(isinstance(word, str) for own in dict(env).items() for word in own):
        raise TypeError(f"run({command[0]!r}, env={env!r}): give texts by name, as in {{'OMP_NUM_THREADS': '4'}}")
    for reference in inputs:
        if not isinstance(reference, Reference):
            raise TypeError(f"run({command[0]!r}, inputs=..): {reference!r} is no reference that put gave")
    if not isinstance(outputs, int) or outputs < 0:
        raise ValueError(f"run(.., outputs={outputs!r}): give the number of outputs")
    for own in [own for own in (*command, stdin) if isinstance(own, In)]:
        if not isinstance(own.number, int) or not isinstance(own.part, int | None):
            raise TypeError(f"{own}: give the number of an input, as in In(0)")
        if not 0 <= own.number < len(inputs):
            raise ValueError(f"{own}: there are {len(inputs)} inputs, numbered from 0")
        parts = len(inputs[own.number])
        if own.part is not None and not 0 <= own.part < parts:
            raise ValueError(f"{own}: the parts of this input are numbered from 0 to {parts - 1}")
    named = {own.number for own in command if isinstance(own, Out)}
    if named - set(range(outputs)):
        raise ValueError(f"Out({max(named)}): with outputs={outputs} they are numbered from 0 to {outputs - 1}")
    rest = set(range(outputs)) - named
    if len(rest) > 1:
        raise ValueError(f"outputs={outputs}: write Out(number) for all but one; that one is the standard output")
    return rest.pop() if rest else None
