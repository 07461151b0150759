"""References and calls as JSON: input of programs is validated here before any action."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from typing import Any

from mission_control.objects import Reference
from mission_control.programs import In, Out, run
from mission_control.streams import StreamReference

TEXT_CHARS_MAX, OBJECT_BYTES_MAX = 1 << 10, 1 << 62
"""Most characters of a text of a reference, and most bytes of an object: limits of a worker's messages to the
scheduler."""
PARTS_MAX = 1 << 20
"""Most parts of an object that a program names: more than any job has, and few enough for memory."""
SECONDS_MAX = 1e9
"""Longest phase in seconds: thirty years."""
NAME_CHARS_MAX = 64
"""Most characters of a stage's name."""


class BadRequest(ValueError):
    """A program's request is invalid; the text has the value, and what to send instead."""


def described(reference: Reference) -> dict[str, Any]:
    """Return a reference as JSON."""
    names = {name: getattr(reference, name) for name in ("object", "worker", "address", "job", "stage")}
    if isinstance(reference, StreamReference):
        return {**names, "stream_parts": reference.parts}
    return {**names, "sizes": list(reference.sizes), "copies": reference.copies, "keep": reference.kept}


def reference_of(given: Any) -> Reference:
    """Return the reference that :func:`described` gave.

    Raises:
        BadRequest: The value is no reference.
    """
    if not isinstance(given, dict):
        raise BadRequest(f"{shown(given)} is no reference: send one as it was received")
    texts = [given.get(name) for name in ("object", "worker", "address", "job", "stage")]
    if not all(isinstance(text, str) and len(plain(text)) <= TEXT_CHARS_MAX for text in texts):
        raise BadRequest(f"{shown(given)} is no reference: object, worker, address, job and stage are short texts")
    object, worker, address, job, stage = map(str, texts)
    if any(plain(text) != text for text in map(str, texts)):
        raise BadRequest(f"{shown(given)} is no reference: its texts are no UTF-8")
    if given.get("stream_parts") is not None:
        parts = number(given, "stream_parts", 1, PARTS_MAX)
        return StreamReference(object, worker, address, job, stage, parts)
    sizes = given.get("sizes")
    if not isinstance(sizes, list) or len(sizes) > PARTS_MAX or not all(is_size(size) for size in sizes):
        raise BadRequest(f"{shown(given)} is no reference: sizes is a list of bytes")
    if sum(sizes) >= OBJECT_BYTES_MAX:
        raise BadRequest(f"{shown(given)} is no reference: no object has {sum(sizes)} bytes")
    copies, kept = number(given, "copies", 1, 1 << 16, default=1), given.get("keep")
    return Reference(object, worker, address, job, stage, sizes, copies, kept is True)


class Call:
    """A call to run as another task, or in place of this one.

    Args:
        name: The stage of its tasks, as shown to users.
        function, args, kwargs: For :meth:`distributed.Client.submit`, or :func:`mission_control.delegate`.
    """

    def __init__(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.name, self.function, self.args, self.kwargs = name, function, args, kwargs

    @property
    def references(self) -> list[Reference]:
        """Objects that the call names."""
        inputs = (*self.args, *self.kwargs.get("inputs", ()), *self.kwargs.get("jars", ()))
        return [own for own in inputs if isinstance(own, Reference) and own.copies]


def call_of(given: Any, futures: dict[str, Any], jars: list[Reference]) -> Call:
    """Return the call that a program describes.

    Args:
        futures: What it has spawned, by name.
        jars: The jars of its own task, if that is in Java.

    Raises:
        BadRequest: The value describes no call.
    """
    if not isinstance(given, dict):
        raise BadRequest('a call is an object, as in {"program": ["sort", {"in": 0}], "inputs": [reference]}')
    inputs = [input_of(own, futures) for own in listed(given, "inputs")]
    kinds = [kind for kind in ("program", "java", "python") if kind in given]
    if len(kinds) != 1:
        raise BadRequest("a call names one of program, java and python")
    if kinds[0] == "program":
        return program_of(given, inputs)
    arguments = given.get("arguments")
    if kinds[0] == "python":
        called = function_of(given["python"])
        if arguments is not None and not isinstance(arguments, list):
            raise BadRequest(f"arguments={shown(arguments)}: a call of a function in Python takes a list")
        return Call(last_of(given["python"]), called, (*inputs, *(arguments or ())), {})
    from mission_control.jvm import java

    if not isinstance(given["java"], str):
        raise BadRequest(f"java={shown(given['java'])}: give the name of a class")
    more = [reference_of(own) for own in given["jars"]] if "jars" in given and listed(given, "jars") else jars
    kwargs = {"inputs": inputs, "arguments": arguments, "jars": more}
    if given.get("timeout") is not None:
        kwargs["timeout"] = positive(given, "timeout")
    return Call(last_of(given["java"]), java, (given["java"],), kwargs)


def program_of(given: dict[str, Any], inputs: list[Any]) -> Call:
    kwargs: dict[str, Any] = {"inputs": inputs, "outputs": number(given, "outputs", 0, 1 << 16, default=1)}
    command = [word_of(word) for word in listed(given, "program")]
    if given.get("stdin") is not None:
        kwargs["stdin"] = word_of(given["stdin"])
    for name in ("timeout", "memory"):
        if given.get(name) is not None:
            kwargs[name] = positive(given, name)
    if given.get("env") is not None:
        env = given["env"]
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            raise BadRequest(f"env={shown(env)}: give texts by name")
        kwargs["env"] = env
    name = os.path.basename(command[0]) if command and isinstance(command[0], str) else ""
    return Call(last_of(name), run, (command,), kwargs)


def last_of(name: str) -> str:
    """Return the last word of a name, as in ``org.example.Sort$Map``: the stage of its tasks, as Dask names them."""
    words = re.findall(r"[A-Za-z_]+", name)
    return words[-1].lower()[:NAME_CHARS_MAX] if words else "task"


def plain(text: str) -> str:
    """Return a text that can be sent as UTF-8: JSON may have unpaired surrogates."""
    return text.encode(errors="backslashreplace").decode()


def word_of(word: Any) -> str | In | Out:
    if isinstance(word, str):
        return word
    if isinstance(word, dict) and "in" in word:
        part = None if word.get("part") is None else number(word, "part", 0, PARTS_MAX)
        return In(number(word, "in", 0, 1 << 16), part, word.get("pipe") is True)
    if isinstance(word, dict) and "out" in word:
        return Out(number(word, "out", 0, 1 << 16))
    raise BadRequest(f'{shown(word)} is no word of a command: give a text, {{"in": number}} or {{"out": number}}')


def input_of(given: Any, futures: dict[str, Any]) -> Any:
    if isinstance(given, dict) and "future" in given:
        name = given["future"]
        if not isinstance(name, str) or name not in futures:
            raise BadRequest(f"{shown(given)}: this task has spawned no such task")
        return futures[name]
    return reference_of(given)


def function_of(name: Any) -> Callable[..., Any]:
    """Return a function by its name, as in ``package.module:function``."""
    module, _, path = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not module or not path:
        raise BadRequest(f"python={shown(name)}: give the name of a function, as in package.module:function")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        raise BadRequest(f"python={shown(name)}: this worker has no such function: {error}") from None
    if not callable(found):
        raise BadRequest(f"python={shown(name)} cannot be called")
    return found


def listed(given: dict[str, Any], name: str) -> list[Any]:
    value = given.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(f"{name}={shown(value)}: give a list")
    return value


def is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def number(given: dict[str, Any], name: str, least: int, most: int, default: int | None = None) -> int:
    value = given.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadRequest(f"{name}={shown(value)}: give a whole number from {least} to {most}")
    return value


def positive(given: dict[str, Any], name: str) -> int | float:
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 62:
        raise BadRequest(f"{name}={shown(value)}: give a number above 0")
    return value


def seconds(given: dict[str, Any], name: str) -> float:
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < SECONDS_MAX:
        raise BadRequest(f"{name}={shown(value)}: give seconds")
    return float(value)


def shown(value: Any) -> str:
    """Return a value for an error, not too long."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}.."
