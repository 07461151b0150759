"""`mission explain`: of each transfer of a job its share, its transport, and why."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mission_control.cli.jobs import Json, Scheduler
from mission_control.cli.show import print_explanation
from mission_control.worlds.cluster import observe


def explain(
    job: Annotated[str, typer.Argument(help="name of the job")], scheduler: Scheduler = None, as_json: Json = False
) -> None:
    """Tells of each transfer of a job its pattern, weight, flows and transport, what was refused, and why."""
    with observe(scheduler) as cluster:
        own = cluster.job(job)
        policy = cluster.status()["policy"]
    if as_json:
        print(json.dumps({**own, "policy": policy}))
    else:
        print_explanation(own, policy)
