"""`mission top`: the transfers of a cluster, live."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from mission_control.cli.jobs import Scheduler, only_one
from mission_control.cli.options import JsonLines, finite
from mission_control.cli.service import AllClusters, Token
from mission_control.cli.show import LiveTable
from mission_control.errors import EnvironmentFailed
from mission_control.service.asking import Asking
from mission_control.worlds.cluster import observe

EVERY_MAX_S = 86_400
MOST = 1000
"""Transfers, where nothing limits them: what the service gives at once."""


def top(
    scheduler: Scheduler = None,
    every: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.1, max=EVERY_MAX_S, callback=finite, help="Refresh interval, e.g. 0.5"),
    ] = 1.0,
    count: Annotated[int | None, typer.Option(metavar="N", min=1, help="End after N refreshes [never]")] = None,
    most: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Largest number of transfers; those that moved last come first [what fits the terminal]",
        ),
    ] = None,
    service: AllClusters = None,
    token_file: Token = None,
    as_json: JsonLines = False,
) -> None:
    """Show the transfers of a cluster, live.

    Print job, pattern, weight, flows, transport and rate until interrupted. With --service show the transfers of all
    clusters of the service, the fastest first. With --json print one line of JSON per refresh.
    """
    if service is not None:
        only_one(scheduler, service)
        top_of_all(Asking(service, token_file), every, count, most, as_json)
        return
    with observe(scheduler) as cluster, LiveTable(quiet=as_json) as table:
        looks = 0
        while True:
            # Looking at more than can be seen would cost the scheduler more, the more transfers there are.
            status = cluster.status(most if as_json else most or table.console.height)
            if as_json:
                print(json.dumps(status), flush=True)
            else:
                table.show("", "", status)
            looks += 1
            if looks == count:
                return
            time.sleep(every)


def top_of_all(asking: Asking, every: float, count: int | None, most: int | None, as_json: bool) -> None:
    """Show the transfers of all clusters of a service."""
    with LiveTable(quiet=as_json) as table:
        looks = 0
        while True:
            try:
                page = asking.transfers(most or (MOST if as_json else table.console.height))
            except EnvironmentFailed as error:
                # While another replica takes over; what cannot be asked at all is an error at once.
                if looks == 0 or count is not None:
                    raise
                table.say(str(error))
                time.sleep(every)
                continue
            if as_json:
                print(json.dumps(page), flush=True)
            else:
                table.show("", "", as_status(page))
            looks += 1
            if looks == count:
                return
            time.sleep(every)


def as_status(page: dict[str, Any]) -> dict[str, Any]:
    """Transfers of a service as a cluster's status has them: jobs are named ``CLUSTER/JOB``."""
    jobs: dict[str, dict[str, Any]] = {}
    for row in page["rows"]:
        name = f"{row['cluster']}/{row['job']}"
        job = jobs.setdefault(name, {"job": name, "transfers": []})
        # Measured there: what is known here is only when it was asked.
        own = {
            "rate": row["bytes_per_sec"],
            "flows": None,
            "flows_now": row["flows"],
            "transport": {"chosen": row["transport"]},
        }
        job["transfers"].append(row | own)
    return {"time": time.time(), "jobs": list(jobs.values()), "hidden": page["found"] - len(page["rows"])}
