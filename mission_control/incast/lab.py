"""Synchronized reads in a lab: a star whose first host receives from all the others."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from mission_control.errors import PrerequisiteMissing
from mission_control.incast.background import LongFlows
from mission_control.incast.reads import Reads, measure, serve
from mission_control.incast.statistics import summary
from mission_control.incast.variables import Looks, correlations
from mission_control.lab import Lab, namespaces
from mission_control.lab.events import Watching

if TYPE_CHECKING:
    from mission_control.scenario import Event


class ReadsInLab:
    """Senders on all hosts of a lab but the first, which is the receiver."""

    def __init__(self, lab: Lab, senders: list[str], servers: list[Any], token: bytes):
        self.lab, self.senders, self.servers, self._token = lab, senders, servers, token

    def measure(
        self,
        senders: int,
        reads: Reads,
        repeat: int = 1,
        watch: Callable[[int], bool] = lambda _: False,
        events: Sequence[Event] = (),
        long_flows: int = 0,
    ) -> dict[str, Any]:
        """Read from the first ``senders`` hosts. The result is that of
        :func:`mission_control.incast.statistics.repeated`, with ``drops``, ``marks``, ``queue_bytes_max`` and
        ``queue_bytes_p50`` of the receiver's port, and the lab's ``valid`` and ``invalid_because``; for traced senders
        ``correlations`` (:mod:`.variables`). ``events`` happen meanwhile and are not undone. The last ``long_flows``
        hosts send one long flow each; ``background_mbit`` is their total goodput.

        Raises:
            PrerequisiteMissing: the senders' sockets do not support a setting.
            EnvironmentFailed: a long flow does not begin.
        """
        receiver = self.lab.topology.hosts[0]
        background = self.long_flows(long_flows, reads) if long_flows else None
        looks = Looks(self.servers[: min(reads.traced, senders)])

        def look(blocks: int) -> bool:
            if background is not None and blocks >= reads.warm_up:
                background.look()
            return watch(blocks)

        own = partial(measure, self.senders[:senders], reads, self._token, look)
        watching = Watching(self.lab, events)
        runs: list[dict[str, Any]] = []
        with ExitStack() as stack:
            if background is not None:
                stack.callback(background.end)
                background.begin()
            watching.begin()
            stack.callback(watching.end)
            stack.enter_context(looks)
            for _ in range(repeat):
                try:
                    runs.append(namespaces.inside(self.lab.namespace(receiver), own))
                except ConnectionError as error:
                    raise PrerequisiteMissing(str(error)) from None
                if runs[-1]["ended"]:
                    break
            # Stop while the long flows run: the effects of their ends on the port do not count.
            result = watching.stop_and_summarize()
            brought, early = background.brought() if background is not None else (None, None)
        port = next(entry for entry in result["ports"] if entry["port"] == receiver)
        kept = {name: port[name] for name in ("drops", "marks", "queue_bytes_p50", "queue_bytes_max")}
        found = summary(runs, reads.fragment * senders)
        if "delay" in result:
            kept["delay"] = result["delay"]
        because = [*result["invalid_because"], *([early] if early else [])]
        if background is not None:
            kept["background_mbit"] = brought
        if reads.traced:
            kept["correlations"] = correlations(looks.seen)
        return {**found, **kept, "valid": not because, "invalid_because": because}

    def long_flows(self, count: int, reads: Reads) -> LongFlows:
        """Make a long flow from each of the last hosts."""
        namespace = self.lab.namespace(self.lab.topology.hosts[0])
        last = self.senders[-count:], self._token, self.servers[-count:]
        return LongFlows(namespace, *last, reads.rto_min_us)


@contextmanager
def reads_in(lab: Lab) -> Iterator[ReadsInLab]:
    """Serve on every host of a running lab except its first. The servers are threads of this process: 47 processes
    would take longer to start than most measurements, and the measured kernel is the same."""
    token = secrets.token_bytes(32)
    with ExitStack() as stack:
        addresses, servers = [], []
        for host in lab.topology.hosts[1:]:
            address = lab.topology.address(host)
            server, port = namespaces.inside(lab.namespace(host), partial(serve, address, 0, token))
            stack.callback(server.close)
            addresses.append(f"{address}:{port}")
            servers.append(server)
        yield ReadsInLab(lab, addresses, servers, token)
