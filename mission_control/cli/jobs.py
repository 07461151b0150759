"""`mission jobs`: what runs on a cluster under Mission Control, and changes of it while it runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mission_control.cli import service as of_service
from mission_control.cli.options import Json, NewPriority, NewTransport, not_empty
from mission_control.cli.service import AllClusters, Token
from mission_control.cli.show import print_jobs
from mission_control.scenario import BadInput
from mission_control.service.asking import Asking
from mission_control.worlds.cluster import observe

app = typer.Typer(rich_markup_mode=None, help="List the jobs of a cluster, or change one while it runs.")
Scheduler = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        callback=not_empty,
        help="Scheduler of the cluster, e.g. tcp://HOST:8786 [DASK_SCHEDULER_ADDRESS]",
    ),
]


def only_one(scheduler: str | None, service: str | None) -> None:
    """
    Raises:
        BadInput: Both a cluster and a service are to be asked.
    """
    if scheduler is not None and service is not None:
        raise BadInput(
            "--scheduler and --service exclude each other: use --scheduler for one cluster, --service for all"
        )


@app.callback(invoke_without_command=True)
def jobs(
    context: typer.Context,
    scheduler: Scheduler = None,
    service: AllClusters = None,
    token_file: Token = None,
    as_json: Json = False,
) -> None:
    """List the jobs of a cluster, or change one while it runs.

    Each job has a line, and each of its transfers. With --service the jobs of all clusters of the service are listed.
    """
    only_one(scheduler, service)
    if context.invoked_subcommand is not None:
        context.obj = (scheduler, service, token_file)
        return
    if service is not None:
        of_service.print_jobs(Asking(service, token_file).look("/v1/status"), as_json)
        return
    with observe(scheduler) as cluster:
        status = cluster.status()
        ended = cluster.ended_lately()
    if as_json:
        print(json.dumps({**status, "ended": ended}))
    else:
        print_jobs(status)
        if ended:
            print(f"ended, and still explained by 'mission explain JOB': {', '.join(ended)}")


@app.command("set")
def change(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of the job, e.g. sort; with --service CLUSTER/JOB")],
    transport: NewTransport = None,
    priority: NewPriority = None,
    scheduler: Scheduler = None,
    service: AllClusters = None,
    token_file: Token = None,
    as_json: Json = False,
) -> None:
    """Change a job while it runs; no data is lost or duplicated."""
    if transport is None and priority is None:
        raise BadInput("nothing to set: give --transport NAME or --priority X")
    before = context.obj or (None, None, None)
    scheduler, service, token_file = scheduler or before[0], service or before[1], token_file or before[2]
    only_one(scheduler, service)
    if service is not None:
        of_service.change(job, priority, transport, service, token_file, as_json)
        return
    with observe(scheduler) as cluster:
        changed = cluster.change(job, transport=transport, priority=priority)
    if as_json:
        print(json.dumps(changed))
    else:
        plan = changed["plan"]["legs"][0]
        print(f"{job}: priority {changed['priority']:g}, next over {plan['transport']}: {plan['reason']}")
