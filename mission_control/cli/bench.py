"""`mission bench`: what Mission Control gains, beside what others do in the same run."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="Measures Mission Control beside what others do, interleaved in one run.")
