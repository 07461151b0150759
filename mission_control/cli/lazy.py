"""The commands of `mission`; each is imported when it is used, since most need Dask, NumPy or Pydantic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from mission_control.cli.examples import EXAMPLES

GROUPS = {
    "Start here": {
        "demo": ("demo", "Show in about a minute what Mission Control does."),
        "doctor": ("doctor", "Check this machine, and a cluster if one is named."),
    },
    "Scenarios, traces and reports": {
        "run": ("run", "Run a scenario, explain each transfer, and write a report."),
        "replay": ("replay", "Replay the jobs of a trace, scaled, each at its time."),
        "trace": ("trace", "Describe a trace of jobs, or synthesise one."),
        "report": ("run", "Write the report of a run again."),
        "schema": ("run", "Print the JSON Schema of a result."),
    },
    "Jobs of a cluster": {
        "top": ("top", "Show the transfers of a cluster, live."),
        "jobs": ("jobs", "List the jobs of a cluster, or change one while it runs."),
        "explain": ("explain", "Explain the share and the transport of each transfer of a job."),
        "weights": ("weights", "Compute the share of the network that each job would get."),
    },
    "Several clusters": {
        "serve": ("serve", "Run a replica of the control service until it is interrupted."),
        "service": ("service", "Query the control service, and change its settings."),
    },
    "Networks": {
        "lab": ("lab", "Build a data centre of network namespaces (needs root)."),
        "incast": ("incast", "Predict, measure and mitigate incast."),
        "exec": ("exec", "Run a program with another TCP transport (needs root)."),
    },
    "Benchmarks": {
        "bench": ("bench", "Compare Mission Control with the alternatives in one run."),
    },
}
"""Sections of `mission --help`. By name: the module in this package, and the first sentence of the command's help. A
group of commands is the module's `app`."""
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}
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
        wide = max(map(len, COMMANDS))
        with self._listed():
            for title, group in GROUPS.items():
                with formatter.section(title):
                    # Padded, so that all sections have the same columns.
                    limit = formatter.width - 6 - wide
                    rows = [(name, self.get_command(ctx, name).get_short_help_str(limit)) for name in group]
                    formatter.write_dl([(f"{name:<{wide}}", text) for name, text in rows])

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
    command = typer.main.get_group(holder).commands[name]
    add_examples(command, name)
    return command


def add_examples(command: Any, path: str) -> None:
    """Let the help of a command and of its subcommands end with their examples.

    Args:
        path: How it is typed after ``mission``, such as ``lab up``.
    """
    if lines := EXAMPLES.get(path):
        # \b keeps the lines as they are.
        command.epilog = "\n  ".join(["\b\nExamples:", *lines])
    for name, below in getattr(command, "commands", {}).items():
        add_examples(below, f"{path} {name}")
