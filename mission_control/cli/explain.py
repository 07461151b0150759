"""`mission explain`: of each transfer of a job its share, its transport, and why."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mission_control.cli.jobs import Scheduler, only_one
from mission_control.cli.options import Json
from mission_control.cli.service import AllClusters, Token, split
from mission_control.cli.show import print_explanation, print_problems, print_rows
from mission_control.errors import BadInput
from mission_control.service.asking import Asking
from mission_control.worlds.cluster import observe

MOST = 1000
"""Transfers of one job of a service."""


def explain(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of the job, e.g. sort; with --service CLUSTER/JOB")],
    scheduler: Scheduler = None,
    service: AllClusters = None,
    token_file: Token = None,
    as_json: Json = False,
) -> None:
    """Explain the share and the transport of each transfer of a job.

    Print the pattern, weight, flows and transport of each transfer, the transports that were refused, and the reasons.
    A job that has ended recently is explained, too.
    """
    only_one(scheduler, service)
    if service is not None:
        explain_of_service(job, Asking(service, token_file), as_json)
        return
    with observe(scheduler) as cluster:
        own = cluster.job_or_ended(job)
        status = cluster.status()
    problems = {worker: facts["problems"] for worker, facts in status["workers"].items() if facts["problems"]}
    problems |= {worker: [why] for worker, why in status["without"].items()}
    if as_json:
        print(json.dumps({**own, "policy": status["policy"], "problems": problems, "off": status["off"]}))
    else:
        print_explanation(own, status["policy"])
        print_problems(status)


def explain_of_service(job: str, asking: Asking, as_json: bool) -> None:
    """Print what the service knows of the active transfers of a job.

    Raises:
        BadInput: The service has no such job.
    """
    cluster, name = split(job)
    status = asking.look("/v1/status")
    own = next((own for own in status["jobs"] if (own["cluster"], own["job"]) == (cluster, name)), None)
    if own is None:
        raise BadInput(f"cluster {cluster} has no job {name}: see mission jobs --service")
    page = asking.transfers(MOST, cluster=cluster, job=name)
    if as_json:
        print(json.dumps(own | {"policy": status["policy"], "transfers": page["rows"]}))
    else:
        print_rows(own, page["rows"], status["policy"])
        if page["found"] > len(page["rows"]):
            print(f"  and {page['found'] - len(page['rows'])} more transfers, which move less")
