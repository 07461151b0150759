"""What `mission incast advise` promises of each remedy, against what the remedy does in the lab."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from mission_control import interrupts
from mission_control.bench.incast import ATTEMPTS, LINK, asked_to_end
from mission_control.incast import advice, model, quantities
from mission_control.incast.lab import reads_in
from mission_control.incast.points import BASE_RTT_S, MSS
from mission_control.incast.reads import Reads
from mission_control.lab import Lab, Port, star
from mission_control.lab.stack import PROFILES, Stack

RTO_MS = 200
BLOCKS, WARM_UP, DEADLINE_S = 40, 8, 60.0
DRAWS_MAX = 1000
"""More than enough to find settings in which incast bites."""


@dataclass(frozen=True)
class Setting:
    """A cluster that asks for advice."""

    profile: str
    senders: int
    buffer: int
    fragment: int

    def case(self) -> advice.Case:
        stack = PROFILES[self.profile]
        window = (stack.initial_window or 10) * MSS
        path = model.path(LINK, BASE_RTT_S, RTO_MS / 1e3, self.buffer, MSS, window, stack.sack)
        return advice.Case(self.senders, self.fragment, path)


def drawn(count: int, seed: int) -> Iterator[tuple[Setting, dict[str, Any]]]:
    """Settings in which incast bites, drawn evenly from these lists; with the advice."""
    chance = random.Random(seed)
    for _ in range(DRAWS_MAX):
        setting = Setting(
            profile=chance.choice(["modern", "2009"]),
            senders=chance.choice([8, 12, 16, 24, 32, 47]),
            buffer=chance.choice([16, 32, 64, 96, 128]) << 10,
            fragment=chance.choice([16, 32, 64, 128, 256]) * 1000,
        )
        result = advice.advise(setting.case())
        if result["bites"]:
            yield setting, result
            count -= 1
        if count == 0:
            return


def applied(setting: Setting, remedy: dict[str, Any] | None) -> tuple[Stack, Port, Reads]:
    """What is built and asked for where a remedy is applied; ``None``: as it is."""
    stack, port = replace(PROFILES[setting.profile], rto_min_ms=RTO_MS), Port(buffer_bytes=setting.buffer)
    reads = Reads(fragment=setting.fragment, blocks=BLOCKS, warm_up=WARM_UP, deadline_s=DEADLINE_S)
    kind, value = (remedy["kind"], remedy["value"]) if remedy else ("", 0.0)
    if kind == "flows":
        reads = replace(reads, concurrent=round(value))
    elif kind == "rto-min":
        stack = replace(stack, rto_min_ms=round(value * 1e3))
    elif kind == "dctcp":
        port = replace(port, ecn_bytes=round(value))
        stack = replace(stack, congestion_control="dctcp")  # of both ends: ECN is agreed on by the first packets
    elif kind == "buffer":
        port = replace(port, buffer_bytes=round(value))
    elif kind == "window":
        stack = replace(stack, window=round(value))
    return stack, port, reads


def measured(setting: Setting, remedy: dict[str, Any] | None) -> float | None:
    """Goodput in Mbit/s; ``None``: the machine was too slow."""
    stack, port, reads = applied(setting, remedy)
    with (
        Lab(star(setting.senders + 1, LINK, port=port), f"advice-{secrets.token_hex(2)}", stack) as lab,
        reads_in(lab) as own,
    ):
        for _ in range(ATTEMPTS):
            result = own.measure(setting.senders, reads, watch=asked_to_end)
            interrupts.check()
            if result["valid"]:
                return float(result["goodput_mbit"])
    return None


def bench(count: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Of each setting its goodput as the model has it and as it is, and each remedy's interval and goodput."""
    rows = []
    for number, (setting, result) in enumerate(drawn(count, seed)):
        place = {"setting": number + 1, **asdict(setting)}
        low = high = result["goodput_mbit"]
        as_it_is = {"kind": "as it is", "expected_goodput_mbit": low, "interval": [low, high]}
        for entry in (as_it_is, *result["remedies"]):
            remedy = entry if "value" in entry else None
            found = measured(setting, remedy)
            within = found is not None and entry["interval"][0] <= found <= entry["interval"][1]
            kept = {name: entry[name] for name in ("kind", "expected_goodput_mbit", "interval")}
            rows.append({**place, **kept, "value": entry.get("value"), "measured_mbit": found, "inside": within})
            say(f"{number + 1} of {count}, {entry['kind']}: {'not valid' if found is None else f'{found:.1f} Mbit/s'}")
    remedies = [row for row in rows if row["value"] is not None and row["measured_mbit"] is not None]
    inside = {kind: [row["inside"] for row in remedies if row["kind"] == kind] for kind in advice.WHAT}
    return {
        "seed": seed,
        "rows": rows,
        "inside": {kind: [sum(entry), len(entry)] for kind, entry in inside.items()},
        "off": median(abs(row["expected_goodput_mbit"] / row["measured_mbit"] - 1) for row in remedies)
        if remedies
        else None,
    }


def summary(result: dict[str, Any]) -> Sequence[str]:
    """In lines."""
    lines = []
    for row in result["rows"]:
        if row["value"] is None:
            place = (
                f"{row['senders']} senders of {quantities.size(row['fragment'])} at {quantities.size(row['buffer'])}"
            )
            lines.append(f"{row['setting']}: {row['profile']}, {place}")
        low, high = row["interval"]
        found = "not valid" if row["measured_mbit"] is None else f"{row['measured_mbit']:.1f}"
        promised = f"{row['expected_goodput_mbit']:6.1f} ({low:.1f} to {high:.1f})"
        outside = "  outside" if row["value"] is not None and not row["inside"] else ""
        lines.append(f"  {row['kind']:<9} {promised:<24} {found:>9}{outside}")
    for kind, (inside, count) in result["inside"].items():
        lines.append(f"{kind}: {inside} of {count} inside its interval")
    return lines
