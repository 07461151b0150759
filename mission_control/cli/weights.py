"""`mission weights`: what each policy would give some jobs, or transfers of jobs."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any

import typer

from mission_control import _native, policies
from mission_control.cli.options import Json
from mission_control.scenario import BadInput

POLICIES = "Policy. " + ". ".join(f"{name}: {meaning}" for name, meaning in _native.policies())
POLICIES += ". python:MODULE:FUNCTION: a function of your own"
BAR_MAX = 40
"""Most characters of a bar."""
SETTINGS = (
    "priority=X, user=NAME (for a policy in Python), pattern=shuffle|broadcast|gather, machines=N, bytes=SIZE or "
    "deadline=SECONDS"
)


def weights(
    transfers: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB",
            help=f"Jobs in order of arrival: NAME[/TRANSFER][:KEY=VALUE]..., e.g. a/model:pattern=broadcast b. Keys: "
            f"{SETTINGS}. A job with several transfers is written once for each",
        ),
    ],
    policy: Annotated[str, typer.Option(metavar="NAME", help=POLICIES)] = "performance-centric",
    flows_per_host: Annotated[
        int, typer.Option(metavar="N", min=1, max=1_000_000, help="Chunks that a host receives at once, e.g. 10")
    ] = _native.FLOWS_PER_HOST,
    as_json: Json = False,
) -> None:
    """Compute the share of the network that each job would get.

    A job with several transfers gets a line for each of them. Nothing runs.
    """
    names = [text.split(":")[0] for text in transfers]
    if twice := {name for name in names if names.count(name) > 1}:
        raise BadInput(f"{min(twice)} is named twice: give each a name of its own, as in {min(twice)}/other")
    parsed = [parse(text) for text in transfers]
    priorities: dict[str, float] = {}
    for own in parsed:
        # One that says nothing has that of its job.
        if own["priority"] is not None and priorities.setdefault(own["job"], own["priority"]) != own["priority"]:
            raise BadInput(f"job {own['job']} has two priorities: priorities are of jobs, so give it one")
    parsed = [{**own, "priority": priorities.get(own["job"], 1.0)} for own in parsed]
    try:
        if policy.startswith(policies.PREFIX):
            asked, spec = counted(policy, parsed), "priority"
        else:
            asked, spec = parsed, policy
        result = _native.weights(spec, json.dumps(asked), flows_per_host)
    except (ValueError, OverflowError) as error:
        raise BadInput(str(error)) from None
    rows = [(name, weight, flows) for name, (weight, flows) in zip(names, result, strict=True)]
    if as_json:
        print(json.dumps({name: {"weight": weight, "flows": flows} for name, weight, flows in rows}))
        return
    width = max(len("job"), *map(len, names))
    print(f"{'job':<{width}}  weight  flows of {flows_per_host}")
    for name, weight, flows in rows:
        print(f"{name:<{width}}  {weight:6.3f}  {flows:5}  {'#' * round(flows * min(1, BAR_MAX / flows_per_host))}")


def counted(policy: str, transfers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ask a policy in Python; return the transfers as core's policy `priority` gives them the weights of its answer.

    Raises:
        BadInput: The policy cannot be imported, or it raises, or its answer has no valid weights.
        ValueError: There is no such policy.
    """
    try:
        function = policies.load(policy.removeprefix(policies.PREFIX))
    except ValueError:
        raise
    except Exception as error:  # importing runs a user's file
        raise BadInput(f"--policy {policy}: cannot be imported ({type(error).__name__}: {error})") from None
    jobs = list(dict.fromkeys(own["job"] for own in transfers))
    views = [view(own, jobs.index(own["job"]), arrival) for arrival, own in enumerate(transfers)]
    try:
        counts: Any = function(policies.jobs_of(views))
        of_jobs = "jobs" in policies.counts_of(counts)
        asked = []
        for number, own in enumerate(transfers):
            count = float(dict(counts)[own["job"] if of_jobs else (own["job"], own["transfer"] or "", "")])
            if not 0 < count < math.inf:
                raise ValueError(f"it gave {count:g} to {own['job']}: give a number above 0")
            asked.append({**own, "job": own["job"] if of_jobs else str(number), "priority": count})
    except Exception as error:  # a user's function may raise anything
        what = f"it named no count for {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise BadInput(f"--policy {policy}: {what}") from None
    most = max(own["priority"] for own in asked)
    return [{**own, "priority": max(own["priority"] / most, 1e-300)} for own in asked]


def view(own: dict[str, Any], job: int, arrival: int) -> dict[str, Any]:
    """Return a transfer as policies in Python see it in a cluster (:data:`mission_control.policies.Policy`)."""
    of_job = {key: own[key] for key in ("job", "priority", "deadline_secs", "user")}
    return {
        "job": {**of_job, "class": None, "arrival": job, "age_secs": 0.0},
        "transfer": {"job": own["job"], "from": own["transfer"] or "", "to": ""},
        "arrival": arrival,
        "pattern": own["pattern"],
        "evidence": "as typed",
        "machines": own["machines"],
        "asked_bytes": own["bytes"],
        "served_bytes": 0,
        "to_receive": {"host": own["bytes"]},
        "to_send": {},
        "bytes_per_sec": 0.0,
        "age_secs": 0.0,
    }


def parse(text: str) -> dict[str, Any]:
    """Parse a transfer; its priority is ``None`` if none was typed.

    Raises:
        BadInput: The text is no transfer.
    """
    name, *settings = text.split(":")
    job, slash, transfer = name.partition("/")
    if not job or (slash and not transfer):
        raise BadInput(f"{text!r} has no name: write NAME:priority=2, or NAME/TRANSFER:pattern=broadcast")
    if not name.isprintable() or name.isspace():
        raise BadInput(f"{name!r}: use a name that can be printed")
    own: dict[str, Any] = {"job": job, "transfer": transfer or None, "priority": None, "pattern": "shuffle"}
    own |= {"machines": 0, "bytes": 0, "deadline_secs": None, "user": None}
    for setting in settings:
        match setting.partition("="):
            case "priority", "=", value:
                try:
                    own["priority"] = float(value)
                    _native.check_priority(job, own["priority"])
                except ValueError:
                    raise BadInput(f"priority {value!r} of {name}: use a number above 0, at most 1e9") from None
            case "user", "=", value if value:
                own["user"] = value
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
