"""Transfers and nothing else: shuffles; and a mix of patterns, whose first job has a broadcast beside its shuffle.

They show how a policy shares the network between transfers. All objects are put before the clock starts; the timed
tasks only fetch. In the mix a host receives twice as many bytes of the broadcast as of a shuffle, so all end together
if a broadcast has twice the weight (paper 001, table 4.3).
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple
from uuid import uuid4

import numpy as np
from pydantic import Field

import mission_control
from mission_control import _native
from mission_control.workers import workers_of
from mission_control.workloads.settings import Bytes, SizedSettings

if TYPE_CHECKING:
    from distributed import Client, Future


class ShuffleSettings(SizedSettings):
    """All-to-all transfers of bytes that are put before the clock starts."""

    kind: Literal["shuffle"] = "shuffle"
    block: Annotated[Bytes, Field(ge=1)] | None = Field(
        None, description="Input of a map task, whose output has the same size; absent: one map task per worker"
    )

    def make(self, number: int, folder: Path, workers: int) -> Shuffle:
        return Shuffle(self, number, folder, workers)


class MixSettings(SizedSettings):
    """The first job has a broadcast beside its shuffle, the others have a shuffle; size is that of each shuffle."""

    kind: Literal["mix"] = "mix"

    def make(self, number: int, folder: Path, workers: int) -> Mix:
        return Mix(self, number, folder, workers)


class Shuffle:
    """One job, of one shuffle.

    Args:
        workload: of the scenario; its size is what a shuffle moves.
        number: of the job, from 0.
        folder: not used.
        workers: of the cluster; each sends to all.
    """

    has_broadcast = False
    # Many small parts cost more CPU than bandwidth where many jobs run at once.
    tasks_per_worker = 1
    objects_per_worker = 1

    def __init__(self, workload: SizedSettings, number: int, folder: Path, workers: int = 1):
        self.workers = workers
        self.readers = workers * self.tasks_per_worker
        block = workload.block if isinstance(workload, ShuffleSettings) else None
        self.objects = math.ceil(workload.size / block) if block else workers * self.objects_per_worker
        self.part_bytes = max(1, workload.size // (self.objects * self.readers))
        self.model_bytes = max(1, 2 * workload.size // (workers * self.objects))
        self.seed = workload.seed * 1000 + number
        self.maps: list[Future] = []
        self.models: list[Future] = []
        self.found: list[list[int]] = []
        self.expected: list[list[int]] = []

    def prepare(self, client: Client, say: Callable[[str], None]) -> None:
        say(f"makes {_native.format_bytes(self.part_bytes * self.objects * self.readers)} for its shuffle")
        homes, run = self.homes(client), uuid4().hex

        def put(stage: str, index: int, parts: int, part_bytes: int) -> Future:
            given, home = (self.seed, stage, index, parts, part_bytes), homes[index % len(homes)]
            return client.submit(put_random, *given, key=(f"mix-{stage}-{run}", index), pure=False, workers=[home])

        self.maps = [put("map", index, self.readers, self.part_bytes) for index in range(self.objects)]
        if self.has_broadcast:
            self.models = [put("model", index, 1, self.model_bytes) for index in range(self.objects)]
        maps, models = ([made.checksums for made in client.gather(group)] for group in (self.maps, self.models))
        self.expected = [[checksums[index] for checksums in maps] for index in range(self.readers)]
        self.expected += [checksums for checksums in models for _ in homes]

    def run(self, client: Client, say: Callable[[str], None]) -> None:
        say("fetches")
        homes, run = self.homes(client), uuid4().hex

        def fetch(stage: str, home: str, index: int, made: list[Future], part: int) -> Future:
            where = {"workers": [home], "allow_other_workers": True}
            return client.submit(fetch_part, made, part, key=(f"mix-{stage}-{run}", index), pure=False, **where)

        tasks = [fetch("reduce", homes[index % len(homes)], index, self.maps, index) for index in range(self.readers)]
        for number, (model, home) in enumerate(itertools.product(self.models, homes)):
            tasks.append(fetch("read", home, number, [model], 0))
        self.found = client.gather(tasks)
        self.maps, self.models = [], []

    def homes(self, client: Client) -> list[str]:
        """Addresses of its workers."""
        return sorted(workers_of(client))[: self.workers]

    def check(self, client: Client, say: Callable[[str], None]) -> dict[str, bool]:
        return {"content": self.found == self.expected}


class Mix(Shuffle):
    """One job of the mix: the first has a broadcast, too."""

    # Several tasks per worker, so that some wait for bytes while others check theirs.
    tasks_per_worker = 4
    # A task of a shuffle fetches many small parts, as in real shuffles. The broadcast has several objects, because a
    # receiver requests few pieces of one object at once: too few for a share of five of ten flows.
    objects_per_worker = 4

    def __init__(self, workload: SizedSettings, number: int, folder: Path, workers: int = 1):
        super().__init__(workload, number, folder, workers)
        self.has_broadcast = number == 0


class Made(NamedTuple):
    """What a task put."""

    reference: mission_control.Reference
    checksums: list[int]
    """Of its parts."""


def put_random(seed: int, stage: str, number: int, parts: int, part_bytes: int) -> Made:
    """Puts an object of random parts."""
    random = np.random.Generator(np.random.PCG64([seed, len(stage), number]))
    made = [random.bytes(part_bytes) for _ in range(parts)]
    return Made(mission_control.put(made), [zlib.crc32(part) for part in made])


def fetch_part(made: list[Made], part: int) -> list[int]:
    """Fetches one part of each object; gives their checksums."""
    return [zlib.crc32(data) for data in mission_control.fetch([entry.reference for entry in made], part=part)]
