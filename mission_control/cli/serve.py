"""`mission serve`: a replica of the control service."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from mission_control import _native
from mission_control.cli.options import JsonLines
from mission_control.errors import BadInput, EnvironmentFailed
from mission_control.service import serving

SAY_EVERY_S = 1.0
POLICIES = ", ".join(name for name, _ in _native.policies() if not name.startswith("python:"))


def serve(
    store: Annotated[
        str | None,
        typer.Option(
            metavar="etcd://HOST:PORT,..",
            help="Store that replicas share, e.g. etcd://10.0.0.1:2379 [a file in --state]",
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS:PORT", help="Address and port to listen at, e.g. 0.0.0.0:8790")
    ] = f"127.0.0.1:{serving.PORT}",
    address: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Address that clusters use, e.g. https://HOST:8790 [name of this host]"),
    ] = None,
    name: Annotated[
        str,
        typer.Option(metavar="NAME", help="Name of the service; replicas with one name and one store are one service"),
    ] = "mission-control",
    policy: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"Policy until mission service policy changes it: {POLICIES}"),
    ] = "performance-centric",
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the tokens and of the file store [~/.local/state/mission-control/service]"
        ),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate chain of this replica, PEM [none: no TLS]")
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Key of --certificate, PEM")] = None,
    store_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CA of etcd's certificate, PEM; enables TLS to etcd [off]")
    ] = None,
    store_certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Client certificate chain for etcd, PEM [none]")
    ] = None,
    store_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Key of --store-certificate, PEM")] = None,
    as_json: JsonLines = False,
) -> None:
    """Run a replica of the control service until it is interrupted.

    With --store etcd://.. on two or more hosts one replica leads and the others follow. Give all of them the same
    three tokens: copy the files *.token in --state. With --json the first line has the address and the files of the
    tokens; each change of the status prints another line.
    """
    if (certificate is None) != (key is None):
        raise BadInput("--certificate and --key go together: give both, or neither")
    if (store_certificate is None) != (store_key is None):
        raise BadInput("--store-certificate and --store-key go together: give both, or neither")
    pair = (certificate, key) if certificate is not None and key is not None else None
    shown = (store_certificate, store_key) if store_certificate is not None and store_key is not None else None
    folder = state or serving.default_folder()
    service, found_at = serving.start(
        name=name,
        listen=listen,
        address=address,
        store=store,
        folder=folder,
        policy=policy,
        certificate=pair,
        store_ca=store_ca,
        store_certificate=shown,
    )
    print_start(name, found_at, store or str(folder / "store"), folder, as_json)
    said = ""
    status: dict[str, Any] = {}
    try:
        while (text := service.status()) is not None:
            status = json.loads(text)
            now = f"{status['role']}, epoch {status['epoch']}" if status["epoch"] is not None else status["role"]
            now = "; ".join([now, f"{len(status['clusters'])} clusters", *status["problems"]])
            if now != said:
                said = now
                print(json.dumps(status) if as_json else f"{time.strftime('%H:%M:%S')} {now}", flush=True)
            time.sleep(SAY_EVERY_S)
    finally:
        # Another replica leads at once, and does not wait for the lease.
        service.stop()
    raise EnvironmentFailed("the service has ended by itself: this is a fault of it; start it again")


def print_start(name: str, address: str, store: str, folder: Path, as_json: bool) -> None:
    """Print the address of the replica, and how clusters and operators use it."""
    if as_json:
        tokens = {role: str(folder / f"{role}.token") for role in serving.TOKENS}
        print(json.dumps({"service": name, "address": address, "store": store, "token_files": tokens}), flush=True)
        return
    print(f"service {name} at {address}, store {store}")
    print(
        f"a cluster joins with: MISSION_SERVICE={address} MISSION_SERVICE_TOKEN_FILE={folder / 'cluster.token'} "
        "dask scheduler --preload mission_control.dask"
    )
    look = f"mission service status --service {address} --token-file {folder / 'viewer.token'}"
    print(f"look at it with: {look}", flush=True)
