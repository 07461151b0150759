"""`mission serve`: a replica of the control service."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from mission_control.errors import BadInput, EnvironmentFailed
from mission_control.service import serving

SAY_EVERY_S = 1.0


def serve(
    store: Annotated[
        str | None,
        typer.Option(metavar="etcd://HOST:PORT,..", help="where replicas keep what they share [a file in --state]"),
    ] = None,
    listen: Annotated[str, typer.Option(metavar="ADDRESS:PORT", help="where it listens")] = f"127.0.0.1:{serving.PORT}",
    address: Annotated[
        str | None, typer.Option(metavar="URL", help="where clusters find this replica [this host's name]")
    ] = None,
    name: Annotated[
        str, typer.Option(help="of the service: replicas of one name in one store are one service")
    ] = "mission-control",
    policy: Annotated[
        str, typer.Option(help="how jobs share hosts, until somebody changes it")
    ] = "performance-centric",
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="of the tokens, and of the file store [~/.local/state/mission-control/service]"
        ),
    ] = None,
    certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="certificate chain, PEM")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="its key, PEM")] = None,
    store_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="vouches for etcd, which is spoken with by TLS then, PEM")
    ] = None,
    store_certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="certificate chain that is shown to etcd, PEM")
    ] = None,
    store_key: Annotated[Path | None, typer.Option(metavar="FILE", help="its key, PEM")] = None,
) -> None:
    """Run a replica of the control service until it is interrupted.

    With --store etcd://.. on two or more hosts one leads and the others follow; give all of them the same three tokens
    (copy the files *.token in --state).
    """
    if (certificate is None) != (key is None):
        raise BadInput("--certificate and --key go together")
    if (store_certificate is None) != (store_key is None):
        raise BadInput("--store-certificate and --store-key go together")
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
    print(f"service {name} at {found_at}, store {store or folder / 'store'}", flush=True)
    print(
        f"a cluster joins with: MISSION_SERVICE={found_at} MISSION_SERVICE_TOKEN_FILE={folder / 'cluster.token'} "
        "dask scheduler --preload mission_control.dask",
        flush=True,
    )
    print(
        f"look at it with: mission service status --service {found_at} --token-file {folder / 'viewer.token'}",
        flush=True,
    )
    said = ""
    status: dict[str, Any] = {}
    try:
        while (text := service.status()) is not None:
            status = json.loads(text)
            now = f"{status['role']}, epoch {status['epoch']}" if status["epoch"] is not None else status["role"]
            now = "; ".join([now, f"{len(status['clusters'])} clusters", *status["problems"]])
            if now != said:
                said = now
                print(f"{time.strftime('%H:%M:%S')} {now}", flush=True)
            time.sleep(SAY_EVERY_S)
    finally:
        # Another replica leads at once, and does not wait for the lease.
        service.stop()
    raise EnvironmentFailed("the service has ended by itself: this is a fault of it; start it again")
