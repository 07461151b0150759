"""TCP settings of the kernels of a lab's hosts that differ from the defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Stack:
    """TCP settings of every host; ``None``: the kernel's default.

    Args:
        congestion_control: default of sockets.
        rto_min_ms: minimum RTO, set on the route, which overrides a socket's.
        rto_min_sysctl_ms: minimum RTO, set by ``tcp_rto_min_us``; a socket can set a shorter one.
        initial_window: initial congestion window in segments.
        window: largest receive window in bytes, set by the buffer of sockets: half of that is for data, and a little
            more once the kernel has seen full segments. (A route's window only applies until then.)
        sack: selective acknowledgments (RFC 2018).
        tlp: tail loss probes (RFC 8985, section 7).
        rack: loss detection by time (RFC 8985, section 6); off: ``tcp_recovery`` 0, which Linux since 6.17 ignores
            where a connection has SACK (its commit 1c120191dcec removed what was there before). Without SACK three
            duplicate acknowledgments are needed, whatever this says.
        delayed_ack: off: every segment is acknowledged at once.
    """

    congestion_control: str = "cubic"
    rto_min_ms: int | None = None
    rto_min_sysctl_ms: int | None = None
    initial_window: int | None = None
    window: int | None = None
    sack: bool = True
    tlp: bool = True
    rack: bool = True
    delayed_ack: bool = True

    def sysctls(self) -> dict[str, str]:
        """Settings of a host's network namespace."""
        own = {"net/ipv4/tcp_congestion_control": self.congestion_control}
        if not self.sack:
            own["net/ipv4/tcp_sack"] = "0"
        if not self.tlp:
            own["net/ipv4/tcp_early_retrans"] = "0"
        if not self.rack:
            own["net/ipv4/tcp_recovery"] = "0"
        if self.window is not None:
            own["net/ipv4/tcp_rmem"] = f"4096 {2 * self.window} {2 * self.window}"
        if self.rto_min_sysctl_ms is not None:
            own["net/ipv4/tcp_rto_min_us"] = str(self.rto_min_sysctl_ms * 1000)
        return own

    def route(self) -> str:
        """Attributes of a host's routes; empty: all are the kernel's defaults."""
        words = []
        if self.rto_min_ms is not None:
            words.append(f"rto_min {self.rto_min_ms}ms")
        if self.initial_window is not None:
            words.append(f"initcwnd {self.initial_window}")
        if not self.delayed_ack:
            words.append("quickack 1")
        return " ".join(words)


LINUX_2_6_28 = Stack(congestion_control="cubic", rto_min_ms=200, initial_window=3, tlp=False, rack=False)
"""What papers 000 and 003 measured, as far as this kernel has settings for it: Linux 2.6.28.1 had cubic and SACK, and
neither probes nor RACK.

Initial window: table 1 of paper 000 begins at one segment of 1,448 bytes, its caption says two ("verified using
sysctl"), and the source of Linux 2.6.28 (`tcp_init_cwnd`) has three for segments of this size. Three it is here: with
it a port of 64 KiB overflows at the numbers of senders that figure 4 shows, with one only at more
(docs/measurements/incast-papers/figure-4-onset.md). Acknowledgments come spread over the time that the link took for
what they acknowledge, so a port holds half of each window, not all of it as equation 3 has it.

Features of today's kernels that remain: proportional rate reduction, F-RTO as RFC 5682 has it, cubic's hybrid slow
start (a setting of the whole machine), and since Linux 6.17 RACK where there is SACK: one or two duplicate
acknowledgments can start a recovery a quarter of a round trip later, where the paper's kernel waited for its timeout.
`newreno` has no RACK."""

PROFILES = {
    "modern": Stack(),
    "2009": Stack(congestion_control="reno", rto_min_ms=200, initial_window=2, sack=False, tlp=False),
    "linux-2.6.28": LINUX_2_6_28,
    "sack": replace(LINUX_2_6_28, congestion_control="reno"),
    "newreno": replace(LINUX_2_6_28, congestion_control="reno", sack=False),
}
"""Today's defaults; a stack without selective acknowledgments and probes, with two segments at first; the papers'; and
that with other ways to recover. There is neither `reno` nor `cubic`: Linux without SACK goes on after partial
acknowledgments, which is NewReno, and cubic with SACK is `linux-2.6.28`."""
