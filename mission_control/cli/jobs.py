"""`mission jobs`: what runs on a cluster under Mission Control, and changes of it while it runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mission_control.cli import service as of_service
from mission_control.cli.service import AllClusters, Token
from mission_control.cli.show import print_jobs
from mission_control.scenario import BadInput
from mission_control.service.asking import Asking
from mission_control.worlds.cluster import observe

app = typer.Typer(rich_markup_mode=None, help="Lists the jobs of a cluster; 'set' changes one while it runs.")
Scheduler = Annotated[
    str | None, typer.Option(help="as in tcp://HOST:8786; by default what DASK_SCHEDULER_ADDRESS says")
]
Json = Annotated[bool, typer.Option("--json", help="for programs")]


def only_one(scheduler: str | None, service: str | None) -> None:
    """
    Raises:
        BadInput: Both a cluster and a service are to be asked.
    """
    if scheduler is not None and service is not None:
        raise BadInput("give --scheduler for one cluster, or --service for all clusters of a service")


@app.callback(invoke_without_command=True)
def jobs(
    context: typer.Context,
    scheduler: Scheduler = None,
    service: AllClusters = None,
    token_file: Token = None,
    as_json: Json = False,
) -> None:
    """Lists the jobs of a cluster with their transfers; with --service those of all its clusters."""
    only_one(scheduler, service)
    if context.invoked_subcommand is not None:
        context.obj = (scheduler, service, token_file)
        return
    if service is not None:
        of_service.print_jobs(Asking(service, token_file).look("/v1/status"), as_json)
        return
    with observe(scheduler) as cluster:
        status = cluster.status()
    if as_json:
        print(json.dumps(status))
    else:
        print_jobs(status)


@app.command("set")
def change(
    context: typer.Context,
    job: Annotated[str, typer.Argument(help="name of the job; with --service CLUSTER/JOB")],
    transport: Annotated[str | None, typer.Option(help="auto, tcp, tls, ...; in force from the next chunk")] = None,
    priority: Annotated[float | None, typer.Option(help="a number above 0; read by the policy priority")] = None,
    scheduler: Scheduler = None,
    service: AllClusters = None,
    token_file: Token = None,
    as_json: Json = False,
) -> None:
    """Changes a job while it runs: no byte is lost, and none comes twice."""
    if transport is None and priority is None:
        raise BadInput("nothing to set: give --transport or --priority")
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
