"""`mission doctor`: what works on this machine and on a cluster, and what to do where something does not."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import dask
import typer
from rich.console import Console
from rich.text import Text

from mission_control import doctor as checks
from mission_control.cli.options import Json, not_empty
from mission_control.worlds.cluster import connect

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
Cluster = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="URL",
        callback=not_empty,
        help="Check this cluster, too, e.g. tcp://HOST:8786 [DASK_SCHEDULER_ADDRESS, if it is set]",
    ),
]


def doctor(scheduler: Cluster = None, as_json: Json = False) -> int:
    """Check this machine, and a cluster if one is named.

    Each finding is ok, warn or fail. A finding that is not ok says what to do. The exit status is 3 if one fails.
    """
    found = {"this machine": checks.machine(os.environ)}
    if (address := scheduler or dask.config.get("scheduler-address", None)) is not None:
        with connect(address) as client:
            found["cluster"] = checks.of_cluster(client)
    failed = any(finding.state == "fail" for findings in found.values() for finding in findings)
    if as_json:
        rows = [{"of": of, **finding.as_dict()} for of, findings in found.items() for finding in findings]
        print(json.dumps({"ok": not failed, "findings": rows}))
        return 3 if failed else 0
    # Rich leaves colours out where they are not wanted: NO_COLOR, and output that is no terminal.
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    for of, findings in found.items():
        console.print(Text(of, style="bold"))
        wide = max(len(finding.what) for finding in findings)
        for finding in findings:
            line = Text("  ").append(f"{finding.state:<5}", COLOURS[finding.state]).append(f"{finding.what:<{wide}}  ")
            console.print(line.append(finding.found))
            if finding.do:
                console.print(Text(f"{'':<{wide + 9}}do: {finding.do}"))
    return 3 if failed else 0
