"""Measures a shuffle of N x N partitions of 4,000 rows: seconds, and the peak memory of each process.

``tools/wide_shuffle.py 1000 mission`` and ``tools/wide_shuffle.py 1000 dask``: the content is checked in both.
"""

from __future__ import annotations

import argparse
import logging
import os
import threading
import time

import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil
from distributed import Client, LocalCluster

import mission_control

ROWS = 4_000
LOOK_EVERY_S = 0.05


def part(number: int) -> pd.DataFrame:
    keys = np.random.default_rng(number).integers(0, 1 << 40, ROWS)
    return pd.DataFrame({"key": keys, "value": np.arange(ROWS) + number * ROWS})


def summed(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({"rows": [len(frame)], "sum": [int(frame["value"].sum())]})


class Peak:
    """The most memory of its own that each process has had, in MiB above the beginning."""

    def __init__(self, pids: list[int]):
        self.processes = [psutil.Process(pid) for pid in pids]
        self.first = [own.memory_full_info().uss for own in self.processes]
        self.most = list(self.first)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()

    def watch(self) -> None:
        while not self.stop.wait(LOOK_EVERY_S):
            now = [own.memory_full_info().uss for own in self.processes]
            self.most = [max(pair) for pair in zip(self.most, now, strict=True)]

    def end(self) -> list[int]:
        self.stop.set()
        self.thread.join()
        return [(most - first) >> 20 for most, first in zip(self.most, self.first, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("partitions", type=int)
    parser.add_argument("carrier", choices=["mission", "dask"])
    args = parser.parse_args()
    logging.getLogger("distributed.shuffle").setLevel(logging.ERROR)
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0", "memory_limit": "8GiB"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        if args.carrier == "mission":
            mission_control.install(client)
        peak = Peak([os.getpid(), *client.run(os.getpid).values()])
        begin = time.perf_counter()
        try:
            meta = part(0).iloc[:0]
            frame = dd.from_map(part, range(args.partitions), meta=meta)
            shuffled = frame.shuffle("key", npartitions=args.partitions, shuffle_method="p2p")
            found = shuffled.map_partitions(summed, meta=summed(meta)).compute()
            seconds = time.perf_counter() - begin
        finally:
            most = peak.end()
        rows = args.partitions * ROWS
        if (found["rows"].sum(), found["sum"].sum()) != (rows, rows * (rows - 1) // 2):
            raise SystemExit("the rows that came out are not those that went in")
        print(f"{args.carrier}: {seconds:.1f} s; MiB above the beginning: client and scheduler, workers: {most}")


if __name__ == "__main__":
    main()
