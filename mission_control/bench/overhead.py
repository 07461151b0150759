"""`mission bench overhead`: programs that shuffle nothing, on Dask alone and on Dask with Mission Control.

What counts is CPU time: of the workers, and of this process, which has client and scheduler. Two things would
drown a difference of some percent. A machine's speed changes within seconds: the clusters run side by side, and take
turns of a fraction of a second. And processes that run the same code differ by some percent as long as they live (where
their memory lies): each round has clusters of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
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
CLUSTERS = {ALONE: "tcp://", "Mission Control": "tcp://", "Mission Control, mission://": "mission://"}
TASKS = 300
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


PROGRAMS: dict[str, Callable[[Client, int], bool]] = {"tasks": tasks, "array": array, "bag": bag}


def measure(rounds: int, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run all programs on each cluster, in turn.

    Returns:
        ``rows``: program, mode, wall_s and cpu_s (medians). ``ratios``: program (``all``: their sum), mode, measured
        (``cpu`` or ``wall``), and of the ratios to Dask alone, round by round: median, low and high (95 % interval of
        the median), runs.

    Raises:
        RuntimeError: A program's result is wrong.
    """
    samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
    quiet = {
        "distributed.worker.profile.enabled": False,
        "distributed.logging.distributed": "error",
        # How names are hashed decides the order of sets, and with it what Dask does.
        "distributed.nanny.pre-spawn-environ.PYTHONHASHSEED": "0",
    }
    with dask.config.set(quiet):
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for key, own in measured(number).items():
                samples.setdefault(key, []).append(own)
    for mode in CLUSTERS:
        together = zip(*(samples[name, mode] for name in PROGRAMS), strict=True)
        samples["all", mode] = [(sum(wall for wall, _ in own), sum(cpu for _, cpu in own)) for own in together]
    rows = [
        {
            "program": name,
            "mode": mode,
            "wall_s": statistics.median(wall for wall, _ in own),
            "cpu_s": statistics.median(cpu for _, cpu in own),
        }
        for (name, mode), own in samples.items()
    ]
    ratios = [
        {
            "program": name,
            "mode": mode,
            "measured": what,
            **interval([one[at] / other[at] for one, other in zip(own, samples[name, ALONE], strict=True)]),
        }
        for (name, mode), own in samples.items()
        if mode != ALONE
        for at, what in enumerate(("wall", "cpu"))
    ]
    return {"rows": rows, "ratios": ratios, "rounds": rounds, "environment": describe()}


def measured(number: int) -> dict[tuple[str, str], tuple[float, float]]:
    """Wall and CPU seconds of each program on a new cluster of each mode."""
    sums = {(name, mode): (0.0, 0.0) for name in PROGRAMS for mode in CLUSTERS}
    with ExitStack() as stack:
        clients = {mode: stack.enter_context(cluster(mode, stack)) for mode in CLUSTERS}
        for turn in range(TURNS + 1):
            for name, program in PROGRAMS.items():
                for mode in order(number, turn % 2 == 1):
                    wall, cpu = timed(clients[mode], program, number * TURNS + turn)
                    if turn:
                        before = sums[name, mode]
                        sums[name, mode] = (before[0] + wall, before[1] + cpu)
    return sums


def cluster(mode: str, stack: ExitStack) -> Client:
    own = local_cluster(
        n_workers=2, threads_per_worker=1, protocol=CLUSTERS[mode], memory_limit="2GiB", dashboard_address=":0"
    )
    client = Client(stack.enter_context(own), set_as_default=False)
    if mode != ALONE:
        mission_control.install(client)
    return client


def order(number: int, reverse: bool) -> list[str]:
    """Return all modes; nobody is always the first, or always follows the same one."""
    modes = [*CLUSTERS]
    at = number % len(modes)
    own = modes[at:] + modes[:at]
    return own[::-1] if reverse else own


def timed(client: Client, program: Callable[[Client, int], bool], number: int) -> tuple[float, float]:
    """Wall and CPU seconds, until nothing of the program is left.

    Raises:
        RuntimeError: The result is wrong, or something is left.
    """

    def used() -> float:
        return sum(client.run(time.process_time).values()) + time.process_time()

    cpu, began = used(), time.perf_counter()
    if not program(client, number):
        raise RuntimeError("a program brought a wrong result")
    # Else the next one would pay for it.
    while client.cluster.scheduler.tasks:
        if time.perf_counter() > began + SETTLED_WITHIN_S:
            raise RuntimeError(f"tasks of a program are left after {SETTLED_WITHIN_S} s")
        time.sleep(0.001)
    wall = time.perf_counter() - began
    return wall, used() - cpu
