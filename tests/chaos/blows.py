"""Faults of the cluster: a harm to all connections, and a blow in the middle of the jobs."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

import psutil
from distributed import Client, LocalCluster, Status, Worker, get_worker
from distributed.diagnostics.plugin import WorkerPlugin

import mission_control
from mission_control import _native
from mission_control.dask.worker import MissionControlWorker
from mission_control.workers import workers_of
from tests.conftest import data, until
from tests.failing import Failing, put_all_in
from tests.proxy import Limit, Proxy, flip

HARMS = ("none", "reset", "stall", "slow", "flip", "trickle")
BLOWS = ("none", "kill", "freeze", "spool", "pause", "flood", "disk", "hold", "helpers", "retire", "seam")
PAUSE_S = 8
"""Seconds: longer than a reader waits for one answer, and than an arbiter may be silent."""
FREEZE_S = 20
FULL_S = 3
LEFT_S = 60
"""Seconds for a retiring worker to end: a program that it runs may need time to die."""
HELD_S = 5
HOLDS_S = 120
"""Seconds: twice the longest timeout of the data plane."""
HELD_PARTS = 40
STRANGERS = 300
DESCRIPTORS = 1024


class SmallStore(MissionControlWorker):
    """Memory so small that most objects are spooled."""

    async def setup(self, worker: Worker) -> None:
        _native.STORE_MEMORY_FRACTION = 0.007
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        await super().setup(worker)


class Behind(WorkerPlugin):
    """Puts a harmful proxy in front of a worker's data plane. It runs in the worker, so that it dies with it."""

    name = "chaos"

    async def setup(self, worker: Worker) -> None:
        self.kind, self.random = "none", random.Random(worker.address)
        # Parts that a task fetched and still holds, with the seeds of their contents.
        self.held: list[tuple[int, Any]] = []
        # On a starting worker, Dask sets up all plug-ins concurrently.
        while (plugin := worker.plugins.get(MissionControlWorker.name)) is None or plugin.endpoint is None:
            await asyncio.sleep(0.02)
        self.proxy = Proxy(plugin.endpoint.address, harm=self.harm)
        self.proxy.__enter__()
        plugin.endpoint = Moved(plugin.endpoint, self.proxy.address)

    def begin(self, kind: str, seed: int) -> None:
        self.kind, self.random = kind, random.Random(seed)
        self.proxy.limit = Limit(20e6) if kind == "slow" else None
        first = self.proxy.connections
        self.proxy.trickles = lambda number: kind == "trickle" and number >= first and (number * 7 + seed) % 40 == 0

    def harm(self, number: int, offset: int, piece: bytes) -> bytes | None:
        if self.kind == "reset" and self.random.random() < 0.05:
            return None
        if self.kind == "stall" and self.random.random() < 0.01:
            time.sleep(6)
        if self.kind == "flip" and self.random.random() < 0.05:
            return flip(piece, self.random.randrange(8 * len(piece)))
        return piece


class Moved:
    """An endpoint that announces another address."""

    def __init__(self, endpoint: Any, address: str):
        self._endpoint, self.address = endpoint, address

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)


def begin(kind: str, seed: int, dask_worker: Any) -> None:
    mend_worker(dask_worker)
    dask_worker.plugins[Behind.name].begin(kind, seed)


ON_SCHEDULER = ("begins", "ends", "far_bytes", "named_job_of", "next", "object_bytes", "tasks")
ON_WORKER = ("begins", "ends", "next", "ahead", "weigh")
"""What our methods in Dask's ask core about, of the scheduler and of a worker's threads."""


def break_scheduler(method: str, panic: bool, dask_scheduler: Any) -> None:
    plugin = dask_scheduler.plugins[MissionControlWorker.name]
    plugin.controller = Failing(plugin.controller, method, panic)


def break_threads(method: str, panic: bool, dask_worker: Any) -> None:
    # Jobs share threads only while several are there.
    if (turns := dask_worker.plugins[MissionControlWorker.name].turns) is not None:
        turns.threads = Failing(turns.threads, method, panic)


def mend_scheduler(dask_scheduler: Any) -> None:
    plugin = dask_scheduler.plugins[MissionControlWorker.name]
    if isinstance(plugin.controller, Failing):
        plugin.controller = plugin.controller._inner
        put_all_in(dask_scheduler)


def mend_worker(dask_worker: Any) -> None:
    """What an error has switched off is put in with the next two jobs."""
    dask_worker.plugins[MissionControlWorker.name].parts.off.clear()


def damage(seed: int, dask_worker: Any) -> int:
    """Overwrite some bytes of the worker's spool; return how many places were hit."""
    chance, hit = random.Random(seed), 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if "mission-spool" not in os.readlink(f"/proc/self/fd/{number}"):
                continue
            size = os.fstat(int(number)).st_size
            for _ in range(3 if size else 0):
                hit += os.pwrite(int(number), b"\xff", chance.randrange(size))
        except OSError:
            pass
    return hit


def freeze(dask_scheduler: Any) -> None:
    time.sleep(FREEZE_S)  # blocks the scheduler's only thread


def flood(address: str) -> None:
    """Strangers connect to a worker's data plane and send nothing for ten seconds."""
    host, port = address.rsplit(":", 1)
    with ExitStack() as strangers:
        for _ in range(STRANGERS):
            with suppress(OSError):
                strangers.enter_context(socket.create_connection((host, int(port)), timeout=1))
        time.sleep(10)


def fill_disk(bytes_more: int, dask_worker: Any) -> None:
    """Limit the size of this worker's files; -1: no limit. The kernel reports the error of a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_more, resource.RLIM_INFINITY))
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.rlimit(psutil.RLIMIT_FSIZE, (bytes_more, resource.RLIM_INFINITY))


def kill_helpers(dask_worker: Any) -> None:
    """Kill the Java process of this worker, with all tasks that run in it."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if "org.missioncontrol.Host" in child.cmdline():
                child.kill()


def put_to_hold(seed: int) -> mission_control.Reference:
    return mission_control.put([data(200_000, seed + part) for part in range(HELD_PARTS)])


def hold(reference: mission_control.Reference, seed: int) -> None:
    held = get_worker().plugins[Behind.name].held
    for part in range(HELD_PARTS):
        held.append((seed + part, mission_control.fetch(reference, part=part)[0]))


def held_right(dask_worker: Any) -> tuple[bool, int]:
    """Check that held parts are unchanged, long after their objects were freed; return the number, and release them."""
    held, dask_worker.plugins[Behind.name].held = dask_worker.plugins[Behind.name].held, []
    return all(bytes(part) == data(200_000, seed).tobytes() for seed, part in held), len(held)


def hold_buffers(client: Client, name: str, seed: int) -> None:
    """Readers keep fetched parts, while the owner frees them and others use the freed memory."""
    with mission_control.job(name, client=client):
        references = client.map(put_to_hold, [seed, seed + HELD_PARTS], pure=False)
        workers = sorted(client.run(os.getpid, on_error="ignore"))
        holds = [
            client.submit(hold, reference, seed + number * HELD_PARTS, pure=False, workers=[worker])
            for number, reference in enumerate(references)
            for worker in workers
        ]
        try:
            for entry in holds:
                entry.result(timeout=HOLDS_S)
        except TimeoutError:
            gone = set(workers) - set(client.run(os.getpid, on_error="ignore"))
            assert gone, f"readers wait for more than {HOLDS_S} s, though their workers are there"
            return  # their tasks must run on these workers
        del references, holds
    time.sleep(HELD_S)
    found = client.run(held_right).values()
    assert all(right for right, _ in found), "what a reader held is not what it was"
    assert sum(count for _, count in found) == len(workers) * 2 * HELD_PARTS


def address_of(dask_worker: Any) -> str:
    return dask_worker.plugins[MissionControlWorker.name].endpoint._endpoint.address


def retire(cluster: LocalCluster, client: Client, chance: random.Random) -> None:
    """A worker hands over its objects and leaves, as in a scale-down; another worker replaces it."""
    workers = workers_of(client)
    leaving = chance.choice(sorted(workers))
    # Dask gives up if the other workers have no room, and the worker stays.
    if client.retire_workers([leaving]):
        nanny = cluster.workers[workers[leaving]["name"]]
        cluster.loop.add_callback(cluster.workers.pop, workers[leaving]["name"], None)
        cluster.scale(len(workers))
        # The cluster does not know the worker any more, so nothing else waits for its process to end.
        until(lambda: nanny.status == Status.closed, f"worker {leaving} has left", seconds=LEFT_S)


def strike(cluster: LocalCluster, client: Client, blow: str, chance: random.Random, over: threading.Event) -> None:
    """Inject a fault in the middle of the jobs."""
    while not over.wait(chance.uniform(0.2, 1.5)):
        try:
            if blow == "kill":
                # A nanny whose worker dies before they are connected gives up, and the cluster stays smaller.
                processes = [nanny.process for nanny in cluster.workers.values()]
                known = [own.pid for own in processes if own is not None and own.status == Status.running]
                if known:
                    os.kill(chance.choice(sorted(known)), signal.SIGKILL)
                    return
            if blow == "freeze":
                client.run_on_scheduler(freeze)
                return
            if blow == "pause":
                # It owns objects, reads others', and may grant the host's slots.
                pid = chance.choice(sorted(client.run(os.getpid, on_error="ignore").values()))
                os.kill(pid, signal.SIGSTOP)
                time.sleep(PAUSE_S)
                os.kill(pid, signal.SIGCONT)
                return
            if blow == "seam":
                panic = chance.random() < 0.5
                client.run_on_scheduler(break_scheduler, chance.choice(ON_SCHEDULER), panic)
                client.run(break_threads, chance.choice(ON_WORKER), panic, on_error="ignore")
                return
            if blow == "flood":
                flood(chance.choice(sorted(client.run(address_of, on_error="ignore").values())))
                return
            if blow == "disk":
                worker = chance.choice(sorted(client.run(os.getpid, on_error="ignore")))
                client.run(fill_disk, 256 << 10, workers=[worker])
                time.sleep(FULL_S)
                client.run(fill_disk, -1, workers=[worker])
                return
            if blow == "helpers":
                client.run(kill_helpers, on_error="ignore")
                return
            if blow == "retire":
                retire(cluster, client, chance)
                return
            if blow == "hold":
                hold_buffers(client, f"held-{chance.random()}", chance.randrange(1 << 20))
                return
            if blow == "spool":
                client.run(damage, chance.random(), on_error="ignore")
        except (OSError, psutil.Error):
            pass  # its worker ended meanwhile
