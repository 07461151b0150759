"""Delay lines: every host's link takes a fixed time each way, so that a lab has the round trip that is asked for.

A line lies in the middle of a link, between the host's interface and the switch's port. Both ends of all lines are in
one namespace of their own, and a thread of the process that made the lab passes frames on
(`crates/kernel/src/delay.rs`). Between two hosts a packet passes two links each way, so their base round trip is four
times the delay of a link. Links between switches have none.

All links are of one length, so a packet may wait for both of its links at once. It does so behind the queue of the last
switch, where packets come no faster than one link carries them. If it waited on its sender's link first, then many
senders that begin together would give the thread all of their windows at one moment
(docs/measurements.md, 2026-11-27).
"""

from __future__ import annotations

import json
import socket
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from mission_control import _native
from mission_control.lab import namespaces
from mission_control.lab.machine import write_sysctls

if TYPE_CHECKING:
    from mission_control.lab.lab import Lab
    from mission_control.lab.topology import Link, Topology

NODE = "delay-line"
"""Of whose namespace the lines are; no host or switch can have this name."""
LINKS = 2
"""Of a packet's way from host to host, not counting those between switches: it waits for both in one line."""
FRAMES_MIN = 4096
"""That a line may hold at least."""
SHORT_FRAME_BYTES = 66
"""An acknowledgment: a link carries no more frames than it carries of these."""
LATE_MEAN_MAX = 0.1
"""Of a line's delay: frames may be late by this on average."""
LATE_P99_MAX = 0.5
"""Of a line's delay: one frame in a hundred may be later."""
COUNTS = ("frames", "dropped", "refused", "late_ns")


def delayed(topology: Topology) -> list[Link]:
    """Links with a delay line: those that end at a host."""
    return [link for link in topology.links if link.a in topology.hosts] if topology.delay_us else []


def base_rtt_s(delay_us: int) -> float:
    """Of two hosts without queues, in seconds."""
    return 2 * line_us(delay_us) / 1e6


def line_us(delay_us: int) -> int:
    """How long a frame waits in a line, where links have a delay of ``delay_us``."""
    return LINKS * delay_us


def ends(link: Link) -> tuple[str, str]:
    """Names of a line's interfaces: towards the host, and towards the switch."""
    return f"{link.a}-{link.path}h", f"{link.a}-{link.path}s"


def frames_max(topology: Topology) -> int:
    """That a line may hold: all that its link carries in twice the time that a frame waits."""
    rate = max(link.bits_per_second for link in topology.links)
    return max(FRAMES_MIN, int(2 * line_us(topology.delay_us) / 1e6 * rate / 8 / SHORT_FRAME_BYTES))


def begin(lab: Lab) -> _native.Delays:
    """Starts the lines of a lab whose interfaces are there.

    Raises:
        OSError: the kernel refuses packet sockets, or the program that passes frames on.
    """
    lines = [f"link set {name} up" for link in delayed(lab.topology) for name in ends(link)]

    def start() -> _native.Delays:
        pairs = [tuple(socket.if_nametoindex(name) for name in ends(link)) for link in delayed(lab.topology)]
        delay_us = line_us(lab.topology.delay_us)
        return _native.Delays([(host, switch) for host, switch in pairs], delay_us, frames_max(lab.topology))

    namespace = lab.namespace(NODE)
    # Before they are up: the kernel would greet routers, and a line would carry that.
    namespaces.inside(namespace, lambda: write_sysctls({"net/ipv6/conf/all/disable_ipv6": "1"}))
    namespaces.batch("ip", lines, namespace)
    return namespaces.inside(namespace, start)


def counted(lines: _native.Delays | None) -> dict[str, Any] | None:
    """What the lines have counted since they began; ``None`` where there are none, or they are closed."""
    found: dict[str, Any] | None = json.loads(lines.counted()) if lines else None
    return found


def since(new: dict[str, Any], old: dict[str, Any], delay_us: int) -> dict[str, Any]:
    """What the lines did between two looks: ``delay_us`` (of a link), ``frames``, ``dropped`` (a line was full),
    ``refused`` (a link was cut), ``late_us`` (``mean``, ``p99``, ``max`` of the time from when a frame was due until it
    was written; p99 and max are rounded up to 20 us, and above 10 ms are the most in the whole life of the lines)."""
    count = {name: new[name] - old[name] for name in COUNTS}
    late = [after - before for after, before in zip(new["late"], old["late"], strict=True)]
    step_us = new["bucket_ns"] / 1e3

    def until(bucket: int) -> float:
        return (bucket + 1) * step_us if bucket + 1 < len(late) else new["late_ns_max"] / 1e3

    ninety_nine = next((at for at, passed in enumerate(accumulate(late)) if passed >= 0.99 * sum(late)), 0)
    latest = max((at for at, frames in enumerate(late) if frames), default=0)
    frames = count["frames"]
    result = {"mean": round(count.pop("late_ns") / frames / 1e3, 1) if frames else 0.0}
    result |= {"p99": until(ninety_nine) if frames else 0.0, "max": until(latest) if frames else 0.0}
    return {"delay_us": delay_us, **count, "late_us": result}


def invalid_reasons(result: dict[str, Any]) -> list[str]:
    """Why what was measured is not what links of this length would have done; ``result`` as :func:`since` gives it."""
    delay_us, late, because = line_us(result["delay_us"]), result["late_us"], []
    if result["dropped"]:
        because.append(f"the delay line lost {result['dropped']} frames: the machine is too slow, use slower links")
    if late["mean"] > LATE_MEAN_MAX * delay_us or late["p99"] > LATE_P99_MAX * delay_us:
        because.append(
            f"the delay line of {delay_us} us was {late['mean']:.0f} us late on average and {late['p99']:.0f} us for "
            f"one frame in 100, more than {LATE_MEAN_MAX:.0%} or {LATE_P99_MAX:.0%} of it: use slower links or more "
            "dilation"
        )
    return because
