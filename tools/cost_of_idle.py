"""Measures what idle workers and schedulers cost, with Mission Control beside Dask alone, in nanoseconds of the kernel.

``tools/cost_of_idle.py --seconds 40 --rounds 3``: in each round four clusters idle at the same time. They start in the
order ours, Dask, Dask, ours: whoever starts later costs some percent more or less, and the order cancels that.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from cost_of_processes import MODES, Cluster

ORDER = ("Mission Control", "Dask", "Dask", "Mission Control")
SETTLE_S = 8
"""Pause after the tasks of a round: what they left is released by then."""


def spent(pid: int) -> int:
    """Return the nanoseconds that all threads of a process have run (`/proc/*/schedstat`, field 1)."""
    return sum(int(own.read_text().split()[0]) for own in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def round_of(threads: int, seconds: float) -> dict[str, tuple[float, float]]:
    """Return milliseconds of CPU time a second of a scheduler and of a worker, by mode."""
    with tempfile.TemporaryDirectory() as folder:
        clusters: list[Cluster] = []
        try:
            for number, mode in enumerate(ORDER):
                (own := Path(folder, str(number))).mkdir()
                clusters.append(Cluster(mode, threads, own))
            for cluster in clusters:
                cluster.tasks()
            time.sleep(SETTLE_S)
            before = [[spent(own.pid) for own in cluster.processes] for cluster in clusters]
            began = time.monotonic()
            time.sleep(seconds)
            lasted = (time.monotonic() - began) * 1e6
            rates = [
                [(spent(own.pid) - was) / lasted for own, was in zip(cluster.processes, those, strict=True)]
                for cluster, those in zip(clusters, before, strict=True)
            ]
        finally:
            for cluster in clusters:
                cluster.close()
    means = {}
    for mode in MODES:
        own = [rate for rate, of in zip(rates, ORDER, strict=True) if of == mode]
        means[mode] = (statistics.mean(rate[0] for rate in own), statistics.mean(sum(rate[1:]) / 2 for rate in own))
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--seconds", type=float, default=40, help="how long each round idles")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    heads = (
        "round",
        *(f"{who}, {what}" for who in ("worker", "scheduler") for what in ("Dask, ms/s", "ours", "ratio")),
    )
    print("|", " | ".join(heads), "|")
    print("|---" * len(heads) + "|")
    for number in range(1, args.rounds + 1):
        means = round_of(args.threads, args.seconds)
        (scheduler, worker), (own_scheduler, own_worker) = means["Dask"], means["Mission Control"]
        cells = [worker, own_worker, own_worker / worker, scheduler, own_scheduler, own_scheduler / scheduler]
        print("|", " | ".join([str(number), *(f"{cell:.3f}" for cell in cells)]), "|", flush=True)


if __name__ == "__main__":
    main()
