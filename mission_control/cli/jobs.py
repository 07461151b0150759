"""`mission jobs`: what runs on a cluster under Mission Control, and changes of it while it runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mission_control.cli.show import print_jobs
from mission_control.scenario import BadInput
from mission_control.worlds.cluster import observe

app = typer.Typer(rich_markup_mode=None, help="Lists the jobs of a cluster; 'set' changes one while it runs.")
Scheduler = Annotated[
    str | None, typer.Option(help="as in tcp://HOST:8786; by default what DASK_SCHEDULER_ADDRESS says")
]
Json = Annotated[bool, typer.Option("--json", help="for programs")]


@app.callback(invoke_without_command=True)
def jobs(context: typer.Context, scheduler: Scheduler = None, as_json: Json = False) -> None:
    """Lists the jobs of a cluster with their transfers."""
    if context.invoked_subcommand is not None:
        context.obj = scheduler
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
    job: Annotated[str, typer.Argument(help="name of the job")],
    transport: Annotated[str | None, typer.Option(help="auto, tcp, tls, ...; in force from the next chunk")] = None,
    priority: Annotated[float | None, typer.Option(help="a number above 0; read by the policy priority")] = None,
    scheduler: Scheduler = None,
    as_json: Json = False,
) -> None:
    """Changes a job while it runs: no byte is lost, and none comes twice."""
    if transport is None and priority is None:
        raise BadInput("nothing to set: give --transport or --priority")
    with observe(scheduler or context.obj) as cluster:
        changed = cluster.change(job, transport=transport, priority=priority)
    if as_json:
        print(json.dumps(changed))
    else:
        plan = changed["plan"]["legs"][0]
        print(f"{job}: priority {changed['priority']:g}, next over {plan['transport']}: {plan['reason']}")
