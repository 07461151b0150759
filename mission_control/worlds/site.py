"""The interface of a world for a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client


@dataclass
class Site:
    """A cluster that a scenario can run on."""

    connect: Callable[[], Client]
    """Makes a new client of it."""
    begin: Callable[[], None] = lambda: None
    """Called when the jobs begin."""
    stop_and_summarize: Callable[[], dict[str, Any]] = dict
    """Called when they have ended; returns what the world adds to the result."""
    notes: list[str] = field(default_factory=list)
    """Settings of the scenario that are not in force there, and changes that affect others."""
    policy: str | None = None
    """Settings in force there, if the world is not made from the scenario."""
