"""What the kernels of a lab's hosts do with TCP, as far as it is not their default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stack:
    """Of every host; ``None`` leaves the kernel's own.

    Args:
        congestion_control: what sockets have that choose none.
        rto_min_ms: shortest retransmission timeout. Given by the route, and so it wins against what a socket asks for.
        rto_min_sysctl_ms: the same by ``tcp_rto_min_us``; a socket that asks for a shorter one has that.
        initial_window: segments that a connection may send at first.
        window: bytes that a receiver lets a sender have under way, by the buffer of its sockets: half is for data,
            and a little more once the kernel has seen full segments. A route's window is forgotten with the first.
        sack: selective acknowledgments (RFC 2018).
        tlp: tail loss probes, and with them RACK's timer (RFC 8985).
        delayed_ack: off: every segment is acknowledged at once.
    """

    congestion_control: str = "cubic"
    rto_min_ms: int | None = None
    rto_min_sysctl_ms: int | None = None
    initial_window: int | None = None
    window: int | None = None
    sack: bool = True
    tlp: bool = True
    delayed_ack: bool = True

    def sysctls(self) -> dict[str, str]:
        """Of a host's network namespace."""
        own = {"net/ipv4/tcp_congestion_control": self.congestion_control}
        if not self.sack:
            own["net/ipv4/tcp_sack"] = "0"
        if not self.tlp:
            own["net/ipv4/tcp_early_retrans"] = "0"
        if self.window is not None:
            own["net/ipv4/tcp_rmem"] = f"4096 {2 * self.window} {2 * self.window}"
        if self.rto_min_sysctl_ms is not None:
            own["net/ipv4/tcp_rto_min_us"] = str(self.rto_min_sysctl_ms * 1000)
        return own

    def route(self) -> str:
        """Attributes of a host's routes; empty where all is the kernel's own."""
        words = []
        if self.rto_min_ms is not None:
            words.append(f"rto_min {self.rto_min_ms}ms")
        if self.initial_window is not None:
            words.append(f"initcwnd {self.initial_window}")
        if not self.delayed_ack:
            words.append("quickack 1")
        return " ".join(words)


PROFILES = {
    "modern": Stack(),
    "2009": Stack(congestion_control="reno", rto_min_ms=200, initial_window=2, sack=False, tlp=False),
}
"""Today's defaults; and what the incast papers measured (FACTS): no selective acknowledgments, no probes, two segments
at first."""
