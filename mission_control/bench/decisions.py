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
ROUNDS = 21
WORKERS = 10_000
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
        {"what": f"{TASKS:,} tasks classified one by one, 2 inputs each", "seconds": graph()},
        {"what": f"{WORKERS:,} workers join one by one, each with its briefing", "seconds": joins()},
        {"what": f"one report of a worker, {JOBS:,} jobs with {TRANSFERS} active transfers each", "seconds": report()},
        {"what": f"one task more in a graph, after {JOBS:,} jobs that are over", "seconds": graph_update()},
    ]
    return {"rows": rows, "environment": describe()}


def progress(job: int, served: int, number: int = 0) -> str:
    """What a worker says of a transfer."""
    transfer = {"job": f"job-{job}", "from": f"map-{number}", "to": "reduce"}
    totals = {"asked_bytes": 100, "served_bytes": served}
    return json.dumps({"event": "progress", "worker": "w", "transfer": transfer, **totals})


def busy() -> _native.MissionController:
    """With all transfers active, and weighed."""
    mission = _native.MissionController("performance-centric", 10 * JOBS * TRANSFERS, "{}")
    for job in range(JOBS):
        for number in range(TRANSFERS):
            mission.handle(0.0, progress(job, 0, number))
    return mission


def report() -> float:
    """Seconds of a report that changes nothing of who is active."""
    mission = busy()
    began = time.perf_counter()
    for number in range(JOBS):
        assert mission.handle(0.0, progress(number, 50)) == "[]"
    return (time.perf_counter() - began) / JOBS


def joins() -> float:
    """Seconds until all workers have joined a cluster with one job, each on a host of its own."""
    mission = _native.MissionController("fair", 10, "{}")
    mission.handle(0.0, json.dumps({"event": "job-arrived", "spec": {"job": "j"}}))
    environment = {"carriers": ["shm", "tcp"], "interfaces": 1}
    began = time.perf_counter()
    for number in range(WORKERS):
        where = {"worker": f"tcp://w{number}", "host": f"h{number}", "address": f"h{number}:1"}
        mission.handle(0.0, json.dumps({"event": "worker-joined", **where, "environment": environment}))
        mission.briefing(where["worker"])
    return time.perf_counter() - began


def graph_update() -> float:
    """Seconds of one task more, and of what it tells, after many jobs have come and gone."""
    mission = _native.MissionController("fair", 10, "{}")
    tick = json.dumps({"event": "tick"})
    number = 0
    for job in range(JOBS):
        for stage in range(4):
            mission.add_task(number, f"job-{job}", f"stage-{stage}", "work", [number - 1] if stage else [])
            number += 1
        mission.handle(0.0, tick)
        for task in range(number - 4, number):
            mission.forget_task(task)
        mission.handle(0.0, json.dumps({"event": "job-ended", "job": f"job-{job}"}))
    mission.add_task(number, "job", "a", "work", [])
    began = time.perf_counter()
    for task in range(1, JOBS):
        mission.add_task(number + task, "job", "b", "work", [number])
        mission.handle(0.0, tick)
    return (time.perf_counter() - began) / JOBS


def weights() -> float:
    """Seconds of a round: an event that changes who is active, to the commands that it causes."""
    mission = busy()
    samples = []
    for number in range(ROUNDS):
        event = progress(0, 100 if number % 2 == 0 else 0)
        began = time.perf_counter()
        commands = mission.handle(0.0, event)
        samples.append(time.perf_counter() - began)
        assert {command["command"] for command in json.loads(commands)} == {"weights", "shares"}
    return statistics.median(samples)


def graph() -> float:
    """Seconds to learn a graph of layers: each task takes from two of the layer before."""
    mission = _native.MissionController("fair", 10, "{}")
    layers, width = 10, TASKS // 10
    began = time.perf_counter()
    for layer in range(layers):
        stage, first = f"layer-{layer}", (layer - 1) * width
        for index in range(width):
            inputs = [first + index, first + (index + 1) % width] if layer else []
            mission.add_task(layer * width + index, "job", stage, "work", inputs)
    mission.handle(0.0, json.dumps({"event": "tick"}))
    seconds = time.perf_counter() - began
    assert sum(len(job["transfers"]) for job in json.loads(mission.status())) == layers - 1
    return seconds
