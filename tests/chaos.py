"""Several jobs on one cluster, while everything that can go wrong does: `python -m tests.chaos --rounds 200`.

Each round has a seed; what it does follows from it: a harm to all connections, and a blow in the middle of the jobs.
`MAY_FAIL` says for each blow with which errors a job may end; otherwise every job ends right, and its result is
compared by content. When all rounds are over nothing may be left: no objects, memory, connections or spool files.
Workers have 1,024 descriptors.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil
from distributed import Client, KilledWorker, LocalCluster, Worker, get_worker
from distributed.client import FutureCancelledError
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.shuffle._exceptions import P2PConsistencyError, P2POutOfDiskError

import mission_control
from mission_control import In, _native
from mission_control.dask.scheduler import MissionControlScheduler
from mission_control.dask.worker import MissionControlWorker
from mission_control.scenario import Workload
from mission_control.workloads.kmeans import KMeans
from mission_control.workloads.sort import Sort
from mission_control.workloads.wordcount import WordCount
from tests.conftest import data, status, until, what_is_left
from tests.proxy import Limit, Proxy, flip

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
    # Dask gives a task up whose worker died too often, and cancels what cannot be computed again.
    "kill": {"KilledWorker", "FutureCancelledError"},
    # What is damaged on the only disk that has it is gone, and its reader says so.
    "spool": {"Damaged", "Lost", "P2PConsistencyError", "StreamFailed", "ProgramFailed"},
    # An output file or a spooled object that finds no room; who reads meanwhile is not concerned.
    "disk": {"OSError", "P2POutOfDiskError", "StreamFailed", "ProgramFailed"},
}
"""Of each blow, how a job may end except right. Whatever is not here, no job may fail of."""
ROUND_S = 240
"""Longer than the longest patience of the data plane, several times over: a round that takes longer hangs."""
BROADCAST_BYTES = 5 << 20
KNOWN_AFTER_S = 5
HARMS = ("none", "reset", "stall", "slow", "flip", "trickle")
BLOWS = ("none", "kill", "freeze", "spool", "pause", "flood", "disk", "hold", "helpers")
PAUSE_S = 8
"""Longer than a reader waits for one answer, and than an arbiter may be silent."""
FREEZE_S = 20
BACK_S = 120
"""For a worker that was killed to be there again, on a machine on which three clusters import Dask."""
OVER_S = 60
"""Kept connections end after some idle time, too."""
OVER = ("objects", "copies", "live_bytes", "spooled_bytes", "kept_connections", "fetching_connections")
"""Of all this nothing may be left."""
FULL_S = 3
HELD_S = 5
HELD_PARTS = 40
STRANGERS = 300
DESCRIPTORS = 1024


class SmallStore(MissionControlWorker):
    """So small that most objects are spooled."""

    async def setup(self, worker: Worker) -> None:
        _native.STORE_MEMORY_FRACTION = 0.01
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        await super().setup(worker)


class Behind(WorkerPlugin):
    """Puts a harmful proxy before a worker's data plane; it runs in the worker itself, so that it dies with it."""

    name = "chaos"

    async def setup(self, worker: Worker) -> None:
        self.kind, self.random = "none", random.Random(worker.address)
        # What a task fetched and did not let go, with the seeds of the contents.
        self.held: list[tuple[int, Any]] = []
        # On a worker that starts, Dask sets all plug-ins up at once.
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
    """An endpoint that tells another address."""

    def __init__(self, endpoint: Any, address: str):
        self._endpoint, self.address = endpoint, address

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)


def begin(kind: str, seed: int, dask_worker: Any) -> None:
    dask_worker.plugins[Behind.name].begin(kind, seed)


def damage(seed: int, dask_worker: Any) -> int:
    """Writes over some bytes of the worker's spool; gives how many places were hit."""
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
    time.sleep(FREEZE_S)  # holds the scheduler's only thread


def flood(address: str) -> None:
    """Strangers connect to a worker's data plane and say nothing, for ten seconds."""
    host, port = address.rsplit(":", 1)
    with ExitStack() as strangers:
        for _ in range(STRANGERS):
            with suppress(OSError):
                strangers.enter_context(socket.create_connection((host, int(port)), timeout=1))
        time.sleep(10)


def fill_disk(bytes_more: int, dask_worker: Any) -> None:
    """No file of this worker may grow beyond so many bytes; -1 for no limit. The kernel says so as of a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_more, resource.RLIM_INFINITY))
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.rlimit(psutil.RLIMIT_FSIZE, (bytes_more, resource.RLIM_INFINITY))


def kill_helpers(dask_worker: Any) -> None:
    """End the process of Java of this worker, with all tasks that run in it."""
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
    """Whether the parts are what they were, long after their objects were freed, and how many; lets them go."""
    held, dask_worker.plugins[Behind.name].held = dask_worker.plugins[Behind.name].held, []
    return all(bytes(part) == data(200_000, seed).tobytes() for seed, part in held), len(held)


def hold_buffers(client: Client, name: str, seed: int) -> None:
    """Readers keep what they fetched, while its owner frees it and others use the memory that is free."""
    with mission_control.job(name, client=client):
        references = client.map(put_to_hold, [seed, seed + HELD_PARTS], pure=False)
        workers = sorted(client.run(os.getpid, on_error="ignore"))
        holds = [
            client.submit(hold, reference, seed + number * HELD_PARTS, pure=False, workers=[worker])
            for number, reference in enumerate(references)
            for worker in workers
        ]
        client.gather(holds)
        del references, holds
    time.sleep(HELD_S)
    found = client.run(held_right).values()
    assert all(right for right, _ in found), "what a reader held is not what it was"
    assert sum(count for _, count in found) == len(workers) * 2 * HELD_PARTS


def address_of(dask_worker: Any) -> str:
    return dask_worker.plugins[MissionControlWorker.name].endpoint._endpoint.address


def strike(client: Client, blow: str, chance: random.Random, over: threading.Event) -> None:
    """Does something bad in the middle of the jobs."""
    while not over.wait(chance.uniform(0.2, 1.5)):
        try:
            if blow == "kill":
                pids = client.run(os.getpid, on_error="ignore")
                # A nanny whose worker dies before it has heard of it gives up, and the cluster is smaller for ever.
                known = [
                    pid for pid in pids.values() if time.time() - psutil.Process(pid).create_time() > KNOWN_AFTER_S
                ]
                if known:
                    os.kill(chance.choice(sorted(known)), signal.SIGKILL)
                    return
            if blow == "freeze":
                client.run_on_scheduler(freeze)
                return
            if blow == "pause":
                # It owns objects, reads others', and may give out the host's slots.
                pid = chance.choice(sorted(client.run(os.getpid, on_error="ignore").values()))
                os.kill(pid, signal.SIGSTOP)
                time.sleep(PAUSE_S)
                os.kill(pid, signal.SIGCONT)
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
            if blow == "hold":
                hold_buffers(client, f"held-{chance.random()}", chance.randrange(1 << 20))
                return
            if blow == "spool":
                client.run(damage, chance.random(), on_error="ignore")
        except (OSError, psutil.Error):
            pass  # its worker went meanwhile


class Broadcast:
    """One object after another, each fetched by many tasks."""

    def __init__(self, workload: Workload, number: int, folder: Path):
        self.seed, self.digests = workload.seed, [set[str]() for _ in range(3)]

    def prepare(self, client: Client, say: Any) -> None:
        pass

    def run(self, client: Client, say: Any) -> None:
        for number, digests in enumerate(self.digests):
            reference = client.submit(produce, self.seed + number, pure=False)
            digests.update(client.gather(client.map(digest_of, [reference] * 6, range(6), pure=False)))

    def check(self, client: Client, say: Any) -> dict[str, bool]:
        expected = [hashlib.sha256(data(BROADCAST_BYTES, self.seed + number)).hexdigest() for number in range(3)]
        return {"every task got every object right": self.digests == [{entry} for entry in expected]}


def produce(seed: int) -> mission_control.Reference:
    return mission_control.put([data(BROADCAST_BYTES, seed)])


def digest_of(reference: mission_control.Reference, number: int) -> str:
    return hashlib.sha256(mission_control.fetch(reference)[0]).hexdigest()


class Streams:
    """Tasks that write, pass on and read, all at once."""

    def __init__(self, workload: Workload, number: int, folder: Path):
        self.seeds = [workload.seed * 10 + number for number in range(3)]

    def prepare(self, client: Client, say: Any) -> None:
        pass

    def run(self, client: Client, say: Any) -> None:
        written = client.map(write_stream, self.seeds, pure=False)
        passed = client.map(pass_on, written, pure=False)
        read = [client.submit(read_stream, own, part, pure=False) for own in passed for part in range(2)]
        del written, passed
        self.digests = client.gather(read)

    def check(self, client: Client, say: Any) -> dict[str, bool]:
        expected = [digest_all(buffers(seed)[part::2]) for seed in self.seeds for part in range(2)]
        return {"every reader got what was written": self.digests == expected}


class Programs:
    """Programs that sort, and others that ask their worker for objects and other tasks."""

    def __init__(self, workload: Workload, number: int, folder: Path):
        self.seeds = [workload.seed * 10 + number for number in range(4)]

    def prepare(self, client: Client, say: Any) -> None:
        pass

    def run(self, client: Client, say: Any) -> None:
        made = client.map(put_lines, self.seeds, pure=False)
        ordered = [client.submit(mission_control.run, ["sort", In(0)], inputs=[own], pure=False) for own in made]
        merge = [sys.executable, "-c", "from tests.chaos import ask_for_a_merge; ask_for_a_merge()"]
        merged = client.submit(mission_control.run, merge, inputs=ordered, pure=False)
        self.digest = client.submit(digest_of, merged, 0, pure=False).result()

    def check(self, client: Client, say: Any) -> dict[str, bool]:
        lines = sorted(line for seed in self.seeds for line in lines_of(seed).splitlines(keepends=True))
        return {"all lines are there, in order": self.digest == hashlib.sha256(b"".join(lines)).hexdigest()}


def lines_of(seed: int) -> bytes:
    chance = random.Random(seed)
    return b"".join(b"%x\n" % chance.getrandbits(64) for _ in range(30_000))


def put_lines(seed: int) -> mission_control.Reference:
    return mission_control.put([lines_of(seed)])


def ask_for_a_merge() -> None:
    """Runs as a program: reads its inputs itself, puts them in one object, and delegates to a program that sorts."""
    path, credential = os.environ["MISSION_CONTROL_SOCKET"], os.environ["MISSION_CONTROL_CREDENTIAL"]

    def ask(where: str, *more: str) -> bytes:
        words = ["curl", "--silent", "--show-error", "--fail-with-body", "--unix-socket", path]
        words += ["-H", f"Authorization: Bearer {credential}", *more, f"http://worker{where}"]
        return subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout

    inputs = json.loads(ask("/task"))["inputs"]
    with tempfile.NamedTemporaryFile() as file:
        for own in inputs:
            file.write(ask("/fetch", "-d", json.dumps({"reference": own})))
        file.flush()
        put = json.loads(ask("/put", "-T", file.name))["reference"]
    ask("/delegate", "-d", json.dumps({"program": ["sort", {"in": 0}], "inputs": [put]}))


def buffers(seed: int) -> list[bytes]:
    """Some are small, and some are chunks of their own."""
    chance = random.Random(seed)
    sizes = [chance.choice([0, 10, 1000, 100_000]) for _ in range(60)] + [1 << 20, 5 << 20, 7]
    return [data(size, seed + number).tobytes() for number, size in enumerate(sizes)]


def digest_all(read: list[bytes]) -> str:
    return hashlib.sha256(b"".join(len(own).to_bytes(8, "little") + own for own in read)).hexdigest()


def write_stream(seed: int) -> None:
    # Of every other one, those that read go on where they are when its worker is lost.
    with mission_control.open_stream(2, deterministic=seed % 2 == 1) as out:
        for number, own in enumerate(buffers(seed)):
            out.write(number % 2, own)
            time.sleep(0.01)


def pass_on(reference: mission_control.StreamReference) -> None:
    with mission_control.open_stream(2) as out:
        for part in range(2):
            for own in mission_control.stream(reference, part):
                out.write(part, own)


def read_stream(reference: mission_control.StreamReference, part: int) -> str:
    return digest_all([bytes(own) for own in mission_control.stream(reference, part)])


class Frames:
    """A merge of data frames by an unchanged program: its shuffles pass through the data plane."""

    def __init__(self, workload: Workload, number: int, folder: Path):
        self.seeds = [[workload.seed * 100 + 10 * side + part for part in range(6)] for side in range(2)]

    def prepare(self, client: Client, say: Any) -> None:
        pass

    def run(self, client: Client, say: Any) -> None:
        left, right = (dd.from_map(frame_of, seeds, meta=frame_of(0).iloc[:0]) for seeds in self.seeds)
        merged = left.merge(right, on="key", how="outer", shuffle_method="p2p", npartitions=5)
        with EXPRESSIONS:
            future = client.compute(merged)
            until(lambda: client.run_on_scheduler(knows, future.key), "the scheduler has the graph")
        self.got = future.result()

    def check(self, client: Client, say: Any) -> dict[str, bool]:
        left, right = (pd.concat([frame_of(seed) for seed in seeds]) for seeds in self.seeds)
        expected = left.merge(right, on="key", how="outer")
        columns = list(expected.columns)
        both = [own.sort_values(columns).reset_index(drop=True) for own in (self.got[columns], expected)]
        return {"the merge has the rows that pandas has": both[0].equals(both[1])}


EXPRESSIONS = threading.Lock()
"""Held while Dask makes the graph of a data frame, in the client and then in the scheduler. Here they share a process,
and before Python 3.12 two threads at that can wait for each other's ``cached_property`` for ever (issue 43468 of
Python)."""


def knows(key: Any, dask_scheduler: Any) -> bool:
    return key in dask_scheduler.tasks


def frame_of(seed: int) -> pd.DataFrame:
    """Some keys are of one row, and one of many."""
    chance = np.random.default_rng(seed)
    keys = chance.integers(0, 20_000, 5000)
    keys[chance.random(5000) < 0.01] = 7
    # The type that Dask makes of texts.
    text = pd.array(np.char.add("row ", chance.integers(0, 1000, 5000).astype(str)), dtype="string[pyarrow]")
    return pd.DataFrame({"key": keys, "number": chance.random(5000), "text": text})


KINDS = {
    "sort": Sort,
    "kmeans": KMeans,
    "broadcast": Broadcast,
    "frames": Frames,
    "streams": Streams,
    "programs": Programs,
    "wordcount": WordCount,
}
MIXES = (
    ("sort", "kmeans"),
    ("sort", "frames"),
    ("sort", "kmeans", "frames"),
    ("broadcast", "sort", "kmeans"),
    ("frames", "frames"),
    ("streams", "sort"),
    ("streams", "frames"),
    ("programs", "sort"),
    ("wordcount", "kmeans"),
)


def job(cluster: LocalCluster, name: str, kind: str, seed: int, transport: str, folder: Path) -> str:
    """Runs one job to its end; "right", or the name of its error."""
    driver: Any = ("client", "tasks")[seed % 2]
    engine: Any = ("python", "mapreduce", "java")[seed % 3]
    shape = {"points": 6000, "k": 6, "dimensions": 4, "partitions": 6}
    workload = Workload(size="12 MiB", **shape, seed=seed, driver=driver, engine=engine)
    made = KINDS[kind](workload, 0, folder / name)
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
    """One round; what was done, and how its jobs ended."""
    chance = random.Random(seed)
    harm, blow = chance.choice(HARMS), chance.choice(BLOWS)
    until(lambda: len(client.run(begin, harm, seed, on_error="ignore")) >= 3, "all workers are up", seconds=BACK_S)
    over = threading.Event()
    with ThreadPoolExecutor(4) as pool:
        bad = pool.submit(strike, client, blow, chance, over)
        jobs = []
        for number, kind in enumerate(chance.choice(MIXES)):
            transport = chance.choice(["tcp", "tls", "auto"])
            name = f"{kind}-{seed}-{number}"
            jobs.append(pool.submit(job, cluster, name, kind, seed * 10 + number, transport, folder))
        try:
            ends = [entry.result(timeout=ROUND_S) for entry in jobs]
        finally:
            over.set()
        bad.result(timeout=ROUND_S)
    assert set(ends) <= {"right"} | MAY_FAIL.get(blow, set()), (harm, blow, ends)
    return f"{harm}, {blow}", ends


def run(rounds: int, first_seed: int = 0) -> Counter[str]:
    """All rounds; how often jobs ended how."""
    ended: Counter[str] = Counter()
    folder = Path(tempfile.mkdtemp(prefix="mission-chaos-"))
    # Dask gives a worker up that is not back in 15 s, and the cluster is smaller for ever.
    dask.config.set({"distributed.deploy.lost-worker-timeout": f"{BACK_S}s"})
    workers = {"n_workers": 3, "threads_per_worker": 2, "memory_limit": "400MiB"}
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
            deadline = time.monotonic() + OVER_S
            while found := what_is_left(client, *OVER):
                # The traceback of a task that failed may hold its memory in a cycle of references.
                client.run(gc.collect)
                assert time.monotonic() < deadline, f"{OVER_S} s after the last job there is still {found}"
                time.sleep(0.2)
            assert not status(client)["jobs"]
            left = [path for path in (folder / "dask").rglob("mission-control/*") if path.is_file()]
            assert not left, left
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ended


def run_at_once(clusters: int, rounds: int, first_seed: int) -> int:
    """The same rounds on several clusters, each in a process of its own; gives the exit status.

    A round mostly waits for what was paused, frozen or held.
    """
    each = -(-rounds // clusters)
    starts = range(first_seed, first_seed + rounds, each)
    command = [sys.executable, "-m", "tests.chaos", "--at-once", "1"]
    running = [
        subprocess.Popen(
            [*command, "--first-seed", str(start), "--rounds", str(min(each, first_seed + rounds - start))]
        )
        for start in starts
    ]
    try:
        return max(process.wait() for process in running)
    finally:
        for process in running:
            process.terminate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=1, help="clusters that share the rounds")
    given = parser.parse_args()
    if given.at_once > 1:
        sys.exit(run_at_once(given.at_once, given.rounds, given.first_seed))
    print(dict(run(given.rounds, given.first_seed)))
