"""Mission Control on Dask: `dask scheduler --preload mission_control.dask`, the same for `dask worker`."""

from __future__ import annotations

import logging
from typing import Any

import click

logger = logging.getLogger(__name__)


@click.command()
@click.option("--mission-policy", default=None, help="How jobs share the network (scheduler only).")
@click.option(
    "--mission-flows-per-host",
    default=None,
    help="Concurrent flows that every host receives: a number, all, or auto: found by trial (scheduler only).",
)
async def dask_setup(server: Any, mission_policy: str | None, mission_flows_per_host: str | None) -> None:
    """Called by Dask's ``--preload`` on the scheduler and on each worker."""
    from distributed import Scheduler, Worker

    from mission_control.dask.scheduler import MissionControlScheduler
    from mission_control.dask.worker import MissionControlWorker

    if isinstance(server, Scheduler):
        settings: dict[str, Any] = {"policy": mission_policy} if mission_policy else {}
        if mission_flows_per_host is not None:
            number = mission_flows_per_host.isdecimal()
            settings["flows_per_host"] = int(mission_flows_per_host) if number else mission_flows_per_host
        try:
            plugin = MissionControlScheduler(**settings)
            await plugin.start(server)
        except Exception as error:
            # Errors here must not stop the scheduler: Dask works without Mission Control.
            logger.warning("This scheduler runs no Mission Control: %s", error)
            return
        server.add_plugin(plugin, name=plugin.name)
    elif isinstance(server, Worker):
        # Set up before the worker registers, because the scheduler sends the secret of the cluster.
        server._pending_plugins = (*server._pending_plugins, MissionControlWorker())
