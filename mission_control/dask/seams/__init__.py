"""Private parts of Dask that Mission Control replaces, because Dask has no hooks there.

Each is a :class:`.seam.Seam` of a part that is put in when it is used, and taken out as a whole. If Dask is not as
expected, or ours fails, Dask's own method is back, with a warning: Dask works without the improvement.
:mod:`.delegates`, :mod:`.objects`, :mod:`.queue` and :mod:`.shuffles` are for the scheduler; :mod:`.early`,
:mod:`.turns`, :mod:`.lanes`, :mod:`.messages` and :mod:`.changed` are for workers.
"""

from __future__ import annotations

import logging

import dask

logger = logging.getLogger(__name__)

SWITCHES = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
PARTS = ("gather-by-job", "host-sessions", "lend-threads", "order-tasks", "p2p", "queue-by-job")
"""Set ``mission-control.lend-threads`` etc. to false to keep Dask's behaviour."""


def wanted(part: str, default: bool = True) -> bool:
    """Whether a part is enabled; any value but true and false counts as the default, with a warning."""
    assert part in PARTS
    value = dask.config.get(f"mission-control.{part}", default=default)
    if isinstance(value, bool):
        return value
    if (word := str(value).strip().lower()) in SWITCHES:
        return SWITCHES[word]
    logger.warning("mission-control.%s is %r in Dask's configuration: write true or false", part, value)
    return default
