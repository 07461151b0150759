"""A round of chaos: jobs, a harm, a blow, and the allowed outcomes."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import dask
from distributed import Client, KilledWorker, LocalCluster
from distributed.client import FutureCancelledError
from distributed.shuffle._exceptions import P2PConsistencyError, P2POutOfDiskError

import mission_control
from mission_control.dask.scheduler import MissionControlScheduler
from mission_control.workloads.kmeans import KMeansSettings
from mission_control.workloads.settings import Settings
from mission_control.workloads.sort import SortSettings
from mission_control.workloads.wordcount import WordCountSettings
from tests.chaos.blows import BLOWS, HARMS, Behind, SmallStore, begin, mend_scheduler, strike
from tests.chaos.jobs import KINDS, MIXES
from tests.conftest import status, until, what_is_left

NAMED = (
    mission_control.TransferError,
    KilledWorker,
    FutureCancelledError,
    OSError,
    P2PConsistencyError,
    P2POutOfDiskError,
    mission_control.ProgramFailed,
)
"""Errors that a job may end with: their texts name the cause."""
MAY_FAIL: dict[str, set[str]] = {
    # Dask gives up a task whose worker died too often, and cancels results that cannot be recomputed.
    "kill": {"KilledWorker", "FutureCancelledError"},
    # Data that is damaged on its only disk is lost, and its reader reports that.
    "spool": {"Damaged", "Lost", "P2PConsistencyError", "StreamFailed", "ProgramFailed"},
    # An output file or a spooled object has no room; readers are not affected.
    "disk": {"OSError", "P2POutOfDiskError", "StreamFailed", "ProgramFailed"},
}
"""For each blow, the errors with which a job may end. No other blow may fail a job."""
ROUND_S = 240
"""Seconds: several times the longest timeout of the data plane; a round that takes longer hangs."""
BACK_S = 120
"""Seconds for a killed worker to restart, on a machine on which three clusters import Dask."""
OVER_S = 60
"""Seconds until all is released; kept connections end after some idle time."""
OVER = ("objects", "copies", "live_bytes", "spooled_bytes", "kept_connections", "fetching_connections")
"""Resources of which nothing may be left."""


def job(cluster: LocalCluster, name: str, kind: str, seed: int, transport: str, folder: Path) -> str:
    """Run one job to its end; return "right", or the name of its error."""
    driver: Any = ("client", "tasks")[seed % 2]
    engine: Any = ("python", "mapreduce", "java")[seed % 3]
    settings: dict[str, Settings] = {
        "sort": SortSettings(size="12 MiB", partitions=6, seed=seed, engine=engine),
        "kmeans": KMeansSettings(points=6000, k=6, dimensions=4, partitions=6, seed=seed, driver=driver, engine=engine),
        "wordcount": WordCountSettings(size="12 MiB", partitions=6, seed=seed),
    }
    made = KINDS[kind](settings.get(kind, Settings(seed=seed)), 0, folder / name)
    with Client(cluster, set_as_default=False) as client:
        try:
            with mission_control.job(name, client=client, transport=transport):
                made.prepare(client, lambda _: None)
                made.run(client, lambda _: None)
                checks = made.check(client, lambda _: None)
        except NAMED as error:
            assert str(error), f"{type(error).__name__} says nothing"
            print(f"{name} ended with {type(error).__name__}: {str(error)[:1000]}", flush=True)
            return type(error).__name__
    assert all(checks.values()), f"{name} ended wrong: {checks}"
    return "right"


def one(cluster: LocalCluster, client: Client, seed: int, folder: Path) -> tuple[str, list[str]]:
    """Run one round; return its faults, and how its jobs ended."""
    chance = random.Random(seed)
    harm, blow = chance.choice(HARMS), chance.choice(BLOWS)
    client.run_on_scheduler(mend_scheduler)
    try:
        until(lambda: len(client.run(begin, harm, seed, on_error="ignore")) >= 3, "all workers are up", seconds=BACK_S)
    except AssertionError:
        say_of_nannies(cluster)
        raise
    over = threading.Event()
    with ThreadPoolExecutor(4) as pool:
        bad = pool.submit(strike, cluster, client, blow, chance, over)
        jobs = []
        for number, kind in enumerate(chance.choice(MIXES)):
            transport = chance.choice(["tcp", "tls", "auto"])
            name = f"{kind}-{seed}-{number}"
            jobs.append(pool.submit(job, cluster, name, kind, seed * 10 + number, transport, folder))
        try:
            ends = [entry.result(timeout=ROUND_S) for entry in jobs]
        except TimeoutError:
            print(f"round {seed}: {harm}, {blow}: a job has not ended within {ROUND_S} s", flush=True)
            raise
        finally:
            over.set()
        bad.result(timeout=ROUND_S)
    assert set(ends) <= {"right"} | MAY_FAIL.get(blow, set()), (harm, blow, ends)
    return f"{harm}, {blow}", ends


def say_of_nannies(cluster: LocalCluster) -> None:
    """Print the state of each worker's nanny, and let its process print the stacks of its threads."""
    for name, nanny in cluster.workers.items():
        of_process = nanny.process.status if nanny.process is not None else "none"
        print(f"worker {name}: nanny {nanny.status}, process {nanny.pid} {of_process}", flush=True)
        if nanny.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(nanny.pid, signal.SIGUSR1)
    time.sleep(1)


def run(rounds: int, first_seed: int = 0) -> Counter[str]:
    """Run all rounds; return how often jobs ended in which way."""
    ended: Counter[str] = Counter()
    folder = Path(tempfile.mkdtemp(prefix="mission-chaos-"))
    # Dask gives up a worker that has not restarted in 15 s, and the cluster stays smaller.
    dask.config.set({"distributed.deploy.lost-worker-timeout": f"{BACK_S}s"})
    dask.config.set({"distributed.worker.preload": ["tests.chaos.stacks"]})
    # Imports alone take some 250 MiB, and jobs up to 130 more: nannies must not end workers for that.
    workers = {"n_workers": 3, "threads_per_worker": 2, "memory_limit": "600MiB"}
    try:
        cluster = LocalCluster(**workers, dashboard_address=":0", local_directory=str(folder / "dask"), silence_logs=50)
        with cluster, Client(cluster, set_as_default=False) as client:
            client.register_plugin(MissionControlScheduler())
            client.register_plugin(SmallStore())
            client.register_plugin(Behind())
            for seed in range(first_seed, first_seed + rounds):
                began = time.monotonic()
                what, ends = one(cluster, client, seed, folder)
                ended.update(ends)
                print(f"round {seed}: {what}: {', '.join(ends)} ({time.monotonic() - began:.1f} s)", flush=True)
            client.run(begin, "none", 0)
            client.run_on_scheduler(mend_scheduler)
            deadline = time.monotonic() + OVER_S
            while found := what_is_left(client, *OVER):
                # The traceback of a failed task may hold its memory in a cycle of references.
                client.run(gc.collect)
                assert time.monotonic() < deadline, f"{OVER_S} s after the last job there is still {found}"
                time.sleep(0.2)
            assert not status(client)["jobs"]
            left = [path for path in (folder / "dask").rglob("mission-control/*") if path.is_file()]
            assert not left, left
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ended
