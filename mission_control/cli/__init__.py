"""The command `mission`. Exit status: 0 every check held; 1 a check failed; 2 bad input; 3 something that is needed is
missing; 4 the job was refused; 5 the run is invalid; 130 interrupted."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer

from mission_control import interrupts
from mission_control.cli.lazy import LazyGroup
from mission_control.errors import BadInput, EnvironmentFailed, PrerequisiteMissing
from mission_control.jobs import JobRejected

UsageError: Any = typer.BadParameter.__mro__[1]
"""Base of what a wrong command line raises; typer exports only its children."""

app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Decides per transfer how big a share of the network it gets and which transport carries it, and says why.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mission {version('mission-control')}")
        raise typer.Exit()


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version")
    ] = False,
) -> None:
    """Take the options that stand before the command; each does its work when it is read."""


def main() -> NoReturn:
    """Runs the command; one line for whatever went wrong."""
    # A run that is told to end ends as if interrupted: what it started is ended, and its report written.
    interrupts.watch()
    try:
        status = app(standalone_mode=False)
    except (BadInput, UsageError) as error:
        text = error.format_message() if isinstance(error, UsageError) else str(error)
        end(2, text)
    except typer.Exit as error:
        end(error.exit_code)
    except JobRejected as error:
        end(4, f"refused: {error}")
    except (EnvironmentFailed, PrerequisiteMissing) as error:
        end(3, str(error))
    except (KeyboardInterrupt, typer.Abort):
        end(130, "interrupted")
    end(status if isinstance(status, int) else 0)


def end(status: int, text: str = "") -> NoReturn:
    if text:
        print(f"mission: {' '.join(text.split())}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        # Whoever reads may have gone.
        with suppress(BrokenPipeError):
            stream.flush()
    # Threads of clients that were cut off must not hold the process back.
    os._exit(status)
