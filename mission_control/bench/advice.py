"""What `mission incast advise` predicts for each mitigation, against its effect in the lab."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
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
MISSED = 0.1
"""Part of the cases in which an interval of nine in ten may be missed."""
NARROW = 1.5
DRAWS_MAX = 1000
"""More than enough to find settings in which incast happens."""


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
    """Settings in which incast happens, drawn evenly from these lists; with the advice."""
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
            own = {name: entry.get(name) for name in ("kind", "expected_goodput_mbit", "interval", "unknown", "value")}
            rows.append({**place, **own, "measured_mbit": found, "inside": inside(entry.get("interval"), found)})
            say(f"{number + 1} of {count}, {entry['kind']}: {'not valid' if found is None else f'{found:.1f} Mbit/s'}")
    return {"seed": seed, "rows": rows, **judged(rows)}


def inside(interval: Sequence[float] | None, found: float | None) -> bool | None:
    """``None``: nothing was predicted, or nothing measured."""
    return None if interval is None or found is None else interval[0] <= found <= interval[1]


def interval_score(interval: Sequence[float], found: float) -> float:
    """Width of a central interval, and a penalty for what lies outside (Gneiting and Raftery 2007, equation 43).

    Less is better: a narrow interval that is missed costs more than a wide one that is not.

    Args:
        interval, found: in the same unit, which is that of the score.
    """
    low, high = interval
    return high - low + 2 / MISSED * (max(0.0, low - found) + max(0.0, found - high))


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``inside`` (by kind: how many of how many), ``narrow`` (how many of how many intervals span a factor of at most
    :data:`NARROW`), ``score`` (mean interval score as a part of what was measured), ``off`` (median), ``unknown``."""
    remedies = [row for row in rows if row["value"] is not None and row["measured_mbit"] is not None]
    predicted = [row for row in remedies if row["interval"] is not None]
    kinds = {kind: [row["inside"] for row in predicted if row["kind"] == kind] for kind in advice.WHAT}
    scores = [interval_score(row["interval"], row["measured_mbit"]) / row["measured_mbit"] for row in predicted]
    offs = [abs(row["expected_goodput_mbit"] / row["measured_mbit"] - 1) for row in predicted]
    narrow = sum(row["interval"][1] <= NARROW * row["interval"][0] for row in predicted)
    return {
        "inside": {kind: [sum(own), len(own)] for kind, own in kinds.items()},
        "narrow": [narrow, len(predicted)],
        "score": fmean(scores) if scores else None,
        "off": median(offs) if offs else None,
        "unknown": len(remedies) - len(predicted),
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
        found = "not valid" if row["measured_mbit"] is None else f"{row['measured_mbit']:.1f}"
        predicted = "no prediction"
        if row["interval"] is not None:
            predicted = "{:6.1f} ({:.1f} to {:.1f})".format(row["expected_goodput_mbit"], *row["interval"])
        outside = "  outside" if row["value"] is not None and row["inside"] is False else ""
        lines.append(f"  {row['kind']:<9} {predicted:<24} {found:>9}{outside}")
    for kind, (held, count) in result["inside"].items():
        lines.append(f"{kind}: {held} of {count} inside its interval")
    narrow, count = result["narrow"]
    lines.append(
        f"{narrow} of {count} intervals span a factor of at most {NARROW}; {result['unknown']} more: no prediction"
    )
    if result["score"] is not None:
        lines.append(f"interval score, mean of parts of what was measured: {result['score']:.2f} (less is better)")
    return lines
