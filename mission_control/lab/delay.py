"""Delay lines: every host's link has a fixed delay each way, so that a lab has the configured round trip.

A line lies in the middle of a link, between the host's interface and the switch's port. Both ends of all lines are in
one separate namespace, and a thread of the process that made the lab forwards frames
(`crates/kernel/src/delay.rs`). Between two hosts a packet passes two links each way, so their base round trip is four
times the delay of a link. Links between switches have none.

All links have the same delay, so a packet waits for both of its links at once, behind the queue of the last switch.
There packets arrive no faster than one link carries them. If packets waited on the sender's link first, many senders
that begin together would send all of their windows to the thread at one moment
(docs/measurements/lab/gather-of-47-not-valid.md).
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
"""Node name of the namespace of the lines; no host or switch can have this name."""
LINKS = 2
"""Links with a delay between two hosts: a packet waits for both in one line."""
FRAMES_MIN = 4096
"""Smallest capacity of a line, in frames."""
SHORT_FRAME_BYTES = 66
"""Size of the smallest frame, an acknowledgment: it bounds the number of frames that a link carries."""
LATE_MEAN_MAX = 0.1
"""Largest mean lateness of frames, as a fraction of a line's delay."""
LATE_P99_MAX = 0.5
"""Largest 99th percentile of the lateness of frames, as a fraction of a line's delay."""
COUNTS = ("frames", "dropped", "refused", "late_ns")


def delayed(topology: Topology) -> list[Link]:
    """Links with a delay line: those that end at a host."""
    return [link for link in topology.links if link.a in topology.hosts] if topology.delay_us else []


def base_rtt_s(delay_us: int) -> float:
    """Round trip of two hosts without queues, in seconds."""
    return 2 * line_us(delay_us) / 1e6


def line_us(delay_us: int) -> int:
    """How long a frame waits in a line, where links have a delay of ``delay_us``."""
    return LINKS * delay_us


def ends(link: Link) -> tuple[str, str]:
    """Names of a line's interfaces: towards the host, and towards the switch."""
    return f"{link.a}-{link.path}h", f"{link.a}-{link.path}s"


def frames_max(topology: Topology) -> int:
    """Capacity of a line, in frames: all that its link carries in twice the time that a frame waits."""
    rate = max(link.bits_per_second for link in topology.links)
    return max(FRAMES_MIN, int(2 * line_us(topology.delay_us) / 1e6 * rate / 8 / SHORT_FRAME_BYTES))


def begin(lab: Lab) -> _native.Delays:
    """Start the lines of a lab whose interfaces exist.

    Raises:
        OSError: the kernel refuses packet sockets, or the program that passes frames on.
    """
    lines = [f"link set {name} up" for link in delayed(lab.topology) for name in ends(link)]

    def start() -> _native.Delays:
        pairs = [tuple(socket.if_nametoindex(name) for name in ends(link)) for link in delayed(lab.topology)]
        delay_us = line_us(lab.topology.delay_us)
        return _native.Delays([(host, switch) for host, switch in pairs], delay_us, frames_max(lab.topology))

    namespace = lab.namespace(NODE)
    # Disable IPv6 before they are up: otherwise the kernel sends router solicitations, which a line would carry.
    namespaces.inside(namespace, lambda: write_sysctls({"net/ipv6/conf/all/disable_ipv6": "1"}))
    namespaces.batch("ip", lines, namespace)
    return namespaces.inside(namespace, start)


def counted(lines: _native.Delays | None) -> dict[str, Any] | None:
    """The counters of the lines since their start; ``None`` if there are none, or they are closed."""
    found: dict[str, Any] | None = json.loads(lines.counted()) if lines else None
    return found


def since(new: dict[str, Any], old: dict[str, Any], delay_us: int) -> dict[str, Any]:
    """Compute what the lines did between two samples: ``delay_us`` (of a link), ``frames``, ``dropped`` (a line was
    full), ``refused`` (a link was cut), ``late_us`` (``mean``, ``p99``, ``max`` of the time from when a frame was due
    until it was written; p99 and max are rounded up to 20 us, and above 10 ms they are the maximum since the lines
    began)."""
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
    """Return why a measurement is not valid for links with this delay; ``result`` comes from :func:`since`."""
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
