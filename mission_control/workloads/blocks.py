"""Blocks of a distributed file system: `write` stores each replica of a block on another host; `read` reads each block
on a host that does not have it. They are Hadoop's stand-alone jobs `hdfsWrite` and `hdfsRead` (paper 000, 3.1); the
other two are the workloads `shuffle` and `sort`.

A block lies in the store of its worker: in memory, and in the spool once that is full. So the network sets the pace,
and not the disk that all hosts of this machine share.

What the settings of table 2 of the paper are here (first value: default, second: tuned):

| Hadoop | values | here |
|---|---|---|
| `dfs.block.size` | 64 MiB, 512 MiB | `block`; of `sort` the number of `partitions`: a map task per block |
| `dfs.replication` | 3, 1 | `replication` of `write`; a reader needs one replica only |
| `mapred.reduce.parallel.copies` | 5, 20 | `control.flows_per_host` |
| `fs.inmemory.size.mb`, `io.sort.mb`, `io.sort.factor` | | none: nothing is spilled and merged by tasks |
| `io.file.buffer.size` | | none: what arrives is received into the memory that the task uses |
| `mapred.child.java.opts` | | none: tasks use the memory of their worker |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from uuid import uuid4

import numpy as np
from pydantic import Field

import mission_control
from mission_control import _native
from mission_control.errors import BadInput
from mission_control.workers import workers_of
from mission_control.workloads.mix import Made, fetch_part, put_random
from mission_control.workloads.settings import JOB_MEASURES, Bytes, Count, Measure, SizedSettings

if TYPE_CHECKING:
    from distributed import Client, Future


class BlockSettings(SizedSettings):
    """Base of jobs on blocks."""

    # These jobs have no shuffle.
    measures: ClassVar[Mapping[str, Measure]] = {"job_seconds": JOB_MEASURES["job_seconds"], **JOB_MEASURES}

    block: Annotated[Bytes, Field(ge=1)] = Field(
        "64 MiB", validate_default=True, description="Bytes of a block (dfs.block.size)"
    )


class WriteSettings(BlockSettings):
    """Write blocks: each is stored on as many hosts as it has replicas, one host after another."""

    kind: Literal["write"] = "write"
    replication: Count = Field(3, description="Hosts that store each block (dfs.replication)")

    def make(self, number: int, folder: Path, workers: int) -> Write:
        return Write(self, number, folder, workers)


class ReadSettings(BlockSettings):
    """Read blocks that are put before the clock starts, each by a host that does not have it."""

    kind: Literal["read"] = "read"

    def make(self, number: int, folder: Path, workers: int) -> Read:
        return Read(self, number, folder, workers)


class Blocks:
    """Base of both jobs: blocks, and the workers where they lie.

    Args:
        workload: of the scenario.
        number: of the job, from 0; each has other bytes.
        workers: of the cluster; blocks are divided equally among them.
    """

    def __init__(self, workload: BlockSettings, number: int, workers: int):
        self.workers = workers
        self.block = workload.block
        self.count = math.ceil(workload.size / workload.block)
        self.last = workload.size - (self.count - 1) * workload.block
        self.seed = workload.seed * 1000 + number
        self.random = np.random.default_rng([self.seed, self.count])
        self.run_id = uuid4().hex
        self.made: list[Future] = []

    def homes(self, client: Client) -> list[str]:
        """Addresses of its workers."""
        return sorted(workers_of(client))[: self.workers]

    def task(
        self, client: Client, stage: str, number: int, home: str, function: Callable[..., Any], *given: Any
    ) -> Any:
        """Submit a task that must run on one worker, because its location matters."""
        key = (f"{stage}-{self.run_id}", number)
        return client.submit(function, *given, key=key, pure=False, workers=[home])

    def generate(self, client: Client, stage: str, number: int, home: str) -> Any:
        """Submit the task that makes a block on a worker."""
        size = self.last if number == self.count - 1 else self.block
        return self.task(client, stage, number, home, put_random, self.seed, "block", number, 1, size)


class Write(Blocks):
    """One job that writes blocks.

    Raises:
        BadInput: more replicas than workers.
    """

    def __init__(self, workload: WriteSettings, number: int, folder: Path, workers: int = 1):
        super().__init__(workload, number, workers)
        if workload.replication > workers:
            raise BadInput(
                f"{workload.replication} replicas on {workers} workers: use more workers, or a lower replication"
            )
        self.replication = workload.replication
        self.replicas: list[list[str]] = []
        """For each block the workers that store it, in the order of storing."""

    def prepare(self, client: Client, say: Callable[[str], None]) -> None:
        """Choose places; the blocks themselves are made while the job runs, as by Hadoop's randomwriter."""
        homes = self.homes(client)
        for number in range(self.count):
            first = number % len(homes)
            others = [home for home in homes if home != homes[first]]
            chosen = self.random.choice(len(others), self.replication - 1, replace=False) if others else ()
            self.replicas.append([homes[first], *(others[place] for place in chosen)])

    def run(self, client: Client, say: Callable[[str], None]) -> None:
        """Store all replicas: each host forwards a block once it has stored all of it; the job ends with the last
        replica."""
        size = (self.count - 1) * self.block + self.last
        say(f"writes {_native.format_bytes(size)} in {self.count} blocks, {self.replication} times each")
        for number, homes in enumerate(self.replicas):
            before = self.generate(client, "write-block", number, homes[0])
            self.made.append(before)
            for step, home in enumerate(homes[1:], start=1):
                place = number + step * self.count
                before = self.task(client, "write-replica", place, home, store, before)
                self.made.append(before)
        for future in self.made:
            future.result()

    def check(self, client: Client, say: Callable[[str], None]) -> dict[str, bool]:
        """Read each replica where it is stored, and compare it with the original block."""
        say("reads all replicas")
        places = [home for homes in self.replicas for home in homes]
        found = [
            self.task(client, "write-check", number, home, stored, made)
            for number, (home, made) in enumerate(zip(places, self.made, strict=True))
        ]
        made, read = client.gather(self.made), client.gather(found)
        self.made = []
        # The first replica of each block was made in place, and not stored from another.
        expected = [made[number - number % self.replication].checksums for number in range(len(made))]
        return {
            "content of every replica": read == expected,
            "replicas where they belong": [one.reference.worker for one in made] == places,
        }


class Read(Blocks):
    """One job that reads blocks."""

    def __init__(self, workload: ReadSettings, number: int, folder: Path, workers: int = 1):
        super().__init__(workload, number, workers)
        self.found: list[list[int]] = []
        self.expected: list[list[int]] = []

    def prepare(self, client: Client, say: Callable[[str], None]) -> None:
        say(f"makes {self.count} blocks")
        homes = self.homes(client)
        self.made = [
            self.generate(client, "read-block", number, homes[number % len(homes)]) for number in range(self.count)
        ]
        self.expected = [made.checksums for made in client.gather(self.made)]

    def run(self, client: Client, say: Callable[[str], None]) -> None:
        """Read all blocks: every host reads equally many; in each round from hosts at another distance."""
        say("reads")
        homes, reading = self.homes(client), []
        shift = 0
        for number, made in enumerate(self.made):
            if number % len(homes) == 0:
                shift = int(self.random.integers(1, len(homes))) if len(homes) > 1 else 0
            reader = homes[(number + shift) % len(homes)]
            reading.append(self.task(client, "read", number, reader, fetch_part, [made], 0))
        self.found = client.gather(reading)
        self.made = []

    def check(self, client: Client, say: Callable[[str], None]) -> dict[str, bool]:
        return {"content": self.found == self.expected}


def store(made: Made) -> Made:
    """Store a replica of another worker's block; return it with the checksum of the bytes that arrived."""
    part = mission_control.fetch(made.reference)[0]
    return Made(mission_control.put([part]), made.checksums)


def stored(made: Made) -> list[int]:
    """Compute the checksum of a replica from this worker's bytes."""
    return fetch_part([made], 0)
