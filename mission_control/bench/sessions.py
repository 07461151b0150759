"""`mission bench sessions`: one session for each host against one for each worker process.

First real shuffles, on a cluster of one host, which has many workers. Then the controller alone, with a thousand active
transfers on ten hosts, of which one more begins and ends.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import dask
from distributed import Client

import mission_control
from mission_control import _native
from mission_control.bench.parts import shuffle
from mission_control.environment import describe
from mission_control.experiments.compare import interval
from mission_control.worlds.local import local_cluster

WORKERS = 12
PART = 512 << 10
PARTS = 4
"""Of each worker, for each worker: 288 MiB in all."""
MEETS_S = 30.0
SESSIONS = {"host": True, "process": False}
HOSTS, PROCESSES = 10, 16
JOBS, TRANSFERS = 100, 10
UPDATES = 30
TAIL_S = 1.0
"""After a shuffle its last reports are still said: four times their interval."""


def measure(rounds: int, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure both.

    Returns:
        ``shuffles``: of a shuffle with each kind of session, medians: reports that reached the scheduler and their
        bytes, messages with shares and their bytes, milliseconds of the scheduler's thread for both, seconds;
        ``ratio``: of seconds, host to process, with ``median``, ``low`` and ``high`` (95 %);
        ``updates``: of one update of 1,000 active transfers: messages, bytes, and milliseconds.
    """
    rows, ratio = shuffles(rounds, say)
    return {
        "shuffles": rows,
        "ratio": ratio,
        "updates": [update(per) for per in SESSIONS],
        "rounds": rounds,
        "environment": describe(),
    }


# --- real shuffles ----------------------------------------------------------------------------------------------------


def shuffles(rounds: int, say: Callable[[str], None]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    samples: dict[str, list[dict[str, float]]] = {per: [] for per in SESSIONS}
    with ExitStack() as stack:
        clients = {}
        for per, shared in SESSIONS.items():
            with dask.config.set({"mission-control.host-sessions": shared}):
                cluster = local_cluster(
                    n_workers=WORKERS, threads_per_worker=1, memory_limit="1GiB", dashboard_address=":0"
                )
                client = Client(stack.enter_context(cluster), set_as_default=False)
                clients[per] = stack.enter_context(client)
                mission_control.install(client, policy="performance-centric")
            client.run_on_scheduler(count)
        end = time.monotonic() + MEETS_S
        while speaks(clients["host"]) != WORKERS - 1:
            if time.monotonic() > end:
                raise TimeoutError(f"the workers have no session together after {MEETS_S:.0f} s")
            time.sleep(0.1)
        assert speaks(clients["process"]) == 0
        for number in range(rounds + 1):
            say(f"round {number} of {rounds}" if number else "warm-up")
            for per in SESSIONS if number % 2 else reversed(SESSIONS):
                clients[per].run_on_scheduler(counted)
                seconds = shuffle(clients[per], PARTS, PART)
                time.sleep(TAIL_S)
                own = clients[per].run_on_scheduler(counted)
                if number:
                    samples[per].append({**own, "seconds": seconds})
    rows = []
    for per, own in samples.items():
        medians = {name: statistics.median(sample[name] for sample in own) for name in own[0]}
        rows.append({"session": per, **medians})
    pairs = zip(samples["host"], samples["process"], strict=True)
    return rows, interval([host["seconds"] / process["seconds"] for host, process in pairs])


def count(dask_scheduler: Any) -> None:
    """On the scheduler: count the reports and the shares that it sends, and the time that its thread takes."""
    plugin = dask_scheduler.plugins["mission-control"]
    plugin.counts = dict.fromkeys(("reports", "report_bytes", "shares", "shares_bytes", "scheduler_ms"), 0.0)
    said, tell = dask_scheduler.stream_handlers["mission-control-report"], plugin.tell

    def heard(**message: Any) -> None:
        plugin.counts["reports"] += 1
        plugin.counts["report_bytes"] += len(json.dumps(message["report"]))
        began = time.thread_time()
        said(**message)
        plugin.counts["scheduler_ms"] += (time.thread_time() - began) * 1e3

    def told(worker: str, version: int, message: dict[str, Any]) -> None:
        if any(command["command"].startswith("shares") for command in message.get("commands", ())):
            plugin.counts["shares"] += 1
            plugin.counts["shares_bytes"] += len(json.dumps(message))
        tell(worker, version, message)

    dask_scheduler.stream_handlers["mission-control-report"] = heard
    plugin.tell = told


def counted(dask_scheduler: Any) -> dict[str, float]:
    """On the scheduler: what was counted since the last time."""
    plugin = dask_scheduler.plugins["mission-control"]
    own = plugin.counts
    plugin.counts = dict.fromkeys(own, 0.0)
    return dict(own)


def speaks(client: Client) -> int:
    """For how many workers another one speaks."""
    status = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins["mission-control"].status(0))
    return sum("speaker" in own for own in status["workers"].values())


# --- the controller alone ---------------------------------------------------------------------------------------------


def update(per: str) -> dict[str, Any]:
    """Of one update, in the median: a transfer begins or ends, of 1,000 that are active on all of ten hosts."""
    made = _native.Controller("performance-centric", 10 * JOBS * TRANSFERS, '{"carriers": ["tcp"]}')
    workers = {f"w{host}-{number}": host for host in range(HOSTS) for number in range(PROCESSES)}
    handled = lambda now, event: json.loads(made.handle(now, json.dumps(event)) or "[]")  # noqa: E731
    handled(0.0, {"event": "sessions", "apart": per == "process"})
    own = {"environment": {"carriers": ["tcp"]}, "protocol": _native.PROTOCOL}
    for worker, host in workers.items():
        handled(0.0, {"event": "join", "worker": worker, "host": f"h{host}", "address": f"{worker}:1", **own})
        handled(0.0, {"event": "known", "worker": worker})
    for job in range(JOBS):
        handled(0.0, {"event": "admit", "spec": {"job": f"job-{job}"}, "client": "client"})
    names = [(f"job-{job}", f"map-{number}") for job in range(JOBS) for number in range(TRANSFERS)]
    records = [{"job": job, "from": own, "to": "reduce", "asked_bytes": 100, "moved": True} for job, own in names]
    first = next(iter(workers))
    handled(0.1, {"event": "report", "worker": first, "report": {"records": records}})
    handled(1.0, {"event": "tick"})
    messages, sizes, seconds = [], [], []
    for number in range(UPDATES):
        served = 100 if number % 2 == 0 else 0
        event = {"records": [{**records[-1], "served_bytes": served, "moved": not served}]}
        began = time.perf_counter()
        commands = handled(2.0 + number, {"event": "report", "worker": first, "report": event})
        told = [own for own in commands if own["command"] == "tell"]
        seconds.append(time.perf_counter() - began)
        messages.append(len(told))
        sizes.append(sum(len(json.dumps(own["message"])) for own in told))
        # All have them, and say so: with a session for each host in one message.
        version = max(command["version"] for own in told for command in own["message"]["commands"])
        for host in range(HOSTS):
            of = [worker for worker, own in workers.items() if own == host]
            if per == "process":
                for worker in of:
                    handled(2.1 + number, {"event": "report", "worker": worker, "report": {"shares": version}})
            else:
                others = [[f"{worker}:1", {"shares": version}] for worker in of[1:]]
                report = {"shares": version, "others": others}
                handled(2.1 + number, {"event": "report", "worker": of[0], "report": report})
    return {
        "session": per,
        "messages": statistics.median(messages),
        "bytes": statistics.median(sizes),
        "ms": statistics.median(seconds) * 1e3,
    }


def table(result: dict[str, Any]) -> str:
    """Return what was measured as lines to read."""
    columns = {
        "reports": "reports",
        "report_bytes": "their bytes",
        "shares": "shares sent",
        "shares_bytes": "their bytes",
        "scheduler_ms": "scheduler, ms",
        "seconds": "shuffle, s",
    }
    lines = [
        f"A shuffle among {WORKERS} workers of one host, medians of {result['rounds']}:",
        "session per  " + "".join(f"{text:>15}" for text in columns.values()),
    ]
    for row in result["shuffles"]:
        cells = (f"{row[name]:>15.2f}" if name == "seconds" else f"{row[name]:>15,.0f}" for name in columns)
        lines.append(f"{row['session']:<13}" + "".join(cells))
    ratio = result["ratio"]
    lines += [
        f"seconds, host to process: {ratio['median']:.3f} (95 %: {ratio['low']:.3f} to {ratio['high']:.3f})",
        "",
        f"One of {JOBS * TRANSFERS} transfers begins or ends, on {HOSTS} hosts of {PROCESSES} workers; "
        f"medians of {UPDATES}:",
        f"{'session per':<13}{'messages':>15}{'bytes':>15}{'ms':>15}",
    ]
    for row in result["updates"]:
        lines.append(f"{row['session']:<13}{row['messages']:>15,.0f}{row['bytes']:>15,.0f}{row['ms']:>15.1f}")
    return "\n".join(lines)
