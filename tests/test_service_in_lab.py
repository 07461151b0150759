"""Two Dask clusters on the same hosts of a lab: the control service's weights hold between their jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import mission_control
from mission_control.bench.service import SERVE
from mission_control.dask.worker import HOST_TOKEN_FILE
from mission_control.lab import Lab, namespaces
from mission_control.lab.topology import star
from mission_control.service import serving
from mission_control.service.membership import CLUSTER, INSECURE, SERVICE, TOKEN_FILE
from mission_control.workers import workers_of
from tests.conftest import until

pytestmark = pytest.mark.lab

HOSTS = 4
ROUNDS, PART = 96, 256 << 10
"""Bytes that each receiver fetches from each other one, and bytes of one fetch. 72 MiB at 50 Mbit/s take 12 s alone."""


def test_bytes_of_two_clusters_follow_weights_of_7_to_3(name, tmp_path, monkeypatch):
    host_token = tmp_path / "host.token"
    host_token.write_text("0123456789abcdef0123456789abcdef\n")
    host_token.chmod(0o600)
    with Lab(star(hosts=HOSTS + 1, link_rate=50_000_000), name) as lab, ExitStack() as stack:
        last = f"h{HOSTS + 1}"
        address = f"http://{lab.host(last).address}:8790"
        environment = {**os.environ, SERVICE: address, TOKEN_FILE: str(tmp_path / "cluster.token")}
        environment |= {HOST_TOKEN_FILE: str(host_token), INSECURE: "1"}
        settings = {"name": "test", "listen": address.partition("//")[2], "address": address, "policy": "priority"}
        settings |= {"tokens": serving.tokens_in(tmp_path), "store": str(tmp_path / "store")}
        serve = lab.host(last).popen(
            [sys.executable, "-c", SERVE, json.dumps(settings)], stdout=subprocess.PIPE, text=True
        )
        stack.callback(serve.send_signal, signal.SIGKILL)
        assert serve.stdout is not None and serve.stdout.readline() == "8790\n"
        schedulers = {}
        for number, cluster in enumerate("ab"):
            own = {**environment, CLUSTER: cluster}
            at = f"tcp://{lab.host(last).address}:{8786 + 10 * number}"
            schedulers[cluster] = at
            words = ["--host", lab.host(last).address, "--port", str(8786 + 10 * number), "--no-dashboard"]
            start(lab, last, "scheduler", own, [*words, "--mission-flows-per-host", "2"], tmp_path)
            for host in range(1, HOSTS + 1):
                words = [at, "--no-nanny", "--nthreads", "2", "--no-dashboard", "--host", lab.host(f"h{host}").address]
                words += ["--local-directory", str(tmp_path / f"{cluster}{host}"), "--name", f"h{host}"]
                start(lab, f"h{host}", "worker", own, words, tmp_path)
        with namespaces.entered(lab.namespace(last)):
            clients = [stack.enter_context(Client(at, timeout=60, set_as_default=False)) for at in schedulers.values()]
            for client in clients:
                client.wait_for_workers(HOSTS, timeout=60)
                until(lambda client=client: status(client)["service"]["joined"], "joined")
            begin = threading.Barrier(2)
            results: dict[int, list[tuple[float, int]]] = {}

            def work(index: int, priority: float) -> None:
                with namespaces.entered(lab.namespace(last)):
                    results[index] = shuffle(clients[index], priority, begin)

            threads = [threading.Thread(target=work, args=args) for args in ((0, 7.0), (1, 3.0))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(180)
    # While both have more fetches than slots; in the first seconds weights are not in force yet.
    since = max(own[0][0] for own in results.values()) + 3
    end = min(own[-1][0] for own in results.values())
    moved = [sum(size for at, size in results[index] if since <= at <= end) for index in (0, 1)]
    print(f"{end - since:.1f} s, {moved}, {moved[0] / sum(moved):.3f}")
    assert end - since > 5
    assert moved[0] / sum(moved) == pytest.approx(0.7, abs=0.05), moved


def start(lab: Lab, host: str, what: str, environment: dict[str, str], words: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", f"distributed.cli.dask_{what}", *words, "--preload", "mission_control.dask"]
    with open(folder / "dask.log", "ab") as log:
        lab.host(host).popen(command, stdout=log, stderr=log, env=environment)


def status(client: Client) -> dict[str, Any]:
    return client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins["mission-control"].status())


def shuffle(client: Client, priority: float, begin: threading.Barrier) -> list[tuple[float, int]]:
    """Return the arrivals at the receivers over time; each fetches its own parts from all others."""
    workers = sorted(workers_of(client))
    with mission_control.job("same-name", priority=priority, transport="tcp", client=client):
        held = [client.submit(put, number, workers=[own], pure=False) for number, own in enumerate(workers)]
        client.gather(held)
        begin.wait(60)
        tasks = [
            client.submit(take, held, receiver, half, workers=[own], pure=False)
            for receiver, own in enumerate(workers)
            for half in (0, 1)
        ]
        return sorted(one for own in client.gather(tasks) for one in own)


def put(number: int) -> Any:
    return mission_control.put([content(number, part) for part in range(len_of_parts())])


def len_of_parts() -> int:
    return HOSTS * ROUNDS


def content(number: int, part: int) -> bytes:
    return (number * 1000 + part).to_bytes(4, "big") * (PART // 4)


def take(held: list[Any], receiver: int, half: int) -> list[tuple[float, int]]:
    """Fetch every second of a receiver's parts from the other workers, and check each."""
    came = []
    others = [(number, reference) for number, reference in enumerate(held) if number != receiver]
    for own in range(half, ROUNDS, 2):
        part = receiver * ROUNDS + own
        parts = mission_control.fetch([reference for _, reference in others], part=part)
        for (number, _), got in zip(others, parts, strict=True):
            assert zlib.crc32(got) == zlib.crc32(content(number, part))
        came.append((time.monotonic(), len(others) * PART))
    return came
