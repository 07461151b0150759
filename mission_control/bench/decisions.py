"""`mission bench decisions`: what deciding costs, through the seam that the scheduler plug-in uses."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from mission_control import _native
from mission_control.environment import describe

JOBS, TRANSFERS = 1_000, 3
TASKS = 1_000_000
UPDATE = 1_000
"""Tasks of one update of a graph."""
ROUNDS = 21
WORKERS = 10_000
OVER = 10_000
FINISHED, IDLE = 3_000, 100
"""Transfers of one job that are over, each at as many workers."""
GROUPS, WAITING, CHUNKS = 100, 1_000, 20_000


def measure() -> dict[str, Any]:
    """Measure all of them.

    Returns:
        ``rows``: what, seconds (of the weights the median of 21 rounds).
    """
    rows = [
        {"what": f"one round of weights, {JOBS:,} jobs with {TRANSFERS} active transfers each", "seconds": weights()},
        {
            "what": f"one chunk from request to grant, {GROUPS} jobs and {WAITING:,} waiting chunks",
            "seconds": statistics.median(_native.seconds_per_grant(GROUPS, WAITING, CHUNKS) for _ in range(ROUNDS)),
        },
        {"what": f"{TASKS:,} tasks in updates of {UPDATE:,}, 2 inputs each", "seconds": graph()},
        {"what": f"{WORKERS:,} workers join one by one, each with its briefing", "seconds": joins()},
        {"what": f"one report of a worker, {JOBS:,} jobs with {TRANSFERS} active transfers each", "seconds": report()},
        {
            "what": f"one tick with {FINISHED:,} transfers that are over and {IDLE} workers without one",
            "seconds": tick_after_finished(),
        },
        {"what": "one task more in the graph of the first job", "seconds": graph_update(over=0)},
        {"what": f"the same after {OVER:,} jobs that are over", "seconds": graph_update(over=OVER)},
    ]
    return {"rows": rows, "environment": describe()}


def progress(job: int, served: int, number: int = 0) -> str:
    """What a worker says of a transfer."""
    transfer = {"job": f"job-{job}", "from": f"map-{number}", "to": "reduce"}
    record = {**transfer, "asked_bytes": 100, "served_bytes": served}
    return json.dumps({"event": "report", "worker": "w", "report": {"records": [record]}})


def controller(*jobs: str, policy: str = "fair", flows: int = 10) -> _native.Controller:
    """Of a cluster to which a client has submitted these jobs."""
    made = _native.Controller(policy, flows, '{"carriers": ["tcp"]}')
    for job in jobs:
        made.handle(0.0, json.dumps({"event": "admit", "spec": {"job": job}, "client": "client"}))
    return made


def busy() -> _native.Controller:
    """With all transfers active, and weighed."""
    jobs = [f"job-{number}" for number in range(JOBS)]
    made = controller(*jobs, policy="performance-centric", flows=10 * JOBS * TRANSFERS)
    where = {"worker": "w", "host": "h", "address": "h:1", "protocol": _native.PROTOCOL}
    made.handle(0.0, json.dumps({"event": "join", **where, "environment": {"carriers": ["tcp"]}}))
    for job in range(JOBS):
        for number in range(TRANSFERS):
            made.handle(0.0, progress(job, 0, number))
    return made


def weights() -> float:
    """Seconds of a round: a report that changes who is active, to the commands that it causes."""
    made = busy()
    samples = []
    for number in range(ROUNDS):
        event = progress(0, 100 if number % 2 == 0 else 0)
        began = time.perf_counter()
        commands = made.handle(number + 1.0, event)
        samples.append(time.perf_counter() - began)
        assert commands is not None and '"command":"weights"' in commands and '"command":"shares' in commands
    return statistics.median(samples)


def report() -> float:
    """Seconds of a report that changes nothing of who is active."""
    made = busy()
    began = time.perf_counter()
    for number in range(JOBS):
        made.handle(0.0, progress(number, 50))
    return (time.perf_counter() - began) / JOBS


def tick_after_finished() -> float:
    """Seconds of a tick that computes weights, after many transfers of a job that lives on."""
    made = controller("job", policy="performance-centric")
    own = {"environment": {"carriers": ["tcp"]}, "protocol": _native.PROTOCOL}
    for worker in range(IDLE):
        where = {"worker": f"w{worker}", "host": f"h{worker}", "address": f"h{worker}:1"}
        made.handle(0.0, json.dumps({"event": "join", **where, **own}))
    for number in range(FINISHED):
        record = {"job": "job", "from": f"map-{number}", "to": f"reduce-{number}", "started": number}
        for over in (False, True):
            said = {**record, "asked_bytes": 100, "served_bytes": 100, "over": over}
            for worker in range(IDLE):
                report = {"number": 2 * number + 1 + over, "records": [said]}
                made.handle(0.0, json.dumps({"event": "report", "worker": f"w{worker}", "report": report}))
    samples = []
    for second in range(ROUNDS):
        began = time.perf_counter()
        made.handle(second + 1.0, json.dumps({"event": "tick"}))
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)


def joins() -> float:
    """Seconds until all workers have joined a cluster with one job, each on a host of its own."""
    made = controller("job")
    own = {"environment": {"carriers": ["shm", "tcp"], "interfaces": 1}, "protocol": _native.PROTOCOL}
    began = time.perf_counter()
    for number in range(WORKERS):
        where = {"worker": f"tcp://w{number}", "host": f"h{number}", "address": f"h{number}:1"}
        made.handle(0.0, json.dumps({"event": "join", **where, **own}))
        made.handle(0.0, json.dumps({"event": "known", "worker": where["worker"]}))
    return time.perf_counter() - began


def graph() -> float:
    """Seconds to learn a graph of layers: each task takes from two of the layer before."""
    made = controller("job")
    layers, width = 10, TASKS // 10
    seconds = 0.0
    for layer in range(layers):
        stage, first = f"layer-{layer}", (layer - 1) * width
        tasks = [
            (layer * width + index, stage, "work", [first + index, first + (index + 1) % width] if layer else [])
            for index in range(width)
        ]
        began = time.perf_counter()
        for start in range(0, width, UPDATE):
            made.tasks(0.0, tasks[start : start + UPDATE], "client", '{"job": "job"}')
        seconds += time.perf_counter() - began
    began = time.perf_counter()
    made.handle(0.0, json.dumps({"event": "flush"}))
    seconds += time.perf_counter() - began
    assert sum(len(job["transfers"]) for job in json.loads(made.status())["jobs"]) == layers - 1
    return seconds


def graph_update(over: int) -> float:
    """Seconds of one task more, and of what it tells, after so many jobs have come and gone."""
    made = controller("job")
    flush = json.dumps({"event": "flush"})
    number = 0
    for job in range(over):
        for stage in range(4):
            inputs = [number - 1] if stage else []
            made.tasks(0.0, [(number, f"stage-{stage}", "work", inputs)], "client", f'{{"job": "job-{job}"}}')
            number += 1
        made.handle(0.0, flush)
        for task in range(number - 4, number):
            made.forgotten(0.0, task)
    assert made.held()["tasks of the graph"] == 0 and made.held()["jobs"] == 1
    made.tasks(0.0, [(number, "a", "work", [])], "client", '{"job": "job"}')
    began = time.perf_counter()
    for task in range(1, JOBS):
        made.tasks(0.0, [(number + task, "b", "work", [number])], "client", '{"job": "job"}')
        made.handle(0.0, flush)
    return (time.perf_counter() - began) / JOBS
