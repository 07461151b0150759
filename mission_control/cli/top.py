"""`mission top`: the transfers of a cluster, live."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from mission_control.cli.jobs import Json, Scheduler
from mission_control.cli.show import LiveTable
from mission_control.worlds.cluster import observe


def top(
    scheduler: Scheduler = None,
    every: Annotated[float, typer.Option(min=0.1, help="seconds between two looks")] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, help="end after so many looks")] = None,
    most: Annotated[
        int | None, typer.Option(min=1, help="transfers, those that moved last; by default what fits the terminal")
    ] = None,
    as_json: Json = False,
) -> None:
    """Shows the transfers of a cluster until it is interrupted: job, pattern, weight, flows, transport, rate."""
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
