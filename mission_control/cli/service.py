"""`mission service`: what the control service knows, and changes of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from mission_control import _native
from mission_control.cli.options import Json, NewPriority, NewTransport
from mission_control.errors import BadInput, EnvironmentFailed
from mission_control.service.asking import Asking

app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Query the control service, and change its settings."
)
Where = Annotated[
    str | None,
    typer.Option(
        "--service",
        metavar="URL",
        help="Address of the service, e.g. https://HOST:8790; several with commas [MISSION_SERVICE]",
    ),
]
AllClusters = Annotated[
    str | None,
    typer.Option("--service", metavar="URL", help="Show all clusters of this service, e.g. https://HOST:8790 [off]"),
]
Token = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="Token of the service: viewer.token to look, operator.token to change [MISSION_SERVICE_TOKEN_FILE]",
    ),
]
POLICIES = ", ".join(name for name, _ in _native.policies())
HOST_MAX = 200
"""Letters of a host's name."""


@app.command()
def status(service: Where = None, token_file: Token = None, as_json: Json = False) -> int:
    """Print the leader, the clusters, their jobs and shares, and problems.

    The exit status is 1 if no replica leads, and 3 if none answers.
    """
    statuses = Asking(service, token_file).statuses()
    if as_json:
        print(json.dumps(statuses))
    else:
        print_statuses(statuses)
    answers = [own for own in statuses.values() if isinstance(own, dict)]
    if not answers:
        raise EnvironmentFailed("no replica of the service gives its status")
    return 0 if any(own["role"] == "leader" for own in answers) else 1


@app.command()
def policy(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {POLICIES}")],
    service: Where = None,
    token_file: Token = None,
    as_json: Json = False,
) -> None:
    """Change the policy by which the jobs of all clusters share hosts."""
    Asking(service, token_file).change({"ask": "policy", "policy": name})
    print(json.dumps({"policy": name}) if as_json else f"policy {name}")


@app.command("set")
def change(
    job: Annotated[
        str, typer.Argument(metavar="CLUSTER/JOB", help="Cluster and job, as mission service status prints them")
    ],
    priority: NewPriority = None,
    transport: NewTransport = None,
    service: Where = None,
    token_file: Token = None,
    as_json: Json = False,
) -> None:
    """Change the priority or the transport of a job while it runs."""
    cluster, name = split(job)
    changed: dict[str, Any] = {}
    if transport not in (None, "auto", *_native.transports()):
        raise BadInput(f"there is no transport {transport!r}: use auto, {', '.join(_native.transports())}")
    if priority is not None:
        try:
            _native.check_priority(name, priority)
        except ValueError as error:
            raise BadInput(str(error)) from None
        changed["priority"] = priority
    if transport is not None:
        changed["transport"] = None if transport == "auto" else transport
    if not changed:
        raise BadInput("nothing to set: give --priority X or --transport NAME")
    Asking(service, token_file).change({"ask": "change", "cluster": cluster, "job": name, "change": changed})
    if as_json:
        print(json.dumps({"cluster": cluster, "job": name, "change": changed}))
    else:
        said = ", ".join(f"{key} {value or 'auto'}" for key, value in changed.items())
        print(f"{job}: {said}")


@app.command()
def drain(
    host: Annotated[str, typer.Argument(metavar="HOST", help="Name of the host, as mission service status prints it")],
    undo: Annotated[bool, typer.Option("--undo", help="Let clusters use the host again [off]")] = False,
    service: Where = None,
    token_file: Token = None,
    as_json: Json = False,
) -> None:
    """Have all clusters leave a host: its workers hand their data over, and end."""
    if not host or not host.isprintable() or len(host) > HOST_MAX:
        raise BadInput(f"{host[:40]!r} is no name of a host: see mission service status")
    Asking(service, token_file).change({"ask": "undrain" if undo else "drain", "host": host})
    said = f"{host} may be used again" if undo else f"{host} is drained"
    print(json.dumps({"host": host, "drained": not undo}) if as_json else said)


@app.command()
def history(
    service: Where = None,
    token_file: Token = None,
    most: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Largest number of events; the last ones are printed")
    ] = 100,
    as_json: Json = False,
) -> None:
    """Print who led, which clusters and jobs came and went, and what operators changed."""
    happened = Asking(service, token_file).look("/v1/history", most=most)
    if as_json:
        print(json.dumps(happened))
        return
    for own in reversed(happened):
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - own["ago_secs"]))
        print(f"{at}  {own['text']}")
    if not happened:
        print("nothing has happened since this replica started")


def split(job: str) -> tuple[str, str]:
    """Return cluster and job of ``CLUSTER/JOB``; the cluster's name may have ``/``, as in ``tcp://HOST:PORT``.

    Raises:
        BadInput: It is not written so.
    """
    scheme, found, rest = job.partition("://")
    cluster, slash, name = (rest if found else job).partition("/")
    if not slash or not name or not cluster:
        raise BadInput(f"{job!r}: write CLUSTER/JOB, as in mission service status")
    return (f"{scheme}://{cluster}" if found else cluster), name


def print_statuses(statuses: dict[str, dict[str, Any] | str]) -> None:
    """Print what replicas say; of clusters and jobs what the leader says."""
    best: dict[str, Any] | None = None
    for address, own in statuses.items():
        if isinstance(own, str):
            print(f"replica {address}: {own}")
            continue
        epoch = f", epoch {own['epoch']}" if own["epoch"] is not None else ""
        print(f"replica {own['address']}: {own['role']}{epoch}, store at revision {own['revision']}")
        for problem in own["problems"]:
            print(f"  {problem}")
        if best is None or own["role"] == "leader":
            best = own
    if best is None:
        return
    print(f"policy {best['policy']}" + (f"; drained: {', '.join(best['drained'])}" if best["drained"] else ""))
    for cluster in best["clusters"]:
        here = "joined" if cluster["joined"] else "not here"
        hosts = ", ".join(cluster["hosts"])
        print(f"cluster {cluster['cluster']}: {here}, {cluster['transfers']} active transfers, on {hosts}")
    print_jobs(best, as_json=False)


def print_jobs(status: dict[str, Any], as_json: bool) -> None:
    """Print the jobs of all clusters, a line each."""
    if as_json:
        print(json.dumps(status["jobs"]))
        return
    for job in status["jobs"]:
        weight = "nothing active" if job["weight"] is None else f"{job['weight']:.3f} of its hosts' bytes"
        moves = f", {_native.format_bytes(int(job['bytes_per_sec']))}/s" if job["bytes_per_sec"] else ""
        print(f"  {job['cluster']}/{job['job']}: priority {job['priority']:g}, {weight}{moves}")
