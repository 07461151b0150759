"""Prometheus metrics, on the page `/metrics` that Dask's scheduler has already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "mission_control"


class Metrics(Collector):
    """Jobs and transfers as of each scrape; nothing is computed between scrapes.

    Args:
        status: gives what ``MissionControlScheduler.status`` gives.
    """

    def __init__(self, status: Callable[[], dict[str, Any]]):
        self.status = status

    def describe(self) -> Iterator[Metric]:
        """Nothing is known before a scheduler runs."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        status = self.status()
        objects = GaugeMetricFamily(f"{PREFIX}_objects", "Objects that some result carries.")
        objects.add_metric([], status["objects"])
        yield objects
        failing = GaugeMetricFamily(f"{PREFIX}_policy_failing", "1 while a policy in Python raises, stalls or errs.")
        failing.add_metric([], 1 if status["policy_error"] else 0)
        yield failing
        weight = GaugeMetricFamily(f"{PREFIX}_job_weight", "Part of the network; 0: not active.", labels=["job"])
        flows = GaugeMetricFamily(f"{PREFIX}_job_flows", "Most flows on each host.", labels=["job"])
        recomputed = CounterMetricFamily(f"{PREFIX}_job_recomputed", "Results lost with their objects.", labels=["job"])
        labels = ["job", "source", "destination", "pattern"]
        asked = CounterMetricFamily(f"{PREFIX}_transfer_asked_bytes", "Bytes asked for.", labels=labels)
        served = CounterMetricFamily(f"{PREFIX}_transfer_served_bytes", "Bytes that arrived.", labels=labels)
        carried = CounterMetricFamily(
            f"{PREFIX}_transfer_carried_bytes", "Bytes that a transport carried.", labels=[*labels, "transport"]
        )
        again = CounterMetricFamily(
            f"{PREFIX}_transfer_ranges_again", "Ranges asked for again.", labels=[*labels, "reason"]
        )
        now = GaugeMetricFamily(f"{PREFIX}_transfer_flows", "Flows under way.", labels=labels)
        for job in status["jobs"]:
            weight.add_metric([job["job"]], job["weight"] or 0)
            flows.add_metric([job["job"]], job["flows"] or 0)
            recomputed.add_metric([job["job"]], job["recomputed"])
            for transfer in job["transfers"]:
                values = [job["job"], transfer["from"], transfer["to"], transfer["pattern"]]
                asked.add_metric(values, transfer["asked_bytes"])
                served.add_metric(values, transfer["served_bytes"])
                now.add_metric(values, transfer["flows"])
                for transport, count in transfer["transport"]["bytes"].items():
                    carried.add_metric([*values, transport], count)
                for reason in ("refetches", "resumed", "busy"):
                    again.add_metric([*values, reason], transfer[reason])
        yield from (weight, flows, recomputed, asked, served, carried, again, now)

    def register(self) -> None:
        REGISTRY.register(self)

    def unregister(self) -> None:
        REGISTRY.unregister(self)
