"""Measures what trivial tasks cost a scheduler and two workers, each in a process of its own, and what idle ones cost.

``tools/cost_of_processes.py --threads 4 --rounds 6``: Dask alone and with Mission Control preloaded, in turn. `mission
bench overhead` cannot tell the scheduler's CPU time: all its schedulers are in the benchmark's process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from distributed import Client

import mission_control

PRELOAD = ["--preload", "mission_control.dask"]
MODES = {"Dask": [], "Mission Control": PRELOAD}
NAMED = "two named jobs"
"""With Mission Control; the tasks belong to neither of the jobs, which do nothing."""
TASKS = 3_000
IDLE_S = 30
START_S = 60


class Seconds(NamedTuple):
    scheduler: float
    workers: float
    wall: float


class Cluster:
    """A scheduler and two workers, as commands."""

    def __init__(self, mode: str, threads: int, folder: Path):
        where = folder / f"{mode}.json"
        own = ["--scheduler-file", str(where), *MODES.get(mode, PRELOAD)]
        self.processes = [command("scheduler", "--port", "0", "--host", "127.0.0.1", "--dashboard-address", ":0", *own)]
        until = time.monotonic() + START_S
        while not where.exists():
            if time.monotonic() > until:
                raise SystemExit(f"the scheduler has not started within {START_S} s")
            time.sleep(0.1)
        worker = ["--nthreads", str(threads), "--no-nanny", "--no-dashboard", "--local-directory", str(folder), *own]
        self.processes += [command("worker", *worker) for _ in range(2)]
        self.client = Client(scheduler_file=str(where), set_as_default=False)
        self.client.wait_for_workers(2, timeout=START_S)
        for name in ("one", "other") if mode == NAMED else ():
            spec = mission_control.jobs.specification(name)
            self.client.sync(self.client.scheduler.mission_control_admit, spec=spec, client=self.client.id)

    def spent(self) -> Seconds:
        times = [psutil.Process(own.pid).cpu_times() for own in self.processes]
        scheduler, *workers = (own.user + own.system for own in times)
        return Seconds(scheduler, sum(workers), time.perf_counter())

    def tasks(self) -> Seconds:
        before = self.spent()
        results = self.client.gather(self.client.map(plus_one, range(TASKS), pure=False))
        assert results == list(range(1, TASKS + 1))
        time.sleep(0.2)  # releases are on their way
        return less(self.spent(), before)

    def memory(self) -> list[int]:
        return [psutil.Process(own.pid).memory_full_info().uss >> 20 for own in self.processes[1:]]

    def close(self) -> None:
        self.client.close()
        # A worker whose scheduler is gone first may wait for it: workers end before it.
        for own in reversed(self.processes):
            own.terminate()
            try:
                own.wait(START_S)
            except subprocess.TimeoutExpired:
                own.kill()
                own.wait()


def command(*words: str) -> subprocess.Popen[bytes]:
    # The tasks are functions of this module, which they find by its name.
    own = {"DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False", "PYTHONPATH": str(Path(__file__).parent)}
    environment = {**os.environ, **own}
    return subprocess.Popen([sys.executable, "-m", "dask", *words], env=environment, stderr=subprocess.DEVNULL)


def plus_one(number: int) -> int:
    return number + 1


def less(after: Seconds, before: Seconds) -> Seconds:
    return Seconds(*(one - other for one, other in zip(after, before, strict=True)))


def compared(clusters: dict[str, Cluster], rounds: int) -> dict[str, list[Seconds]]:
    samples: dict[str, list[Seconds]] = {mode: [] for mode in clusters}
    for number in range(rounds + 1):
        for mode in sorted(clusters, reverse=number % 2 == 1):
            sample = clusters[mode].tasks()
            if number:
                samples[mode].append(sample)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=4, help="of each worker")
    parser.add_argument("--rounds", type=int, default=6, help="samples of each; one more warms up")
    parser.add_argument("--named", action="store_true", help="two jobs are named, which do nothing, beside the tasks")
    args = parser.parse_args()
    modes = ("Dask", NAMED if args.named else "Mission Control")
    clusters: dict[str, Cluster] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for mode in modes:
                clusters[mode] = Cluster(mode, args.threads, Path(folder))
            samples: dict[str, Any] = compared(clusters, args.rounds)
            for what in Seconds._fields:
                dask, ours = ([getattr(own, what) for own in samples[mode]] for mode in modes)
                ratios = sorted(one / other for one, other in zip(ours, dask, strict=True))
                print(f"{what}: {statistics.median(ratios):.3f} of Dask's, {ratios[0]:.3f} to {ratios[-1]:.3f}")
            before = {mode: own.spent() for mode, own in clusters.items()}
            time.sleep(IDLE_S)
            idle = {mode: less(own.spent(), before[mode]) for mode, own in clusters.items()}
            for mode, own in clusters.items():
                spent = idle[mode]
                print(
                    f"{mode}, idle for {IDLE_S} s: scheduler {spent.scheduler:.2f} CPU-s, workers {spent.workers:.2f}; "
                    f"memory of workers {own.memory()} MiB"
                )
        finally:
            for own in clusters.values():
                own.close()


if __name__ == "__main__":
    main()
