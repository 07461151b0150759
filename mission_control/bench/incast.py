"""The model's onset of incast against the lab's, for settings that chance draws."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from mission_control import interrupts
from mission_control.incast import model
from mission_control.incast.lab import ReadsInLab, reads_in
from mission_control.incast.points import BASE_RTT_S, HEADERS, MSS
from mission_control.incast.reads import Reads
from mission_control.lab import Lab, Port, star
from mission_control.lab.stack import PROFILES

SENDERS_MAX = 47
LINK = 100_000_000
BLOCKS = 30
WARM_UP = 8
DEADLINE_S = 25.0
"""A point that takes longer has collapsed: 38 blocks with a timeout of 200 ms each take 8 s."""


ATTEMPTS = 3
"""At a point, where the machine was too slow."""


@dataclass(frozen=True)
class Setting:
    """What the onset is asked of."""

    profile: str
    buffer: int
    fragment: int
    rto_ms: int


def drawn(count: int, seed: int) -> list[Setting]:
    """Settings such as clusters have, drawn evenly from these lists."""
    chance = random.Random(seed)
    return [
        Setting(
            profile=chance.choice(["modern", "2009"]),
            buffer=chance.choice([16, 32, 48, 64, 96, 128, 192]) << 10,
            fragment=chance.choice([8, 16, 24, 32, 48, 64, 96, 128, 256]) * 1000,
            rto_ms=chance.choice([50, 100, 200, 400]),
        )
        for _ in range(count)
    ]


def predicted(setting: Setting) -> dict[str, Any]:
    """The model's onset: value, low, high."""
    stack = PROFILES[setting.profile]
    window = (stack.initial_window or 10) * MSS
    path = model.path(LINK, BASE_RTT_S, setting.rto_ms / 1e3, setting.buffer, MSS, window, stack.sack)
    result: dict[str, Any] = model.predict(path, [1], [setting.fragment])["onset"][0]
    return result


def measured(setting: Setting, say: Callable[[str], None] = lambda _: None) -> int | None:
    """The smallest number of senders whose median block takes longer than the ideal one by half an RTO, found by
    growing and then halving; ``None``: there is none up to 47."""
    stack = replace(PROFILES[setting.profile], rto_min_ms=setting.rto_ms)
    port = Port(buffer_bytes=setting.buffer)
    name = f"onset-{secrets.token_hex(2)}"
    with Lab(star(SENDERS_MAX + 1, LINK, port=port), name, stack) as lab, reads_in(lab) as own:
        known: dict[int, bool] = {1: False}

        def late(senders: int) -> bool:
            if senders not in known:
                known[senders] = is_late(own, setting, senders)
                say(f"{setting}: {senders} senders: {'collapsed' if known[senders] else 'not'}")
            return known[senders]

        low, high = 1, 2
        while high < SENDERS_MAX and not late(high):
            low, high = high, min(SENDERS_MAX, high + max(1, high // 2))
        if not late(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if late(middle) else (middle, high)
        return high


def is_late(own: ReadsInLab, setting: Setting, senders: int) -> bool:
    reads = Reads(fragment=setting.fragment, blocks=BLOCKS, warm_up=WARM_UP, deadline_s=DEADLINE_S)
    for _ in range(ATTEMPTS):
        result = own.measure(senders, reads, watch=asked_to_end)
        interrupts.check()
        if result["valid"]:
            break
    ideal_s = BASE_RTT_S + senders * setting.fragment * 8 * (1 + HEADERS / MSS) / LINK
    return not result["blocks"] or median(result["blocks"]) > ideal_s + setting.rto_ms / 2e3


def asked_to_end(_: int) -> bool:
    """Whether an interrupt has come; it is raised once the measurement is over."""
    try:
        interrupts.check()
    except KeyboardInterrupt:
        return True
    return False


def bench(count: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Of each setting the model's interval and the lab's onset."""
    rows = []
    for setting in drawn(count, seed):
        result, found = predicted(setting), measured(setting, say)
        rows.append({**asdict(setting), **result, "measured": found, "inside": agrees(result, found)})
    return {"seed": seed, "rows": rows, "inside": sum(row["inside"] for row in rows)}


def agrees(result: dict[str, Any], found: int | None) -> bool:
    """Whether the onset lies in the model's interval; "none up to 47" does where the interval ends beyond."""
    if result["value"] is None or found is None:
        return found is None and (result["high"] or SENDERS_MAX + 1) > SENDERS_MAX
    return bool(result["low"] <= found <= result["high"])


def summary(result: dict[str, Any]) -> Sequence[str]:
    """In lines."""
    lines = [f"{'stack':<7} {'buffer':>8} {'fragment':>8} {'RTO':>6}  {'model':>5} {'interval':>9} {'lab':>4}"]
    for row in result["rows"]:
        interval = "never" if row["value"] is None else f"{row['low']} to {row['high']}"
        lines.append(
            f"{row['profile']:<7} {row['buffer'] >> 10:4} KiB {row['fragment'] // 1000:5} kB {row['rto_ms']:3} ms  "
            f"{row['value'] or '-':>5} {interval:>9} {row['measured'] or '-':>4}{'' if row['inside'] else '  outside'}"
        )
    return lines
