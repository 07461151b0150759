"""World `local`: a Dask cluster of processes on this machine's loopback, made for the run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask
from distributed import Client, LocalCluster, Security

import mission_control
from mission_control import _native, interrupts
from mission_control.scenario import BadInput, Scenario
from mission_control.worlds.site import Site


def local_cluster(**options: Any) -> LocalCluster:
    """Start a cluster of processes on this machine, which leave interrupts to this process.

    Args:
        options: Of ``distributed.LocalCluster``.
    """
    with interrupts.kept_from_workers():
        # Below that, workers of a cluster that is closed while it works log what they did not end, with tracebacks.
        return LocalCluster(**{"silence_logs": logging.CRITICAL, **options})


@contextmanager
def local(scenario: Scenario, scheduler: str | None = None, *, install_policy: bool = False) -> Iterator[Site]:
    """Start the cluster, with TLS certificates if jobs demand encryption, and end it.

    Raises:
        BadInput: the rate of the link is malformed.
    """
    topology, control = scenario.topology, scenario.control
    try:
        _native.link_rate()
    except ValueError as error:
        raise BadInput(str(error)) from None  # workers would print long tracebacks
    security = Security.temporary() if control.encrypt is True else None
    # Loopback has no rate of its own. What paces it is the process that sends.
    limit = None if topology.link_rate == "auto" else f"{topology.link_rate} bit/s"
    with warnings.catch_warnings(), dask.config.set({"mission-control.send-limit": limit}):
        warnings.simplefilter("ignore")  # a dashboard port in use is no concern of a run
        cluster = local_cluster(
            n_workers=topology.hosts,
            threads_per_worker=topology.threads,
            memory_limit=topology.memory_limit,
            security=security,
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.ERROR,
        )
    with cluster:
        with Client(cluster) as client:
            mission_control.install(client, policy=control.policy, flows_per_host=control.flows_per_host)
        yield Site(lambda: Client(cluster, set_as_default=False))
