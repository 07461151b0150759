"""World `cluster`: a Dask cluster that is already running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from distributed import Client

import mission_control
from mission_control.scenario import BadInput, Scenario

CONNECT_S = 10


@contextmanager
def cluster(scenario: Scenario, scheduler: str | None = None) -> Iterator[Callable[[], Client]]:
    """Connects to the scheduler; installs Mission Control where no preload did, and the scenario's policy."""
    assert scheduler is not None
    try:
        client = Client(scheduler, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise BadInput(f"no scheduler answers at {scheduler}: start one with 'dask scheduler' ({error})") from None
    with client:
        control = scenario.control
        mission_control.install(client, policy=control.policy, flows_per_host=control.flows_per_host)
        if not client.scheduler_info()["workers"]:
            raise BadInput(f"{scheduler} has no workers: start some with 'dask worker {scheduler}'")
        yield lambda: Client(scheduler, timeout=CONNECT_S, set_as_default=False)
