"""The commands of `mission`; each is imported when it is used, since most need Dask, NumPy or Pydantic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS = {
    "demo": ("demo", "Show in about a minute what Mission Control is for. Needs no root and no cluster."),
    "run": ("run", "Run a scenario, print what each transfer got and why, and write results/<id>/report.html."),
    "exec": (
        "exec",
        "Runs a program whose TCP sockets get this before their first packet; says at its end what they really had.",
    ),
    "replay": (
        "replay",
        "Replay the jobs of a trace, scaled, each at its time; print job times and what scaling distorts.",
    ),
    "trace": ("trace", "Describe a trace of jobs, or synthesise one."),
    "weights": ("weights", "What share of the network each job, or each of its transfers, would get."),
    "report": ("run", "Draw the report of a run again, from what it has left."),
    "schema": ("run", "Print the JSON Schema of a result."),
    "top": (
        "top",
        "Shows the transfers of a cluster until it is interrupted: job, pattern, weight, flows, transport, rate.",
    ),
    "explain": (
        "explain",
        "Tells of each transfer of a job its pattern, weight, flows and transport, what was refused, and why.",
    ),
    "doctor": ("doctor", "Check this machine, and a cluster if one is named; say what to do."),
    "jobs": ("jobs", "Lists the jobs of a cluster; 'set' changes one while it runs."),
    "serve": ("serve", "Run a replica of the control service until it is interrupted."),
    "service": ("service", "Ask the control service, and change what it has."),
    "bench": ("bench", "Measures Mission Control beside what others do, interleaved in one run."),
    "lab": (
        "lab",
        "A data centre in one machine: hosts and switches are network namespaces with a real kernel. Needs root.",
    ),
    "incast": (
        "incast",
        "Incast: many senders answer one receiver at once, a switch port overflows, and the link waits for timeouts.",
    ),
}
"""By name: the module in this package, and the help of `mission --help`. A group is the module's `app`."""
SETTINGS: dict[str, dict[str, Any]] = {"exec": {"allow_extra_args": True, "ignore_unknown_options": True}}


class LazyGroup(TyperGroup):
    """A group that lists its commands without importing them."""

    listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if self.listing:
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1])
        if cmd_name not in self.commands:
            self.commands[cmd_name] = load(cmd_name)
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS:
            with self._listed():
                # Typer proposes names that resemble the unknown one.
                self.commands = {name: self.get_command(ctx, name) for name in COMMANDS}
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with self._listed():
            super().format_commands(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        with self._listed():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _listed(self) -> Iterator[None]:
        self.listing = True
        try:
            yield
        finally:
            self.listing = False


def load(name: str) -> Any:
    """Import a command or a group of commands."""
    module = import_module(f"mission_control.cli.{COMMANDS[name][0]}")
    holder = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    holder.callback()(lambda: None)
    if hasattr(module, "app"):
        holder.add_typer(module.app, name=name)
    else:
        own = getattr(module, "CLASSES", {}).get(name, TyperCommand)
        holder.command(name, cls=own, context_settings=SETTINGS.get(name))(getattr(module, name))
    return typer.main.get_group(holder).commands[name]
