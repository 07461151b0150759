"""Prometheus metrics, on the page `/metrics` of Dask's scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ClassVar

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from tornado.ioloop import IOLoop

PREFIX = "mission_control"
STATUS_WAIT_S = 0.5
"""Seconds to wait for a scheduler whose event loop runs in another thread; without an answer this scrape omits it."""


class Metrics:
    """Metrics that one scheduler adds to its process, current at each scrape.

    Args:
        address: of the scheduler; the label `scheduler`, since a process may run several clusters.
        loop: the event loop on which ``status`` has to run.
        status: ``MissionControlScheduler.status``.
    """

    def __init__(self, address: str, loop: IOLoop, status: Callable[[], dict[str, Any]]):
        self.address = address
        self.loop = loop
        self.status = status

    def now(self) -> dict[str, Any] | None:
        """Return the status; ``None`` if the scheduler's event loop did not answer in time."""
        if asyncio._get_running_loop() is getattr(self.loop, "asyncio_loop", None):
            return self.status()
        answer: Future[dict[str, Any]] = Future()

        def run() -> None:
            try:
                answer.set_result(self.status())
            except Exception as error:
                answer.set_exception(error)

        self.loop.add_callback(run)
        with suppress(TimeoutError):
            return answer.result(STATUS_WAIT_S)
        return None

    def register(self) -> None:
        if not _Schedulers.all:
            REGISTRY.register(_Schedulers.collector)
        _Schedulers.all.append(self)

    def unregister(self) -> None:
        if self in _Schedulers.all:
            _Schedulers.all.remove(self)
            if not _Schedulers.all:
                REGISTRY.unregister(_Schedulers.collector)


class _Schedulers(Collector):
    """Collects for all schedulers of this process: Prometheus allows each metric once on a page."""

    all: ClassVar[list[Metrics]] = []
    collector: ClassVar[_Schedulers]

    def describe(self) -> Iterator[Metric]:
        """Describe no metrics, because none are known before a scheduler runs."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        found = [(metrics.address, metrics.now()) for metrics in list(self.all)]
        return families([(address, status) for address, status in found if status is not None])


_Schedulers.collector = _Schedulers()


def workers_of(status: dict[str, Any]) -> list[dict[str, Any]]:
    return list(status["workers"].values())


def families(statuses: list[tuple[str, dict[str, Any]]]) -> Iterator[Metric]:
    """Return every metric once, with the values of all schedulers."""
    labels = ["scheduler"]
    objects = GaugeMetricFamily(f"{PREFIX}_objects", "Objects that a result carries.", labels=labels)
    limited = GaugeMetricFamily(
        f"{PREFIX}_workers_limited", "Workers without a data plane, or that lack a part of it.", labels=labels
    )
    failing = GaugeMetricFamily(
        f"{PREFIX}_policy_failing", "1 while a policy in Python raises, stalls or errs.", labels=labels
    )
    off = GaugeMetricFamily(
        f"{PREFIX}_parts_off", "Parts of Mission Control that an error switched off, and lost callbacks.", labels=labels
    )
    memory = GaugeMetricFamily(
        f"{PREFIX}_worker_memory_bytes",
        "live: objects and fetched parts; kept: free memory for reuse, returned after 10 s without use (of a slab "
        "of 64 MiB, once all of it is free); spooled: on disk.",
        labels=["scheduler", "worker", "kind"],
    )
    labels = ["scheduler", "job"]
    weight = GaugeMetricFamily(f"{PREFIX}_job_weight", "Share of the network, 0 to 1; 0: not active.", labels=labels)
    flows = GaugeMetricFamily(f"{PREFIX}_job_flows", "The share in flows of each host.", labels=labels)
    recomputed = CounterMetricFamily(f"{PREFIX}_job_recomputed", "Results lost with their objects.", labels=labels)
    labels = ["scheduler", "job", "source", "destination", "pattern"]
    asked = CounterMetricFamily(f"{PREFIX}_transfer_asked_bytes", "Bytes requested.", labels=labels)
    served = CounterMetricFamily(f"{PREFIX}_transfer_served_bytes", "Bytes that arrived.", labels=labels)
    carried = CounterMetricFamily(
        f"{PREFIX}_transfer_carried_bytes", "Bytes carried, by transport.", labels=[*labels, "transport"]
    )
    again = CounterMetricFamily(f"{PREFIX}_transfer_ranges_again", "Ranges fetched again.", labels=[*labels, "reason"])
    now = GaugeMetricFamily(f"{PREFIX}_transfer_flows", "Active flows.", labels=labels)
    own_weight = GaugeMetricFamily(
        f"{PREFIX}_transfer_weight", "Share of the network, 0 to 1; 0: not active.", labels=labels
    )
    own_flows = GaugeMetricFamily(f"{PREFIX}_transfer_share_flows", "The share in flows of each host.", labels=labels)
    for address, status in statuses:
        objects.add_metric([address], status["objects"])
        limited.add_metric([address], len(status["without"]) + sum(bool(own["problems"]) for own in workers_of(status)))
        failing.add_metric([address], 1 if status["policy_error"] else 0)
        off.add_metric([address], len(status["off"]))
        for worker, own in status["workers"].items():
            for kind, count in own["memory"].items():
                memory.add_metric([address, worker, kind], count)
        for job in status["jobs"]:
            weight.add_metric([address, job["job"]], job["weight"] or 0)
            flows.add_metric([address, job["job"]], job["flows"] or 0)
            recomputed.add_metric([address, job["job"]], job["recomputed"])
            if (earlier := job["earlier"])["transfers"]:
                # So that sums over a job's transfers only grow.
                values = [address, job["job"], "earlier transfers", "", ""]
                asked.add_metric(values, earlier["asked_bytes"])
                served.add_metric(values, earlier["served_bytes"])
                for transport, count in job["earlier_reported"]["transport"]["bytes"].items():
                    carried.add_metric([*values, transport], count)
                for reason in ("refetches", "resumed", "busy"):
                    again.add_metric([*values, reason], job["earlier_reported"][reason])
            for transfer in job["transfers"]:
                values = [address, job["job"], transfer["from"], transfer["to"], transfer["pattern"]]
                asked.add_metric(values, transfer["asked_bytes"])
                served.add_metric(values, transfer["served_bytes"])
                now.add_metric(values, transfer["flows_now"])
                own_weight.add_metric(values, transfer["weight"] or 0)
                own_flows.add_metric(values, transfer["flows"] or 0)
                for transport, count in transfer["transport"]["bytes"].items():
                    carried.add_metric([*values, transport], count)
                for reason in ("refetches", "resumed", "busy"):
                    again.add_metric([*values, reason], transfer[reason])
    yield from (objects, limited, failing, off, memory, weight, flows, recomputed)
    yield from (asked, served, carried, again, now, own_weight, own_flows)
