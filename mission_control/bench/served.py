"""`mission bench served`: a shuffle on a cluster that is a member of a control service, and on one that is not."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distributed import Client

import mission_control
from mission_control.bench.parts import shuffle
from mission_control.bench.service import serving_processes
from mission_control.environment import describe
from mission_control.experiments.compare import interval
from mission_control.service.membership import CLUSTER, SERVICE, TOKEN_FILE
from mission_control.worlds.local import local_cluster

WORKERS = 4
PART = 4 << 20
PARTS = 8
"""Of each worker, for each worker: 512 MiB in all, of which three quarters go to another worker."""
JOINS_S = 30.0


def measure(rounds: int = 30, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure pairs, in turn; which of a pair is first changes.

    Returns:
        ``with_s``, ``without_s``: medians; ``ratio``: of with to without, with ``median``, ``low`` and ``high``
        (95 %).
    """
    with ExitStack() as stack:
        own = stack.enter_context(serving_processes(None, 1))
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="mission-bench-")))
        token = folder / "cluster.token"
        token.write_text(own.tokens["cluster"])
        before = dict(os.environ)
        stack.callback(os.environ.update, before)
        clients = {}
        for served in (True, False):
            for name in (SERVICE, TOKEN_FILE, CLUSTER):
                os.environ.pop(name, None)
            if served:
                os.environ |= {SERVICE: f"http://127.0.0.1:{own.ports[0]}", TOKEN_FILE: str(token), CLUSTER: "bench"}
            cluster = local_cluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=":0")
            client = Client(stack.enter_context(cluster), set_as_default=False)
            clients[served] = stack.enter_context(client)
            mission_control.install(client, policy="fair")
        end = time.monotonic() + JOINS_S
        while not is_guided(clients[True]):
            shuffle(clients[True], PARTS, PART)
            if time.monotonic() > end:
                raise TimeoutError(f"the cluster is not guided by the service within {JOINS_S:.0f} s")
        taken: dict[bool, list[float]] = {True: [], False: []}
        for number in range(rounds + 1):
            say(f"pair {number} of {rounds}" if number else "warm-up")
            for served in (True, False) if number % 2 else (False, True):
                seconds = shuffle(clients[served], PARTS, PART)
                if number:
                    taken[served].append(seconds)
        if not is_guided(clients[True]):
            raise RuntimeError("the service no longer guides the cluster: the pairs compare nothing")
    ratios = [with_it / without for with_it, without in zip(taken[True], taken[False], strict=True)]
    return {
        "with_s": statistics.median(taken[True]),
        "without_s": statistics.median(taken[False]),
        "ratio": interval(ratios),
        "pairs": rounds,
        "environment": describe(),
    }


def is_guided(client: Client) -> bool:
    """Whether the service's weights are in force."""
    status = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins["mission-control"].status())
    return bool(status["service"]["guided"])
