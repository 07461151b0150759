"""`mission weights`: what each policy would give some jobs."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer

from mission_control import _native
from mission_control.scenario import BadInput

POLICIES = "; ".join(f"{name}: {meaning}" for name, meaning in _native.policies())


def weights(
    jobs: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME[:priority=X][:pattern=shuffle|broadcast][:machines=N]...", help="in order of arrival"
        ),
    ],
    policy: Annotated[str, typer.Option(help=POLICIES)] = "performance-centric",
    flows_per_host: Annotated[int, typer.Option(help="receiving slots of a host")] = _native.FLOWS_PER_HOST,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """What share of the network each job would get."""
    parsed = [parse(job) for job in jobs]
    names = [job[0] for job in parsed]
    if twice := {name for name in names if names.count(name) > 1}:
        raise BadInput(f"job {min(twice)} is named twice: give each job a name of its own")
    try:
        result = _native.weights(policy, parsed, flows_per_host)
    except (ValueError, OverflowError) as error:
        raise BadInput(str(error)) from None
    if as_json:
        print(json.dumps({name: {"weight": weight, "flows": flows} for name, weight, flows in result}))
        return
    width = max(len("job"), *map(len, names))
    print(f"{'job':<{width}}  weight  flows of {flows_per_host}")
    for name, weight, flows in result:
        print(f"{name:<{width}}  {weight:6.3f}  {flows:5}  {'#' * flows}")


def parse(text: str) -> tuple[str, float, int, bool]:
    """Name, priority, machines, whether it broadcasts."""
    name, *settings = text.split(":")
    if not name:
        raise BadInput(f"{text!r} has no name: write NAME:priority=2")
    priority, machines, broadcasts = 1.0, 0, False
    for setting in settings:
        match setting.partition("="):
            case "priority", "=", value if re.fullmatch(r"[0-9]*\.?[0-9]+", value) and float(value) > 0:
                priority = float(value)
            case "priority", "=", value:
                raise BadInput(f"priority {value!r} of job {name}: use a number above 0")
            case "pattern", "=", "shuffle" | "broadcast" as pattern:
                broadcasts = pattern == "broadcast"
            case "pattern", "=", value:
                raise BadInput(f"pattern {value!r} of job {name}: use shuffle or broadcast")
            case "machines", "=", value if value.isdecimal() and int(value) > 0:
                machines = int(value)
            case "machines", "=", value:
                raise BadInput(f"machines {value!r} of job {name}: use a whole number above 0")
            case _:
                raise BadInput(f"{setting!r} of job {name}: use priority=X, pattern=shuffle|broadcast or machines=N")
    return name, priority, machines, broadcasts
