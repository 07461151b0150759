"""Evaluate the Mission Controller's records of jobs: transfers, shares, fairness, phases."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from mission_control.experiments.result import JobResult, Transfer
from mission_control.map_reduce.phases import PHASES

Key = tuple[str, ...]
"""A job, ``(job,)``; or a transfer, ``(job, from, to)``."""
Record = dict[str, Any]
OTHERS_TOO = ("worker", "worker-left", "worker-without", "policy-error", "ecn-probed")
"""Kinds of records that concern every job of a cluster."""


def of_jobs(records: Sequence[Record], names: set[str]) -> list[Record]:
    """Select the records of these jobs; of decisions, keep only the entries of these jobs."""
    own = []
    for record in records:
        if record["kind"] == "decision" and "transfers" in record:
            transfers = [entry for entry in record["transfers"] if entry["job"] in names]
            if transfers:
                own.append({**record, "transfers": transfers})
        elif record.get("job") in names or (record["kind"] in OTHERS_TOO and "job" not in record):
            own.append(record)
    return own


def jobs_of(
    records: list[Record], status: Mapping[str, Any], admitted: Mapping[str, str], seconds: Mapping[str, float]
) -> list[JobResult]:
    """Return each job with its transfers.

    Args:
        records: of these jobs.
        status: of the cluster at the end, for jobs that have not ended.
        admitted: for each job's name in the scenario, the name under which the cluster admitted it.
        seconds: duration of each job, by the name in the scenario.
    """
    known = [record for record in records if record["kind"] == "job-ended"] + list(status.get("jobs", ()))
    weights, fair = busiest_weights(records), fairness(records)
    hosts = {worker: facts["host"] for worker, facts in status.get("workers", {}).items()}
    crossed = parts_of_bytes(records, [(name,) for name in admitted.values()], hosts)
    crossed |= parts_of_bytes(records, busiest_transfers(records), hosts)

    def came(key: Key) -> Record:
        weight, flows = weights.get(key, (None, None))
        return {"weight": weight, "flows": flows, "share": crossed.get(key)}

    found = []
    for name, own in admitted.items():
        said = [record for record in records if record["kind"] == "phases" and record["job"] == own]
        phases = {phase: sum(record.get(phase, 0.0) for record in said) for phase in PHASES} if said else {}
        recomputed = sum(record["kind"] == "recomputed" and record["job"] == own for record in records)
        entries = [one for job in known if job["job"] == own for one in job["transfers"] if one["asked_bytes"]]
        keys = [(own, entry["from"], entry["to"]) for entry in entries]
        transfers = [
            transfer_of(entry, {**came(key), "fairness": fair.get(key)})
            for entry, key in zip(entries, keys, strict=True)
        ]
        labels: Record = {"name": name, "admitted": own, "seconds": seconds.get(name), **came((own,))}
        found.append(JobResult(**labels, phases=phases, recomputed=recomputed, transfers=transfers))
    return found


def transfer_of(entry: Record, came: Record) -> Transfer:
    begun, ended = entry.get("started"), entry.get("ended")
    same = ("from", "to", "pattern", "evidence", "local_bytes", "peer_bytes", "flows_peak", "refetches", "resumed")
    facts = {**dict.fromkeys(same[4:], 0), **{name: entry[name] for name in same if name in entry}, **came}
    seconds = ended - begun if begun and ended else None
    transport = entry.get("transport")
    rates = ((transport or {}).get("observed") or {}).get("rates") or {}
    of_flows = jain(rates.get("count", 0), rates.get("sum"), rates.get("squares"))
    timed: Record = {"seconds": seconds, "started": begun, "flow_fairness": of_flows}
    return Transfer(**facts, **timed, bytes=entry["served_bytes"], transport=transport)


def weighed(records: list[Record]) -> list[list[Record]]:
    """Return the transfers of each decision about weights."""
    return [one["transfers"] for one in records if one["kind"] == "decision" and one["command"] == "weights"]


def busiest_weights(records: list[Record]) -> dict[Key, tuple[float, int]]:
    """Return the weight and the flows of each job and transfer while most were active, because then shares matter."""
    best: dict[Key, tuple[int, float, int]] = {}
    for transfers in weighed(records):
        active: dict[Key, list[Record]] = defaultdict(list)
        for entry in transfers:
            active[(entry["job"],)].append(entry)
            active[(entry["job"], entry["from"], entry["to"])].append(entry)
        for key, own in active.items():
            if len(transfers) >= best.get(key, (0, 0.0, 0))[0]:
                best[key] = (len(transfers), sum(one["weight"] for one in own), sum(one["flows"] for one in own))
    return {key: (weight, flows) for key, (_, weight, flows) in best.items()}


def busiest_transfers(records: list[Record]) -> list[Key]:
    """Return the transfers that were active when most were."""
    most: list[Key] = []
    for transfers in weighed(records):
        if len(transfers) >= len(most):
            most = [(entry["job"], entry["from"], entry["to"]) for entry in transfers]
    return most


def fairness(records: list[Record]) -> dict[Key, float]:
    """Compute Jain's index of each transfer's receiver rates."""
    last: dict[Key, dict[str, dict[float, Record]]] = {}
    for record in records:
        if record["kind"] == "progress":
            own = last.setdefault((record["job"], record["from"], record["to"]), {})
            own.setdefault(record["worker"], {})[record["started"]] = record
    found = {}
    for key, workers in last.items():
        # Bytes that never left their worker do not count.
        took = [
            (
                sum(one["served_bytes"] - one["local_bytes"] for one in records_of.values()),
                min(records_of),
                max(one["ended"] for one in records_of.values()),
            )
            for records_of in workers.values()
        ]
        rates = [moved / (ended - begun) for moved, begun, ended in took if moved and ended and ended > begun]
        if (index := jain(len(rates), sum(rates), sum(rate**2 for rate in rates))) is not None:
            found[key] = index
    return found


def jain(count: float, total: float | None, squares: float | None) -> float | None:
    """Jain's index (Jain, Chiu and Hawe 1984) of ``count`` rates, from their sum and the sum of their squares: 1 if all
    are equal, 1/n if one of n has everything. ``None`` if there are none, or a worker's report is impossible."""
    if not count or not total or not squares or not math.isfinite(total * total) or not math.isfinite(squares):
        return None
    return total**2 / (count * squares)


def parts_of_bytes(
    records: list[Record], keys: Sequence[Key], hosts: Mapping[str, str] | None = None
) -> dict[Key, float]:
    """Return the fraction that each job, or each transfer, had of the bytes that crossed the network.

    Shares are made at each receiving host: its workers share its slots. So bytes count at a host only while all keys
    had some under way there.

    Args:
        records: Those of kind ``progress`` are used.
        keys: Jobs or transfers.
        hosts: The host of each worker; one that is absent, because it died, is of the host with its address.

    Returns:
        By key a fraction, 0 to 1; empty where the keys never had bytes under way at one host at the same time.
    """
    hosts = hosts or {}
    at_address = {address_of(worker): host for worker, host in hosts.items()}
    now: dict[tuple[Any, ...], int] = {}
    points: dict[str, dict[Key, list[tuple[float, int]]]] = {}
    for record in records:
        if record["kind"] == "progress":
            worker: str = record["worker"]
            transfer = (record["job"], record["from"], record["to"])
            key = next((key for key in keys if transfer[: len(key)] == key), None)
            if key is None:
                continue
            host = hosts.get(worker, at_address.get(address_of(worker), address_of(worker)))
            # A worker forgets a transfer that is quiet; what it reports later begins at 0, at another time.
            now[(host, *transfer, worker, record.get("started"))] = record["served_bytes"] - record["local_bytes"]
            total = sum(value for own, value in now.items() if own[: len(key) + 1] == (host, *key))
            if total:
                points.setdefault(host, {}).setdefault(key, []).append((record["time"], total))
    moved: dict[Key, int] = dict.fromkeys(keys, 0)
    for point in points.values():
        if len(point) == len(keys):
            first = max(path[0][0] for path in point.values())
            last = min(next(at for at, total in path if total == path[-1][1]) for path in point.values())
            for key, path in point.items():
                moved[key] += until(path, last) - until(path, min(first, last))
    total = sum(moved.values())
    return {key: entry / total for key, entry in moved.items()} if total else {}


def address_of(worker: str) -> str:
    """Return a worker's address without its port."""
    return worker.rpartition(":")[0] or worker


def until(path: list[tuple[float, int]], end: float) -> int:
    """Return the bytes that had moved by a time."""
    return max((total for at, total in path if at <= end), default=0)
