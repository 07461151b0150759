"""An unchanged program: Dask shuffles a data frame, and nothing in it names Mission Control."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from mission_control import _native
from mission_control.errors import PrerequisiteMissing
from mission_control.workloads.settings import AutoCount, SizedSettings

if TYPE_CHECKING:
    import pandas as pd
    from distributed import Client

PARTITIONS_PER_WORKER = 8
ROW_BYTES = 32
"""A key and three numbers, of eight bytes each."""


class FramesSettings(SizedSettings):
    """Dask's own shuffle of a data frame, by an unchanged program."""

    kind: Literal["frames"] = "frames"
    partitions: AutoCount = Field("auto", description="Partitions of the frame. auto: eight per worker")

    def make(self, number: int, folder: Path, workers: int) -> Frames:
        return Frames(self, number, folder, workers)


class Frames:
    """One job, of one shuffle by a column of integers.

    Args:
        workload: of the scenario; its size is that of the frame.
        number: of the job, from 0.
        folder: not used.
        workers: of the cluster.
    """

    def __init__(self, workload: FramesSettings, number: int, folder: Path, workers: int = 1):
        auto = workload.partitions == "auto"
        self.partitions = PARTITIONS_PER_WORKER * workers if auto else int(workload.partitions)
        self.rows = max(1, workload.size // ROW_BYTES // self.partitions)
        self.seed = workload.seed * 1000 + number
        self.frame: Any = None
        self.shuffled: Any = None

    def prepare(self, client: Client, say: Callable[[str], None]) -> None:
        try:
            import dask.dataframe as dd
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise PrerequisiteMissing(f"{error.name} is needed: pip install '.[bench]' in the checkout") from None
        say(f"makes a frame of {_native.format_bytes(self.rows * self.partitions * ROW_BYTES)}")
        seeds = [(self.seed, number) for number in range(self.partitions)]
        meta = rows_of((0, 0), 1).iloc[:0]
        self.frame = client.persist(dd.from_map(rows_of, seeds, rows=self.rows, meta=meta))
        wait_for(client, self.frame)

    def run(self, client: Client, say: Callable[[str], None]) -> None:
        say("shuffles")
        self.shuffled = client.persist(self.frame.shuffle("key", shuffle_method="p2p"))
        wait_for(client, self.shuffled)

    def check(self, client: Client, say: Callable[[str], None]) -> dict[str, bool]:
        say("compares")
        before, after = (client.gather(client.compute(own.to_delayed())) for own in (self.frame, self.shuffled))
        self.frame = self.shuffled = None
        sums = [(sum(map(len, parts)), sum(map(checksum, parts)) % 2**64) for parts in (before, after)]
        keys = [set(part["key"]) for part in after]
        return {"rows": sums[0] == sums[1], "each key in one partition": sum(map(len, keys)) == len(set().union(*keys))}


def wait_for(client: Client, collection: Any) -> None:
    """Wait until a persisted collection is complete; each job has its own client.

    Raises:
        Exception: That of the first task that failed.
    """
    from distributed import as_completed, futures_of

    for future in as_completed(futures_of(collection, client=client), loop=client.loop):
        if future.status == "error":
            future.result()


def rows_of(seed: tuple[int, int], rows: int) -> pd.DataFrame:
    """Generate the rows of a partition; some keys have several rows."""
    import numpy as np
    import pandas as pd

    random = np.random.default_rng(seed)
    return pd.DataFrame({"key": random.integers(0, 1 << 20, rows), **{name: random.random(rows) for name in "abc"}})


def checksum(part: pd.DataFrame) -> int:
    """Compute a checksum that does not depend on the order of rows."""
    import pandas as pd

    return int(pd.util.hash_pandas_object(part, index=False).sum())
