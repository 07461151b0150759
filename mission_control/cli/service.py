"""`mission service`: what the control service knows, and changes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mission_control import _native
from mission_control.errors import BadInput, EnvironmentFailed
from mission_control.service.asking import Asking

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Ask the control service, and change what it has.")
Where = Annotated[
    str | None,
    typer.Option("--service", metavar="URL", help="https://HOST:PORT, several with commas [$MISSION_SERVICE]"),
]
Token = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="operator.token changes, viewer.token looks")
]
HOST_MAX = 200
"""Letters of a host's name."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON")]


@app.command()
def status(service: Where = None, token_file: Token = None, as_json: Json = False) -> int:
    """Print who leads, which clusters have joined, their jobs and shares, and what is wrong."""
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
    name: Annotated[str, typer.Argument(help="as in mission weights --help")],
    service: Where = None,
    token_file: Token = None,
) -> None:
    """Change how the jobs of all clusters share hosts."""
    Asking(service, token_file).change({"ask": "policy", "policy": name})
    print(f"policy {name}")


@app.command("set")
def change(
    job: Annotated[str, typer.Argument(metavar="CLUSTER/JOB", help="as in mission service status")],
    priority: Annotated[float | None, typer.Option(help="a number above 0; read by the policy priority")] = None,
    transport: Annotated[str | None, typer.Option(help="tcp, tls, ..; in force from the next chunk")] = None,
    service: Where = None,
    token_file: Token = None,
) -> None:
    """Change a job of some cluster while it runs."""
    cluster, slash, name = job.partition("/")
    if not slash or not name:
        raise BadInput(f"{job!r}: write CLUSTER/JOB, as in mission service status")
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
        raise BadInput("nothing to set: give --priority or --transport")
    Asking(service, token_file).change({"ask": "change", "cluster": cluster, "job": name, "change": changed})
    print(f"{job}: {', '.join(f'{key} {value}' for key, value in changed.items())}")


@app.command()
def drain(
    host: Annotated[str, typer.Argument(help="as in mission service status")],
    undo: Annotated[bool, typer.Option("--undo", help="let clusters use it again")] = False,
    service: Where = None,
    token_file: Token = None,
) -> None:
    """Have all clusters leave a host: their workers hand over what they hold, and end."""
    if not host or not host.isprintable() or len(host) > HOST_MAX:
        raise BadInput(f"{host[:40]!r} is no name of a host: see mission service status")
    Asking(service, token_file).change({"ask": "undrain" if undo else "drain", "host": host})
    print(f"{host} may be used again" if undo else f"{host} is drained")


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
    for job in best["jobs"]:
        weight = "nothing active" if job["weight"] is None else f"{job['weight']:.3f} of its hosts' bytes"
        print(f"  {job['cluster']}/{job['job']}: priority {job['priority']:g}, {weight}")
