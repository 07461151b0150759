"""Advice on incast, from parameters or from a run, with the commands to type."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mission_control import _native
from mission_control.errors import BadInput
from mission_control.experiments.engine import SCENARIO
from mission_control.experiments.points import variants_of
from mission_control.experiments.result import load
from mission_control.incast import lines, quantities
from mission_control.incast.points import path_of
from mission_control.scenario import validate

RTO_FLOOR_S = 0.01
"""Effective minimum RTO of a kernel with 250 ticks a second if 5 ms or less are configured (FACTS)."""
FITTED_BITS_PER_SEC = 1_000_000_000
"""Ten times the rate at which the model was fitted (docs/measurements/incast-model.md); no higher rate was compared."""
WHAT = {
    "flows": "Fewer senders at once: {0:.0f}",
    "rto-min": "A shorter minimum RTO: {0:.0f} ms",
    "dctcp": "DCTCP, with switches that mark from {1} on",
    "buffer": "A switch with {1} for the port",
    "window": "A receive window of {1} for each connection",
}


@dataclass(frozen=True)
class Case:
    """The subject of the advice.

    Args:
        bytes: bytes of each sender for a block, or of all senders together if ``total``.
        path: as :func:`mission_control.incast.model.path` makes it.
    """

    senders: int
    bytes: int
    path: dict[str, Any]
    total: bool = False


def advise(case: Case) -> dict[str, Any]:
    """Give ``bites`` (goodput collapses), ``onset`` (value, low, high), ``goodput_mbit`` and ``ideal_mbit`` without a
    mitigation; ``remedies``, the mitigations, best first: ``what``, ``expected_goodput_mbit`` and ``interval`` (which
    contains it in nine cases of ten), or ``unknown`` if there is no prediction, ``lines`` (commands to type) and
    ``refused_here`` (those that this machine's kernel does not accept, and why); ``warnings``.

    Raises:
        BadInput: the path or the number of senders is impossible.
    """
    form = json.dumps({"total" if case.total else "fragment": case.bytes})
    try:
        result: dict[str, Any] = json.loads(_native.incast_advise(json.dumps(case.path), form, case.senders))
    except ValueError as error:
        raise BadInput(str(error)) from None
    result["remedies"] = [remedy(entry) for entry in result["remedies"]]
    typed = [line for entry in result["remedies"] for line in entry["lines"]] if result["bites"] else []
    refused = lines.refused(typed)
    for entry in result["remedies"]:
        entry["refused_here"] = {line: why for line, why in refused.items() if line in entry["lines"]}
    result["onset"].pop("bytes")
    result["warnings"] = []
    if case.path["rto_s"] < RTO_FLOOR_S:
        asked, floor = case.path["rto_s"] * 1e3, RTO_FLOOR_S * 1e3
        result["warnings"].append(
            f"a minimum RTO of {asked:g} ms is some {floor:g} ms in effect: kernels count in ticks"
        )
    if case.path["link_bits_per_sec"] > FITTED_BITS_PER_SEC:
        result["warnings"].append(
            "the model was fitted at 100 Mbit/s, where long blocks hide a timeout now and then; at this rate one costs "
            "many blocks: compare with `mission incast measure`"
        )
    return result


def remedy(own: dict[str, Any]) -> dict[str, Any]:
    kind, value = own["kind"], own["value"]
    shown = value * 1e3 if kind == "rto-min" else value
    own_lines = lines.of(kind, value)
    return {
        "what": WHAT[kind].format(shown, quantities.size(round(value))),
        "kind": kind,
        "value": value,
        **promise_of(own),
        "lines": own_lines,
    }


def promise_of(own: dict[str, Any]) -> dict[str, Any]:
    if (promise := own["promise"]) is None:
        return {"unknown": own["unknown"]}
    ends = [promise["low_mbit"], promise["high_mbit"]]
    return {"expected_goodput_mbit": promise["expected_mbit"], "interval": ends}


def of_run(folder: Path) -> Case:
    """Make the case of a run: its largest incast. For a job's shuffle: one receiver and all other hosts.

    Raises:
        BadInput: the folder is no run, or its network is not known.
    """
    result = load(folder)
    try:
        described = validate(tomllib.loads((folder / SCENARIO).read_text()))
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder} is no run of one scenario: name a folder results/<id> ({error})") from None
    points: list[Any] = result.points
    if reads := [point for point in points if hasattr(point, "fragment_bytes")]:
        worst = max(reads, key=lambda point: point.senders * point.fragment_bytes)
        # The predictions were fitted to persistent connections.
        path = {**path_of(variants_of(described)[worst.variant]), "fresh": False}
        return Case(worst.senders, worst.fragment_bytes, path)
    if result.world != "lab":
        raise BadInput(f"{folder} ran in {result.world}: its links are not known; use a run in the lab")
    shuffles = [
        transfer
        for point in points
        for job in point.jobs
        for transfer in job.transfers
        if transfer.pattern in ("shuffle", "gather")
    ]
    if not shuffles:
        raise BadInput(f"{folder} has no shuffle and no gather: there is no incast in it")
    # Only the ports of hosts with workers; the last host is the scheduler's.
    rates = [
        port["settings"]["bytes_per_second"] for port in points[0].ports if not re.fullmatch(r"s\d+", port["port"])
    ]
    hosts = len(rates) - 1
    if hosts < 2:
        raise BadInput(f"{folder} ran on one host: nothing crossed its network")
    largest = max(shuffle.bytes for shuffle in shuffles)
    path = {**path_of(described), "link_bits_per_sec": min(rates) * 8}
    return Case(hosts - 1, max(1, largest // hosts // (hosts - 1)), path)
