"""What `mission demo` runs: an unchanged Dask program with and without Mission Control, then two jobs at 7 to 3.

The program is a case of `mission bench dask`; its cluster, its timing and its check of content are the benchmark's. A
demo takes one sample of each, so its ratio is an impression and not a measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from mission_control.bench import dask as bench
from mission_control.experiments import engine
from mission_control.experiments.points import Conditions
from mission_control.experiments.result import Result
from mission_control.scenario import load

SIZE = 512 << 20
"""Bytes of the program's data: Dask's own shuffle of it takes some six seconds on two cores (`mission bench dask`)."""
WARM_UP = 64 << 20
"""Bytes of a first run that is not timed: modules are imported in it."""
MEMORY_FRACTION = 1 / 16
"""Largest fraction of this machine's memory that is data: two clusters hold inputs, what is moved, and results."""
PROGRAMS = {
    "shuffle": "frame.shuffle('key')",
    "rechunk": "array.rechunk(columns)",
}
"""What the program does, by the benchmark's case. The second one needs no pandas."""


def unchanged_program(say: Callable[[str], None]) -> dict[str, Any]:
    """Run one Dask program on a cluster without Mission Control and on one with it.

    Args:
        say: Receives what is being done, a line each.

    Returns:
        ``program`` (its line), ``bytes``, ``counted`` (``rows`` or ``items``), ``items`` (how many the result has),
        ``checksum`` (over all of them, in any order; the same of both), ``carrier`` (of the shuffle with Mission
        Control: ``mission``, or ``dask``), ``dask_s``, ``mission_control_s``, ``ratio`` (the first divided by the
        second).

    Raises:
        RuntimeError: The results differ.
    """
    # Data frames need packages that Mission Control does not.
    name = "shuffle" if find_spec("pandas") and find_spec("pyarrow") else "rechunk"
    case = next(case for case in bench.CASES if case.name == name)
    nbytes = min(SIZE, int(psutil.virtual_memory().total * MEMORY_FRACTION))
    seconds: dict[str, float] = {}
    found: dict[str, tuple[int, int]] = {}
    carriers: set[str] = set()
    for mode in (bench.DISK, bench.OURS):
        say(f"runs {PROGRAMS[name]} on a cluster with {'Mission Control' if mode == bench.OURS else 'Dask alone'}")
        # A worker that misses a heartbeat while its cluster closes would print a traceback.
        with bench.cluster_with(mode, bench.memory_for(case, nbytes)) as client:
            for size in (min(WARM_UP, nbytes), nbytes):
                (seconds[mode], _), _, found[mode] = bench.run(client, case, bench.inputs_on(client, case, size))
            if mode == bench.OURS:
                carriers = bench.carried_by(client)
    if found[bench.DISK] != found[bench.OURS]:
        raise RuntimeError(f"{PROGRAMS[name]}: the results differ: {found}")
    return {
        "program": PROGRAMS[name],
        "bytes": nbytes,
        "counted": "rows" if name == "shuffle" else "items",
        "items": found[bench.OURS][0],
        "checksum": found[bench.OURS][1],
        "carrier": "mission" if carriers == {"mission"} else "dask",
        "dask_s": seconds[bench.DISK],
        "mission_control_s": seconds[bench.OURS],
        "ratio": seconds[bench.DISK] / seconds[bench.OURS],
    }


def two_jobs(results: Path, observer: engine.Observer) -> Result:
    """Run two encrypted jobs with priorities 7 and 3, which is the built-in scenario `demo`."""
    return engine.conduct({"demo": load("demo")}, Conditions(), results=results, resume=None, observer=observer)
