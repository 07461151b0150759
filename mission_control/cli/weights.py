"""`mission weights`: what each policy would give some jobs, or transfers of jobs."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import typer

from mission_control import _native
from mission_control.scenario import BadInput

POLICIES = "; ".join(f"{name}: {meaning}" for name, meaning in _native.policies())
SETTINGS = "priority=X, pattern=shuffle|broadcast|gather, machines=N, bytes=SIZE or deadline=SECONDS"


def weights(
    transfers: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME[/TRANSFER][:priority=X][:pattern=shuffle|broadcast|gather][:machines=N][:bytes=SIZE]...",
            help="in order of arrival; a job with several transfers has a line for each, as in a/sort a/model",
        ),
    ],
    policy: Annotated[str, typer.Option(help=POLICIES)] = "performance-centric",
    flows_per_host: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="receiving slots of a host")
    ] = _native.FLOWS_PER_HOST,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """What share of the network each job, or each of its transfers, would get."""
    names = [text.split(":")[0] for text in transfers]
    if twice := {name for name in names if names.count(name) > 1}:
        raise BadInput(f"{min(twice)} is named twice: give each a name of its own, as in {min(twice)}/other")
    parsed = [parse(text) for text in transfers]
    if policy.startswith("python:"):
        raise BadInput(f"--policy {policy}: a policy in Python is asked in a cluster: see `mission explain` there")
    priorities: dict[str, float] = {}
    for own in parsed:
        # One that says nothing has that of its job.
        if own["priority"] is not None and priorities.setdefault(own["job"], own["priority"]) != own["priority"]:
            raise BadInput(f"job {own['job']} has two priorities: priorities are of jobs, so give it one")
    parsed = [{**own, "priority": priorities.get(own["job"], 1.0)} for own in parsed]
    try:
        result = _native.weights(policy, json.dumps(parsed), flows_per_host)
    except (ValueError, OverflowError) as error:
        raise BadInput(str(error)) from None
    rows = [(name, weight, flows) for name, (weight, flows) in zip(names, result, strict=True)]
    if as_json:
        print(json.dumps({name: {"weight": weight, "flows": flows} for name, weight, flows in rows}))
        return
    width = max(len("job"), *map(len, names))
    print(f"{'job':<{width}}  weight  flows of {flows_per_host}")
    for name, weight, flows in rows:
        print(f"{name:<{width}}  {weight:6.3f}  {flows:5}  {'#' * flows}")


def parse(text: str) -> dict[str, Any]:
    """A transfer as it was typed; its priority is ``None`` where nothing was said of it."""
    name, *settings = text.split(":")
    job, slash, transfer = name.partition("/")
    if not job or (slash and not transfer):
        raise BadInput(f"{text!r} has no name: write NAME:priority=2, or NAME/TRANSFER:pattern=broadcast")
    if not name.isprintable() or name.isspace():
        raise BadInput(f"{name!r}: use a name that can be printed")
    own: dict[str, Any] = {"job": job, "transfer": transfer or None, "priority": None, "pattern": "shuffle"}
    own |= {"machines": 0, "bytes": 0, "deadline_secs": None}
    for setting in settings:
        match setting.partition("="):
            case "priority", "=", value:
                try:
                    own["priority"] = float(value)
                    _native.check_priority(job, own["priority"])
                except ValueError:
                    raise BadInput(f"priority {value!r} of {name}: use a number above 0, at most 1e9") from None
            case "pattern", "=", "shuffle" | "broadcast" | "gather" as pattern:
                own["pattern"] = pattern
            case "pattern", "=", value:
                raise BadInput(f"pattern {value!r} of {name}: use shuffle, broadcast or gather")
            case "machines", "=", value if value.isdecimal() and 0 < int(value) < 2**32:
                own["machines"] = int(value)
            case "machines", "=", value:
                raise BadInput(f"machines {value!r} of {name}: use a whole number above 0, below 2^32")
            case "bytes", "=", value:
                try:
                    own["bytes"] = _native.parse_bytes(value)
                except ValueError as error:
                    raise BadInput(f"bytes of {name}: {error}") from None
            case "deadline", "=", value if re.fullmatch(r"-?[0-9]*\.?[0-9]+", value):
                own["deadline_secs"] = float(value)
            case "deadline", "=", value:
                raise BadInput(f"deadline {value!r} of {name}: use a number of seconds")
            case _:
                raise BadInput(f"{setting!r} of {name}: use {SETTINGS}")
    return own
