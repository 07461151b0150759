"""`mission bench overhead`: programs that shuffle nothing, on Dask alone and on Dask with Mission Control.

What counts is CPU time: of the workers, and of this process, which has client and scheduler. Workers have Dask's usual
several threads, or one. Most programs name no job; in one mode two jobs are named that do nothing. Two things would
drown a difference of some percent. A machine's speed changes within seconds: the clusters run side by side, and take
turns of a fraction of a second. And processes that run the same code differ by some percent as long as they live (where
their memory lies): each round has clusters of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import dask
import dask.array as da
import dask.bag as db
from distributed import Client

import mission_control
from mission_control.environment import describe
from mission_control.experiments.compare import interval
from mission_control.worlds.local import local_cluster

ALONE = "Dask alone"
NAMED = "Mission Control, two named jobs"
CLUSTERS = {ALONE: "tcp://", "Mission Control": "tcp://", NAMED: "tcp://", "Mission Control, mission://": "mission://"}
THREADS = (1, 4, 8)
"""Of a worker: Dask's default is as many as a process may have CPUs."""
MEASURED = ("wall", "worker cpu", "scheduler cpu")
TASKS = 300
CLIENTS = 6
IDLE_S = 2.0
SIDE, BLOCK = 2000, 500
WORDS = 40_000
TURNS = 2
"""Of each cluster with a program in a round, after one that does not count."""
SETTLED_WITHIN_S = 30.0


def tasks(client: Client, number: int) -> bool:
    """Small tasks, and a tree over their results."""
    values = client.map(int, range(number, number + TASKS), pure=False)
    while len(values) > 1:
        values = client.map(sum, [values[at : at + 8] for at in range(0, len(values), 8)], pure=False)
    return values[0].result() == sum(range(number, number + TASKS))


def array(client: Client, number: int) -> bool:
    """A matrix product: each block is needed on several workers."""
    own = da.full((SIDE, SIDE), number % 7 + 1.0, chunks=BLOCK)
    product = (own @ own.T).sum().compute(scheduler=client)
    return bool(product == (number % 7 + 1.0) ** 2 * SIDE**3)


def bag(client: Client, number: int) -> bool:
    """Words are counted: objects of Python."""
    words = db.from_sequence([f"word {(at + number) % 97}" for at in range(WORDS)], npartitions=16)
    counts = dict(words.frequencies(split_every=4).compute(scheduler=client))
    return sum(counts.values()) == WORDS and len(counts) == 97


def clients(client: Client, number: int) -> bool:
    """Several programs at once, each with small tasks."""
    with ExitStack() as stack:
        address = client.scheduler.address
        own = [stack.enter_context(Client(address, set_as_default=False)) for _ in range(CLIENTS)]
        values = [one.map(int, range(number, number + TASKS // CLIENTS), pure=False) for one in own]
        sums = [one.submit(sum, mine, pure=False) for one, mine in zip(own, values, strict=True)]
        expected = sum(range(number, number + TASKS // CLIENTS))
        return all(one.result() == expected for one in sums)


def idle(client: Client, number: int) -> bool:
    """Nothing happens."""
    time.sleep(IDLE_S)
    return True


PROGRAMS: dict[str, Callable[[Client, int], bool]] = {
    "tasks": tasks,
    "array": array,
    "bag": bag,
    "clients": clients,
    "idle": idle,
}
BUSY = tuple(name for name in PROGRAMS if name != "idle")
"""What ``all`` adds up."""


Sample = tuple[float, float, float]
"""As :data:`MEASURED`, in seconds."""


def measure(
    rounds: int, threads: Sequence[int] = THREADS, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Run all programs on each cluster, in turn.

    Args:
        threads: of a worker; each number is measured in each round.

    Returns:
        ``rows``: threads, program, mode, and medians of :data:`MEASURED` in seconds. ``ratios``: threads, program
        (``all``: the sum of those that work), mode, measured, and of the ratios to Dask alone, round by round: median,
        low and high (95 % interval of the median), runs.

    Raises:
        RuntimeError: A program's result is wrong.
    """
    samples: dict[tuple[int, str, str], list[Sample]] = {}
    quiet = {
        "distributed.worker.profile.enabled": False,
        "distributed.logging.distributed": "error",
        # How names are hashed decides the order of sets, and with it what Dask does.
        "distributed.nanny.pre-spawn-environ.PYTHONHASHSEED": "0",
    }
    with dask.config.set(quiet):
        for number in range(rounds):
            for count in threads:
                say(f"round {number + 1} of {rounds}, {count} threads a worker")
                for (name, mode), own in measured(number, count).items():
                    samples.setdefault((count, name, mode), []).append(own)
    for count in threads:
        for mode in CLUSTERS:
            together = zip(*(samples[count, name, mode] for name in BUSY), strict=True)
            samples[count, "all", mode] = [tuple(map(sum, zip(*own, strict=True))) for own in together]  # type: ignore[misc]
    rows = [
        {"threads": count, "program": name, "mode": mode}
        | {f"{what.replace(' ', '_')}_s": statistics.median(one[at] for one in own) for at, what in enumerate(MEASURED)}
        for (count, name, mode), own in samples.items()
    ]
    ratios = [
        {
            "threads": count,
            "program": name,
            "mode": mode,
            "measured": what,
            **interval([one[at] / other[at] for one, other in zip(own, samples[count, name, ALONE], strict=True)]),
        }
        for (count, name, mode), own in samples.items()
        if mode != ALONE
        for at, what in enumerate(MEASURED)
    ]
    return {"rows": rows, "ratios": ratios, "rounds": rounds, "environment": describe()}


def measured(number: int, threads: int) -> dict[tuple[str, str], Sample]:
    """Seconds of each program on a new cluster of each mode."""
    sums: dict[tuple[str, str], Sample] = {(name, mode): (0.0, 0.0, 0.0) for name in PROGRAMS for mode in CLUSTERS}
    with ExitStack() as stack:
        clients = {mode: stack.enter_context(cluster(mode, threads, stack)) for mode in CLUSTERS}
        for turn in range(TURNS + 1):
            for name, program in PROGRAMS.items():
                for mode in order(number, turn % 2 == 1):
                    own = timed(clients[mode], program, number * TURNS + turn)
                    if turn:
                        before = sums[name, mode]
                        sums[name, mode] = (before[0] + own[0], before[1] + own[1], before[2] + own[2])
    return sums


def cluster(mode: str, threads: int, stack: ExitStack) -> Client:
    own = local_cluster(
        n_workers=2, threads_per_worker=threads, protocol=CLUSTERS[mode], memory_limit="2GiB", dashboard_address=":0"
    )
    client = Client(stack.enter_context(own), set_as_default=False)
    if mode != ALONE:
        mission_control.install(client)
    if mode == NAMED:
        for name in ("one", "other"):
            # Admitted, without an annotation: what is measured belongs to neither.
            spec = mission_control.jobs.specification(name)
            client.sync(client.scheduler.mission_control_admit, spec=spec, client=client.id)
    return client


def order(number: int, reverse: bool) -> list[str]:
    """Return all modes; nobody is always the first, or always follows the same one."""
    modes = [*CLUSTERS]
    at = number % len(modes)
    own = modes[at:] + modes[:at]
    return own[::-1] if reverse else own


def timed(client: Client, program: Callable[[Client, int], bool], number: int) -> Sample:
    """What a program takes, until nothing of it is left.

    Raises:
        RuntimeError: The result is wrong, or something is left.
    """

    def used() -> tuple[float, float]:
        return sum(client.run(time.process_time).values()), time.process_time()

    (of_workers, of_scheduler), began = used(), time.perf_counter()
    if not program(client, number):
        raise RuntimeError("a program brought a wrong result")
    # Else the next one would pay for it.
    while client.cluster.scheduler.tasks:
        if time.perf_counter() > began + SETTLED_WITHIN_S:
            raise RuntimeError(f"tasks of a program are left after {SETTLED_WITHIN_S} s")
        time.sleep(0.001)
    wall, now = time.perf_counter() - began, used()
    return wall, now[0] - of_workers, now[1] - of_scheduler
