"""What a world gives to a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client


@dataclass
class Site:
    """A cluster that a scenario can run on."""

    connect: Callable[[], Client]
    """A new client of it."""
    begin: Callable[[], None] = lambda: None
    """Called when the jobs begin."""
    stop_and_summarize: Callable[[], dict[str, Any]] = dict
    """Called when they have ended: what the world adds to the result."""
    seen: int = 0
    """Records of its Mission Controller that earlier runs have taken."""
