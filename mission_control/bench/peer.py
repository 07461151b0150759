"""One receiver of `mission bench transfer`, with its sender in a process of its own.

`python -m mission_control.bench.peer KIND TRANSPORT CONGESTION FLOWS`: prints both process ids; then, for each line
`BYTES COUNT` that it reads, fetches COUNT objects of so many bytes and prints the seconds. KIND is `mission`, `touch`
(the same, and a byte of each page that arrived is read) or `dask`.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from mission_control import _native
from mission_control.bench.transfer import OBJECTS, TOKEN

MEMORY_BYTES = 2 << 30


def main() -> None:
    kind, transport, congestion, flows = sys.argv[1:]
    sender = _send_dask if kind == "dask" else _send_mission
    connection, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=sender, args=(other, transport, congestion, int(flows)), daemon=True
    )
    process.start()
    if kind == "dask":
        result = connection.recv()
        print(json.dumps([os.getpid(), process.pid]), flush=True)
        asyncio.run(_dask_fetch(result, congestion))
        return
    connection.recv()
    endpoint = _endpoint(transport, int(flows))
    connection.send("there is a neighbour")
    result = connection.recv()
    print(json.dumps([os.getpid(), process.pid]), flush=True)
    _loop(_mission_fetcher(endpoint, result, transport, congestion, int(flows), kind == "touch"))


def _loop(fetch: Callable[[int], None]) -> None:
    for line in sys.stdin:
        size, count = map(int, line.split())
        fetch(size)  # warms up
        began = time.perf_counter()
        for _ in range(count):
            fetch(size)
        print(time.perf_counter() - began, flush=True)


def _endpoint(transport: str, flows: int) -> _native.Endpoint:
    """Each pair is a cluster of its own: all of a cluster share the slots of their host."""
    token = TOKEN + f"{transport} {flows}".encode()
    return _native.Endpoint("127.0.0.1", token, memory_limit=MEMORY_BYTES, spool_folder="/tmp", flows_per_host=flows)


def _send_mission(connection: Any, transport: str, congestion: str, flows: int) -> None:
    endpoint = _endpoint(transport, flows)
    connection.send("ready")
    connection.recv()
    time.sleep(0.2)  # the neighbour joins the slots of the host, and is known then
    demands = json.dumps({"encrypt": "none", "transport": transport})
    objects = {size: endpoint.put([bytes(size)], "bench", demands)[0] for size in OBJECTS}
    connection.send((endpoint.address, objects))
    # The other end says nothing more; it is gone when the benchmark has ended.
    with suppress(EOFError):
        connection.recv()


def _mission_fetcher(
    endpoint: _native.Endpoint, result: Any, transport: str, congestion: str, flows: int, touch: bool
) -> Callable[[int], None]:
    """Objects are cut into as many chunks as there are flows, or more."""
    address, objects = result
    leg = {
        "transport": transport,
        "reach": "same-host" if transport == "shm" else "anywhere",
        "encryption": "opportunistic" if transport == "tls" else "none",
        "congestion_control": congestion,
        "rto_min_us": 5000,
        "subflows": 1 if transport == "mptcp" else None,
        "reason": "benchmark",
    }

    def fetch(size: int) -> None:
        (part,), _, _ = endpoint.fetch("bench", "from", "to", "{}", [(objects[size], 0, size, [address])], False)
        assert len(part) == size
        if touch:
            np.frombuffer(memoryview(part), np.uint8)[::4096].sum()

    def planned(size: int) -> None:
        if chunks.get("size") != size:
            chunks["size"] = size
            block = 256 << 10
            part = max(block, min(4 << 20, -(-size // flows // block) * block))
            plan = {"command": "plan", "job": "bench", "plan": {"legs": [leg], "chunk_bytes": part, "refused": []}}
            endpoint.command(json.dumps(plan))
        fetch(size)

    chunks: dict[str, int] = {}
    return planned


def _send_dask(connection: Any, transport: str, congestion: str, flows: int) -> None:
    asyncio.run(_dask_serve(connection, transport, congestion))


def _security() -> Any:
    from distributed import Security

    return Security.temporary()


async def _dask_serve(connection: Any, transport: str, congestion: str) -> None:
    """Dask's own comm layer, as its workers use it: a request is a message, an object a message with a frame."""
    from distributed.comm import listen
    from distributed.protocol import to_serialize

    security = _security() if transport == "tls" else None
    objects = {size: bytes(size) for size in OBJECTS}

    async def handle(comm: Any) -> None:
        _pin(comm, congestion)
        try:
            while True:
                size = await comm.read()
                await comm.write({"data": to_serialize(memoryview(objects[size]))})
        except OSError:
            pass

    options = security.get_listen_args("worker") if security else {}
    async with listen(f"{transport}://127.0.0.1:0", handle, **options) as listener:
        result = [getattr(security, name) for name in _PEM] if security else []
        connection.send((listener.contact_address, result))
        await asyncio.Event().wait()


_PEM = ("tls_ca_file", "tls_worker_cert", "tls_worker_key")


async def _dask_fetch(result: Any, congestion: str) -> None:
    from distributed import Security
    from distributed.comm import connect

    address, pem = result
    options = {}
    if pem:
        ca, cert, key = pem
        security = Security(tls_ca_file=ca, tls_worker_cert=cert, tls_worker_key=key, require_encryption=True)
        options = security.get_connection_args("worker")
    comm = await connect(address, **options)
    _pin(comm, congestion)

    async def fetch(size: int) -> None:
        await comm.write(size)
        answer = await comm.read()
        assert memoryview(answer["data"]).nbytes == size

    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        size, count = map(int, line.split())
        await fetch(size)
        began = time.perf_counter()
        for _ in range(count):
            await fetch(size)
        print(time.perf_counter() - began, flush=True)


def _pin(comm: Any, congestion: str) -> None:
    """The same congestion control for all, Dask's sockets too."""
    raw = comm.stream.socket
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    got = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()
    assert got == congestion, got


if __name__ == "__main__":
    main()
