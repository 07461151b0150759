"""The command `mission`. Exit status: 0 every check held; 1 a check failed; 2 bad input; 3 something that is needed is
missing; 4 the job was refused; 5 the run is invalid; 70 a fault of Mission Control; 130 interrupted; 141 nobody reads
stdout any more."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer

from mission_control import interrupts
from mission_control.cli.lazy import LazyGroup
from mission_control.errors import BadInput, EnvironmentFailed, PrerequisiteMissing
from mission_control.jobs import JobRejected
from mission_control.printable import printable

UsageError: Any = typer.BadParameter.__mro__[1]
"""Base of what a wrong command line raises; typer exports only its children."""
NoArguments: Any = next(one for one in UsageError.__subclasses__() if one.__name__ == "NoArgsIsHelpError")
MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM}
"""Errors for which the machine lacks room or permission; they are no fault of Mission Control."""
TRACEBACK = "MISSION_TRACEBACK"

app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Decides which share of the network each transfer gets, and which transport carries a job's bytes between two "
    "hosts, and says why.",
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
    """Run the command line and end the process; whatever goes wrong is one line on stderr."""
    # SIGTERM counts as an interrupt: a run ends what it started, and writes its report.
    interrupts.watch()
    try:
        status = app(standalone_mode=False)
    except NoArguments as error:
        print(error.ctx.get_help(), file=sys.stderr)
        end(2)
    except UsageError as error:
        help_at = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        end(2, error.format_message().rstrip(".") + help_at)
    except BadInput as error:
        end(2, str(error))
    except typer.Exit as error:
        end(error.exit_code)
    except JobRejected as error:
        end(4, f"refused: {error}")
    except (EnvironmentFailed, PrerequisiteMissing) as error:
        end(3, str(error))
    except (KeyboardInterrupt, typer.Abort):
        end(130, "interrupted")
    except SystemExit as error:
        # Typer ends so where stdout is a pipe that nobody reads any more.
        closed = isinstance(error.__context__, BrokenPipeError)
        end(141 if closed else error.code if isinstance(error.code, int) else 1)
    except OSError as error:
        if error.errno not in MACHINE:
            end(70, fault(error))
        end(3, f"{error.filename or 'output'}: {error.strerror}. Make room or allow it, and try again.")
    except Exception as error:
        end(70, fault(error))
    # Typer turns an interrupt of a command into this status.
    end(status if isinstance(status, int) else 0, "interrupted" if status == 130 and interrupts.happened() else "")


def fault(error: Exception) -> str:
    """Describe an exception that no command expects; with MISSION_TRACEBACK=1 print its traceback first."""
    wanted = bool(os.environ.get(TRACEBACK))
    if wanted:
        traceback.print_exception(error)
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    how = "with the traceback above" if wanted else f"with the traceback that {TRACEBACK}=1 prints"
    return f"internal error, {what}. Please report it with the command that you typed and {how}."


def end(status: int, text: str = "") -> NoReturn:
    """Print the line on stderr, write what is buffered, and end the process at once."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        status = status or 141
    except OSError as error:
        status, text = status or 3, text or f"stdout cannot be written: {error.strerror}. Use another file or disk."
    # Whoever reads may have gone.
    with suppress(OSError):
        if text and sys.stderr is not None:
            print(f"mission: {printable(' '.join(text.split()))}", file=sys.stderr, flush=True)
    # Threads of clients that were cut off must not hold the process back.
    os._exit(status)
