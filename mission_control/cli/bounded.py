"""Benchmarks that say beforehand how long they take, and that have a size which takes minutes."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from mission_control import _native
from mission_control.errors import BadInput

QUICK_MAX_S = 300.0
"""With --quick every benchmark is meant to end within this time, on two cores; a test holds the predictions to it."""

of_this_command: list[float | None] = []
"""Seconds that the command of this process takes, and those with --quick."""

Seconds = Callable[[dict[str, Any]], float]
"""From a benchmark's options, by name, to the seconds that it takes on two cores."""


def bounded(seconds: Seconds, /, **smaller: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a benchmark the option --quick, and let it begin with the time that it will take.

    Args:
        seconds: Predicts the duration.
        smaller: Defaults of options with --quick. What a user types holds.
    """

    def wrap(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(context: typer.Context, quick: bool, **given: Any) -> Any:
            typed = {name for name in given if not is_default(context, name)}
            less = given | {name: value for name, value in smaller.items() if name not in typed}
            of_this_command[:] = [predicted(seconds, options) for options in (less if quick else given, less)]
            return command(**(less if quick else given))

        hints = get_type_hints(command, include_extras=True)
        own = {"context": typer.Context, "quick": Annotated[bool, typer.Option("--quick", help=shown(smaller))]}
        taken = inspect.signature(command).parameters.values()
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter("context", keyword, annotation=own["context"]),
            *(one.replace(kind=keyword, annotation=hints[one.name]) for one in taken),
            inspect.Parameter("quick", keyword, default=False, annotation=own["quick"]),
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {**hints, **own}
        run.quick_seconds = lambda defaults: seconds(defaults | smaller)  # type: ignore[attr-defined]
        return run

    return wrap


def is_default(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is None or source.name.startswith("DEFAULT")


def shown(smaller: dict[str, Any]) -> str:
    """Return the help of --quick."""
    if not smaller:
        return "Changes nothing: it takes less than five minutes as it is"
    names = (
        f"--{name} {', '.join(map(str, value))}" if isinstance(value, list) else option(name, value)
        for name, value in smaller.items()
    )
    return f"Take less time, by prediction at most five minutes: {', '.join(names)}"


def option(name: str, value: Any) -> str:
    """Return an option as it is typed."""
    name = name.replace("_", "-")
    return f"--{name} {value}" if not isinstance(value, bool) else f"--{'' if value else 'no-'}{name}"


def predicted(seconds: Seconds, options: dict[str, Any]) -> float | None:
    """Return the seconds, or ``None`` if an option is invalid: the benchmark names it."""
    try:
        return seconds(options)
    except (ValueError, BadInput):
        return None


def announce() -> None:
    """Print how long the benchmark of this command takes, and how long with --quick if that is less.

    For a benchmark that has checked its options and is about to begin.
    """
    seconds, quick = of_this_command
    if seconds is None:
        return
    less = f" (--quick: {duration(quick)})" if quick is not None and quick < seconds else ""
    print(f"this takes about {duration(seconds)} on two cores{less}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Return seconds in words, such as ``40 s``, ``12 min`` or ``1.5 h``."""
    if seconds < 90:
        return f"{max(1.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def gib(size: str) -> float:
    """Return a size in GiB.

    Raises:
        ValueError: It is malformed.
    """
    return _native.parse_bytes(size) / 2**30
