"""`mission explain`: of each transfer of a job its share, its transport, and why."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mission_control.cli.jobs import Json, Scheduler
from mission_control.cli.show import print_explanation, print_problems
from mission_control.worlds.cluster import observe


def explain(
    job: Annotated[str, typer.Argument(help="name of the job")], scheduler: Scheduler = None, as_json: Json = False
) -> None:
    """Tells of each transfer of a job its pattern, weight, flows and transport, what was refused, and why."""
    with observe(scheduler) as cluster:
        own = cluster.job_or_ended(job)
        status = cluster.status()
    problems = {worker: facts["problems"] for worker, facts in status["workers"].items() if facts["problems"]}
    problems |= {worker: [why] for worker, why in status["without"].items()}
    if as_json:
        print(json.dumps({**own, "policy": status["policy"], "problems": problems}))
    else:
        print_explanation(own, status["policy"])
        print_problems(status)
