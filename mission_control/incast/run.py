"""Runs an incast scenario's grid in its worlds and leaves `results/<id>/`: scenario, points, result, report.

A run that was interrupted goes on in its folder: points that are there are not measured again.
"""

from __future__ import annotations

import itertools
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
from mission_control.incast import model, quantities, report, statistics
from mission_control.incast.lab import reads_in
from mission_control.incast.points import (
    ONE_FLOW,
    Point,
    check,
    link_rate,
    most_senders,
    points,
    reads,
    rto_min_asked,
    rto_min_us,
)
from mission_control.lab import Lab
from mission_control.lab.described import lab_of, stack_of
from mission_control.lab.events import dilated
from mission_control.scenario import BadInput, PrerequisiteMissing, Scenario, plain, with_values
from mission_control.study import ONLY

BASE_RTT_S = 1e-4
"""Of two hosts of a lab without queues: some 60 to 150 us (docs/measurements.md)."""
MSS, HEADERS = 1448, 66
"""Of a frame with an MTU of 1,500 bytes: payload, and Ethernet, IP, TCP with timestamps."""
ATTEMPTS = 2
"""At a point: one that was measured while the processors were full is measured again."""
POINTS, RESULT = "points.jsonl", "result.json"
"""In a run's folder: a point a line, as they are measured; and all of it, which its report is drawn from."""

Measure = Callable[[Point, Callable[[str], None]], dict[str, Any]]
"""Measures a point, and says how far it is."""


@contextmanager
def in_model(scenario: Scenario) -> Iterator[Measure]:
    """The equations (`crates/core/src/incast.rs`); nothing is measured."""
    path = path_of(scenario)
    # Figure 4 of paper 000 was measured with one segment at first.
    paper = {**path, "initial_window": MSS}

    def measure(point: Point, say: Callable[[str], None]) -> dict[str, Any]:
        (row,) = model.predict(path, [point.senders], [point.fragment])["rows"]
        (printed,) = model.predict(paper, [point.senders], [point.fragment], equations="paper")["rows"]
        result = {"goodput_mbit": row["goodput_mbit"], "regime": row["regime"], "paper_mbit": printed["goodput_mbit"]}
        return {**result, "valid": True, "invalid_because": []}

    yield measure


@contextmanager
def in_lab(scenario: Scenario) -> Iterator[Measure]:
    """Synchronized reads over real sockets between namespaces."""
    values = {"topology.hosts": most_senders(scenario) + 1, "topology.link_rate": f"{link_rate(scenario)} bit/s"}
    if scenario.control.transport == "dctcp":
        # Of both ends, and before they are connected: ECN is agreed on by the first packets.
        values["stack.congestion_control"] = "dctcp"
    size = with_values(scenario, values)
    events = dilated(scenario.topology)
    with lab_of(size) as lab, reads_in(lab) as own:
        for event in events:
            lab.link_of(event.host or lab.topology.hosts[0], event.path)  # refuses what is not there
        set_up(lab, scenario)

        def measure(point: Point, say: Callable[[str], None]) -> dict[str, Any]:
            asked = reads(scenario, point)

            def watch(blocks: int) -> bool:
                say(f"{blocks} of {asked.warm_up + asked.blocks} blocks")
                try:
                    interrupts.check()
                except KeyboardInterrupt:
                    return True
                return False

            try:
                calm = point == ONE_FLOW
                result = own.measure(point.senders, asked, watch=watch, events=() if calm else events)
                return {**result, "rto_min": statistics.rto_min(result["flows"], rto_min_asked(scenario))}
            finally:
                if events:
                    set_up(lab, scenario)

        yield measure


def set_up(lab: Lab, scenario: Scenario) -> None:
    """Gives links and ports what the scenario says, whatever events have made of them."""
    rates, slow = scenario.workload.sender_rate, scenario.topology.dilation
    changed = {event.host for event in scenario.topology.events if event.do == "rate"}
    for number, host in enumerate(lab.topology.hosts):
        if number and rates:
            lab.slow(host, rates[(number - 1) % len(rates)] // slow)
        elif host in changed:
            lab.slow(host, lab.link_of(host).bits_per_second)
    if scenario.topology.events:
        lab.resize(lab.topology.port.buffer_bytes)
        lab.mark(lab.topology.port.ecn_bytes)


WORLDS = {"model": in_model, "lab": in_lab}


def path_of(scenario: Scenario) -> dict[str, Any]:
    """What the model is told of the lab that the scenario describes."""
    topology, stack = scenario.topology, stack_of(scenario)
    return model.path(
        link=link_rate(scenario) // topology.dilation,
        rtt_s=BASE_RTT_S,
        rto_s=rto_min_us(scenario) / 1e6,
        buffer=model.PAPER_003 if topology.port.switch == model.PAPER_003 else topology.port.buffer,
        mss=MSS + topology.mtu - 1500,
        initial_window=(stack.initial_window or 10) * MSS,
        sack=stack.sack,
    )


def conduct(
    scenario: Scenario,
    worlds: Sequence[str],
    *,
    results: Path = Path("results"),
    folder: Path | None = None,
    labs: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures all points of each variant in each world; gives ``points`` (world, variant, senders, fragment_bytes,
    goodput_mbit, ideal_mbit and more), ``onset`` of each curve, ``differences`` of the worlds, and what every result
    has (docs/results.md).

    Args:
        folder: of a run that is to go on.
        labs: that run at the same time, this one among them: for the record.
        say: is told what is done.

    Raises:
        BadInput: the scenario describes no incast, or there is no such world.
        PrerequisiteMissing: what a world needs is not there.
    """
    variants = accepted(scenario)
    if unknown := [world for world in worlds if world not in WORLDS]:
        raise BadInput(f"incast in {unknown[0]}: use {' or '.join(WORLDS)}, or both with a comma")
    folder = folder or results / f"{time.strftime('%Y%m%d-%H%M%S')}-incast-{secrets.token_hex(2)}"
    begin(folder, scenario)
    # A line that was cut off is not gone on with, nor what is not valid.
    found = [entry for entry in known(folder) if entry["valid"]]
    (folder / POINTS).write_text("".join(json.dumps(entry) + "\n" for entry in found))
    done = {key(entry) for entry in found}
    count = len(worlds) * sum(len(list(points(entry))) for entry in variants.values())
    interrupted = False
    with open(folder / POINTS, "a") as file:
        try:
            for world, (variant, entry) in itertools.product(worlds, variants.items()):
                left = [at for at in points(entry) if (world, variant, at.senders, at.fragment) not in done]
                if not left:
                    continue
                with WORLDS[world](entry) as measure:
                    wanted = entry.expect.goodput_of_one_flow_min if world == "lab" else None
                    one_flow = long_flow(measure, say) if wanted else None
                    for at in left:
                        interrupts.check()
                        place: dict[str, Any] = {"world": world, "variant": variant, "senders": at.senders}
                        place |= {"fragment_bytes": at.fragment, "asked_bytes": at.asked}
                        label = f"[{len(found) + 1}/{count}] {name_of(place)}"
                        outcome = measured(measure, at, partial(labelled, say, label))
                        if one_flow:
                            outcome["one_flow_mbit"] = one_flow
                        found.append({**place, **outcome})
                        file.write(json.dumps(found[-1]) + "\n")
                        file.flush()
        except KeyboardInterrupt:
            interrupted = True
    # What was not valid when the run began was measured last.
    order = [
        (*of, at.senders, at.fragment) for of in itertools.product(WORLDS, variants) for at in points(variants[of[1]])
    ]
    found.sort(key=lambda entry: order.index(key(entry)))
    result = summary(variants, found, worlds)
    result.update({"interrupted": interrupted, "results": str(folder), "environment": describe(scenario.workload.seed)})
    result["environment"]["labs_at_once"] = labs
    result["study"] = scenario.study.model_dump()
    result["ok"] = not interrupted and all(result["checks"].values())
    # At once: the report of a whole folder may be drawn meanwhile.
    (folder / f"{RESULT}.new").write_text(json.dumps(result))
    (folder / f"{RESULT}.new").replace(folder / RESULT)
    report.write(folder)
    return result


def worlds_of(scenario: Scenario) -> list[str]:
    """Where it runs unless told otherwise; the model costs nothing and is always drawn."""
    return ["model"] if scenario.world == "model" else ["model", "lab"]


def accepted(scenario: Scenario) -> dict[str, Scenario]:
    """Its variants.

    Raises:
        BadInput: the scenario describes no incast, or asks for what is not done.
    """
    study = scenario.study
    if study.repeat > 1 or study.vary or any(entry.ratio_min or entry.ratio_max for entry in study.compare):
        raise BadInput("incast takes no study.repeat, study.vary and ratios: its grid is in [workload]")
    variants = variants_of(scenario)
    for variant in variants.values():
        check(variant)
    return variants


def variants_of(scenario: Scenario) -> dict[str, Scenario]:
    """What is compared, by name; the scenario itself where nothing is.

    Raises:
        BadInput: a variant does not fit.
    """
    return {entry.name: with_values(scenario.alone, entry.set) for entry in scenario.study.compare or (ONLY,)}


def key(point: dict[str, Any]) -> tuple[str, str, int, int]:
    """Of a point in its run."""
    return point["world"], point["variant"], point["senders"], point["fragment_bytes"]


def measured(measure: Measure, point: Point, say: Callable[[str], None]) -> dict[str, Any]:
    """A point, again where it is not valid; the last attempt is what there is."""
    for attempt in range(ATTEMPTS):
        result = measure(point, say)
        interrupts.check()
        if result["valid"]:
            break
        if attempt + 1 < ATTEMPTS:
            say(f"is measured again: {'; '.join(result['invalid_because'])}")
    return result


def long_flow(measure: Measure, say: Callable[[str], None]) -> float:
    """Goodput of one long flow, in Mbit/s.

    Raises:
        PrerequisiteMissing: it could not be measured, and nothing can be said of its part.
    """
    result = measured(measure, ONE_FLOW, say)
    if result["ended"] or not result["valid"] or not result["goodput_mbit"]:
        why = result["ended"] or "; ".join(result["invalid_because"])
        raise PrerequisiteMissing(f"what one long flow gets could not be measured: {why}")
    return float(result["goodput_mbit"])


def labelled(say: Callable[[str], None], label: str, text: str) -> None:
    say(f"{label}: {text}")


def begin(folder: Path, scenario: Scenario) -> None:
    """
    Raises:
        BadInput: the folder is that of another scenario, or of something else.
    """
    path = folder / "scenario.toml"
    if folder.exists() and not path.exists():
        raise BadInput(f"{folder} has no scenario.toml: name the folder of a run to go on with")
    folder.mkdir(parents=True, exist_ok=True)
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


def summary(variants: dict[str, Scenario], found: list[dict[str, Any]], worlds: Sequence[str]) -> dict[str, Any]:
    """What the points say together."""
    checks = {}
    for entry in found:
        path = path_of(variants[entry["variant"]])
        bits = entry["senders"] * entry["fragment_bytes"] * 8
        entry["rto_s"] = path["rto_s"]
        entry["dilation"] = variants[entry["variant"]].topology.dilation
        wire_s = bits * (1 + HEADERS / path["mss"]) / path["link_bits_per_sec"]
        entry["ideal_mbit"] = bits / (path["rtt_s"] + wire_s) / 1e6
        if entry.get("ended"):
            checks[f"{name_of(entry)}: {entry['ended']}"] = False
        wanted = variants[entry["variant"]].expect.goodput_of_one_flow_min
        if wanted and entry["world"] == "lab":
            part = (entry["goodput_mbit"] or 0) / entry["one_flow_mbit"]
            checks[f"{name_of(entry)}: {part:.1%} of one long flow's goodput, at least {wanted:.0%}"] = part >= wanted
    return {
        "world": ",".join(worlds),
        "points": found,
        "onset": onsets(found),
        "differences": differences(found),
        "checks": {"every point was measured": bool(found), **checks},
        "valid": all(entry["valid"] for entry in found),
        "invalid_because": [f"{name_of(entry)}: {why}" for entry in found for why in entry["invalid_because"]],
        "errors": {},
        "jobs": [],
    }


def name_of(own: dict[str, Any]) -> str:
    words = [own["world"], own["variant"], f"{own['senders']} senders", quantities.size(own["fragment_bytes"])]
    return ", ".join(filter(None, words))


def onsets(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each curve the smallest number of senders whose median block takes longer than the ideal one by half an RTO;
    the model's is where it says so. ``None``: none of those measured."""
    result = []
    for world, variant, asked in dict.fromkeys(
        (entry["world"], entry["variant"], entry["asked_bytes"]) for entry in found
    ):
        curve = [
            entry
            for entry in found
            if (entry["world"], entry["variant"], entry["asked_bytes"]) == (world, variant, asked)
        ]
        late = [entry["senders"] for entry in curve if entry["valid"] and collapsed(entry)]
        result.append({"world": world, "variant": variant, "asked_bytes": asked, "senders": min(late, default=None)})
    return result


def collapsed(own: dict[str, Any]) -> bool:
    if "regime" in own:
        return bool(own["regime"] == "collapsed")
    if not own.get("blocks"):
        return True  # not one block ended within the time
    ideal_s = own["senders"] * own["fragment_bytes"] * 8 / own["ideal_mbit"] / 1e6
    return median(own["blocks"]) > ideal_s + own["rto_s"] / 2


def differences(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each point the model's goodput against the lab's, as a part of the lab's."""
    lab = {key(entry)[1:]: entry for entry in found if entry["world"] == "lab" and entry["valid"]}
    result = []
    for entry in found:
        there = lab.get(key(entry)[1:])
        if entry["world"] == "model" and there and there["goodput_mbit"]:
            part = entry["goodput_mbit"] / there["goodput_mbit"] - 1
            place = {name: entry[name] for name in ("variant", "senders", "fragment_bytes")}
            result.append({**place, "part": part})
    return result
