"""Two Dask workers of `mission bench transfer`: from finished tasks on one to a task on the other, end to end.

`python -m mission_control.bench.workers KIND TRANSPORT CONGESTION`: starts a cluster; speaks as
`mission_control.bench.peer` does. A sample is one task on the second worker whose inputs are COUNT objects of BYTES on
the first: from its submission until its result is known. KIND is `dask`, whose inputs are the arrays themselves, or
`mission`, whose inputs are references.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
from distributed import Client, Security, wait

import mission_control
from mission_control.workers import workers_of
from mission_control.worlds.local import local_cluster

JOB = "bench"


def main() -> None:
    kind, transport, congestion = sys.argv[1:]
    produce, consume = {"dask": (make, look), "mission": (put, fetch)}[kind]
    security = Security.temporary() if transport == "tls" else None
    cluster = local_cluster(
        n_workers=2,
        threads_per_worker=1,
        security=security,
        dashboard_address="127.0.0.1:0",
    )
    with cluster, Client(cluster) as client:
        owner, reader = workers_of(client)
        pids = client.run(pin, congestion)
        job: Any = nullcontext()
        if kind == "mission":
            job = mission_control.job(JOB, encrypt=transport == "tls", transport=transport, client=client)
        with job:
            if kind == "mission":
                client.run(command, json.dumps(pinned_plan(client, congestion)))
            print(json.dumps([os.getpid(), *pids.values()]), flush=True)
            for line in sys.stdin:
                size, count = map(int, line.split())
                sample(client, produce, consume, owner, reader, size, 1)  # warms up
                print(sample(client, produce, consume, owner, reader, size, count), flush=True)


def sample(client: Client, produce: Any, consume: Any, owner: str, reader: str, size: int, count: int) -> float:
    """Seconds from the submission of the reading task until its result is known."""
    objects = client.map(produce, [size] * count, workers=[owner], pure=False)
    wait(objects)
    began = time.perf_counter()
    got = client.submit(consume, objects, workers=[reader], pure=False).result()
    seconds = time.perf_counter() - began
    assert got == size * count, (got, size, count)
    return seconds


def make(size: int) -> np.ndarray:
    return np.full(size, 7, np.uint8)


def look(arrays: list[np.ndarray]) -> int:
    return sum(map(len, arrays))


def put(size: int) -> mission_control.Reference:
    return mission_control.put([make(size).data])


def fetch(references: list[mission_control.Reference]) -> int:
    return sum(memoryview(part).nbytes for part in mission_control.fetch(references))


def pin(congestion: str) -> int:
    """In a worker: the same congestion control on all connections of Dask from now on; gives the process id."""
    from distributed.comm import tcp

    unpinned = tcp.set_tcp_timeout

    def set_tcp_timeout(stream: Any) -> None:
        unpinned(stream)
        if not stream.closed():
            stream.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())

    tcp.set_tcp_timeout = set_tcp_timeout
    return os.getpid()


def pinned_plan(client: Client, congestion: str) -> dict[str, Any]:
    """The job's plan, with the same congestion control on its data connections."""
    jobs = client.sync(client.scheduler.mission_control_status)["jobs"]
    plan = next(job["plan"] for job in jobs if job["job"] == JOB)
    for leg in plan["legs"]:
        leg["congestion_control"] = congestion
    return {"command": "plan", "job": JOB, "plan": plan}


def command(text: str, dask_worker: Any) -> None:
    """In a worker: hands its data plane a command."""
    dask_worker.plugins["mission-control"].endpoint.command(text)


if __name__ == "__main__":
    main()
