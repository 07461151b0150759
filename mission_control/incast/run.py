"""Runs an incast scenario's grid in its worlds and leaves `results/<id>/`: scenario, points, result, report.

A run that was interrupted goes on in its folder: points that are there are not measured again.
"""

from __future__ import annotations

import json
import secrets
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

from mission_control import interrupts
from mission_control.environment import describe
from mission_control.incast import model, report
from mission_control.incast.lab import reads_in
from mission_control.incast.points import Point, check, most_senders, points, reads
from mission_control.lab.described import lab_of, stack_of
from mission_control.scenario import BadInput, Scenario, plain, with_values

RTO_MIN_MS = 200
"""The kernel's own."""
BASE_RTT_S = 1e-4
"""Of two hosts of a lab without queues: some 60 to 150 us (docs/measurements.md)."""
MSS = 1448
"""Of an MTU of 1,500 bytes with timestamps."""
POINTS = "points.jsonl"
"""In a run's folder: a point a line, as they are measured."""

Measure = Callable[[Point, Callable[[str], None]], dict[str, Any]]
"""Measures a point, and says how far it is."""


@contextmanager
def in_model(scenario: Scenario) -> Iterator[Measure]:
    """The equations (`crates/core/src/incast.rs`); nothing is measured."""
    path = path_of(scenario)

    def measure(point: Point, say: Callable[[str], None]) -> dict[str, Any]:
        answer = model.predict(path, [point.senders], [point.fragment])
        (row,) = answer["rows"]
        return {"goodput_mbit": row["goodput_mbit"], "regime": row["regime"], "valid": True, "invalid_because": []}

    yield measure


@contextmanager
def in_lab(scenario: Scenario) -> Iterator[Measure]:
    """Synchronized reads over real sockets between namespaces."""
    size = with_values(scenario, {"topology.hosts": most_senders(scenario) + 1, **rate_of(scenario)})
    with lab_of(size) as lab, reads_in(lab) as own:

        def measure(point: Point, say: Callable[[str], None]) -> dict[str, Any]:
            asked = reads(scenario, point)

            def watch(blocks: int) -> bool:
                say(f"{blocks} of {asked.warm_up + asked.blocks} blocks")
                try:
                    interrupts.check()
                except KeyboardInterrupt:
                    return True
                return False

            return own.measure(point.senders, asked, watch=watch)

        yield measure


WORLDS = {"model": in_model, "lab": in_lab}


def rate_of(scenario: Scenario) -> dict[str, Any]:
    """Only one link is busy, so that it can have the lab's full rate, whatever the number of hosts."""
    return {"topology.link_rate": "100 Mbit/s"} if scenario.topology.link_rate == "auto" else {}


def path_of(scenario: Scenario) -> dict[str, Any]:
    """What the model is told of the lab that the scenario describes."""
    topology, stack = scenario.topology, stack_of(scenario)
    rate = 100_000_000 if topology.link_rate == "auto" else topology.link_rate
    return model.path(
        link=rate // topology.dilation,
        rtt_s=BASE_RTT_S,
        rto_s=(stack.rto_min_ms or RTO_MIN_MS) / 1e3,
        buffer=model.PAPER_003 if topology.port.switch == model.PAPER_003 else topology.port.buffer,
        mss=MSS + topology.mtu - 1500,
        initial_window=(stack.initial_window or 10) * MSS,
    )


def conduct(
    scenario: Scenario,
    worlds: Sequence[str],
    *,
    results: Path = Path("results"),
    folder: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures all points in each world; gives ``points`` (world, senders, fragment_bytes, goodput_mbit, ideal_mbit and
    more), ``onset`` of each world and fragment, ``differences`` of the worlds, and what every result has
    (docs/results.md).

    Args:
        folder: of a run that is to go on.
        say: is told what is done.

    Raises:
        BadInput: the scenario describes no incast, or there is no such world.
        Missing: what a world needs is not there.
    """
    check(scenario)
    if unknown := [world for world in worlds if world not in WORLDS]:
        raise BadInput(f"incast in {unknown[0]}: use {' or '.join(WORLDS)}, or both with a comma")
    folder = folder or results / f"{time.strftime('%Y%m%d-%H%M%S')}-incast-{secrets.token_hex(2)}"
    folder.mkdir(parents=True, exist_ok=True)
    begin(folder, scenario)
    found = list(known(folder))
    done = {(own["world"], own["senders"], own["fragment_bytes"]) for own in found}
    planned = [(world, point) for world in worlds for point in points(scenario)]
    interrupted = False
    with open(folder / POINTS, "a") as file:
        try:
            for world in worlds:
                left = [point for point in points(scenario) if (world, point.senders, point.fragment) not in done]
                if not left:
                    continue
                with WORLDS[world](scenario) as measure:
                    for point in left:
                        interrupts.check()
                        label = (
                            f"[{len(found) + 1}/{len(planned)}] {world}: {point.senders} senders, {point.fragment} B"
                        )
                        told = measure(point, partial(labelled, say, label))
                        interrupts.check()
                        own = {"world": world, "senders": point.senders, "fragment_bytes": point.fragment}
                        found.append({**own, "asked_bytes": point.asked, **told})
                        file.write(json.dumps(found[-1]) + "\n")
                        file.flush()
        except KeyboardInterrupt:
            interrupted = True
    result = summary(scenario, found, worlds)
    result.update({"interrupted": interrupted, "results": str(folder), "environment": describe(scenario.workload.seed)})
    result["ok"] = not interrupted and all(result["checks"].values())
    (folder / "result.json").write_text(json.dumps(result))
    report.write(folder)
    return result


def labelled(say: Callable[[str], None], label: str, text: str) -> None:
    say(f"{label}: {text}")


def begin(folder: Path, scenario: Scenario) -> None:
    """
    Raises:
        BadInput: the folder is that of another scenario.
    """
    path = folder / "scenario.toml"
    if path.exists() and tomllib.loads(path.read_text()) != plain(scenario):
        raise BadInput(f"{folder} was made from another scenario: go on with the one that began, or begin a new run")
    path.write_bytes(tomli_w.dumps(plain(scenario)).encode())


def known(folder: Path) -> Iterator[dict[str, Any]]:
    """Points that were measured before; the last line may have been cut off."""
    path = folder / POINTS
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            return


def summary(scenario: Scenario, found: list[dict[str, Any]], worlds: Sequence[str]) -> dict[str, Any]:
    """What the points say together."""
    path = path_of(scenario)
    rate_mbit = path["link_bits_per_sec"] / 1e6
    for own in found:
        bits = own["senders"] * own["fragment_bytes"] * 8
        own["ideal_mbit"] = bits / (path["rtt_s"] + bits / rate_mbit / 1e6) / 1e6
    checks = {}
    for own in found:
        if own.get("ended"):
            checks[f"{own['world']}, {own['senders']} senders, {own['fragment_bytes']} B: {own['ended']}"] = False
    return {
        "world": ",".join(worlds),
        "points": found,
        "onset": onsets(found, path["rto_s"]),
        "differences": differences(found),
        "checks": {"every point was measured": bool(found), **checks},
        "valid": all(own["valid"] for own in found),
        "invalid_because": [
            f"{own['senders']} senders, {own['fragment_bytes']} B: {why}"
            for own in found
            for why in own["invalid_because"]
        ],
        "errors": {},
        "jobs": [],
    }


def onsets(found: list[dict[str, Any]], rto_s: float) -> list[dict[str, Any]]:
    """Of each world and fragment the smallest number of senders whose median block takes longer than the ideal one by
    half an RTO; the model's is where it says so. ``None``: none of those measured."""
    told = []
    for world, asked in sorted({(own["world"], own["asked_bytes"]) for own in found}):
        series = [own for own in found if (own["world"], own["asked_bytes"]) == (world, asked)]
        late = [own["senders"] for own in series if own["valid"] and collapsed(own, rto_s)]
        told.append({"world": world, "asked_bytes": asked, "senders": min(late, default=None)})
    return told


def collapsed(own: dict[str, Any], rto_s: float) -> bool:
    if "regime" in own:
        return bool(own["regime"] == "collapsed")
    if not own.get("blocks"):
        return True  # not one block ended within the time
    ideal_s = own["senders"] * own["fragment_bytes"] * 8 / own["ideal_mbit"] / 1e6
    return median(own["blocks"]) > ideal_s + rto_s / 2


def differences(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each point the model's goodput against the lab's, as a part of the lab's."""
    lab = {(own["senders"], own["fragment_bytes"]): own for own in found if own["world"] == "lab" and own["valid"]}
    told = []
    for own in found:
        there = lab.get((own["senders"], own["fragment_bytes"]))
        if own["world"] == "model" and there and there["goodput_mbit"]:
            part = own["goodput_mbit"] / there["goodput_mbit"] - 1
            told.append({"senders": own["senders"], "fragment_bytes": own["fragment_bytes"], "part": part})
    return told
