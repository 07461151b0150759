"""Options that several commands share."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Annotated

import typer

from mission_control import _native
from mission_control.errors import BadInput

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; notes go to stderr")]
NewPriority = Annotated[
    float | None, typer.Option(metavar="X", help="Priority, a number above 0, at most 1e9, e.g. 2.5 [unchanged]")
]
NewTransport = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help=f"Transport from the next chunk on: auto, {', '.join(_native.transports())} [unchanged]"
    ),
]
JsonLines = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, one document per line")]


def not_empty(value: str | None) -> str | None:
    """Refuse an empty text, as of a variable of the shell that is not set.

    Raises:
        BadParameter: The value is empty.
    """
    if value is not None and not value.strip():
        raise typer.BadParameter("it is empty: give a value, or leave the option out")
    return value


def finite(value: float | None) -> float | None:
    """Refuse nan, which lies in every range, and infinities.

    Raises:
        BadParameter: The value is no finite number.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value:g} is no finite number: use a number such as 1.5")
    return value


def make_folder(option: str, path: Path) -> None:
    """Make the folder of an option, and check that files can be written there.

    Raises:
        BadInput: It cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise BadInput(f"{option} {path}: cannot be written ({error.strerror}); choose another folder") from None
