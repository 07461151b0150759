"""Options that several commands share."""

from __future__ import annotations

import math
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; notes go to stderr")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, one document per line")]


def finite(value: float | None) -> float | None:
    """Refuse nan, which lies in every range, and infinities.

    Raises:
        BadParameter: The value is no finite number.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value:g} is no finite number: use a number such as 1.5")
    return value
