"""Durations of each task's map, shuffle and reduce phases, for the records of a run, its result and its report."""

from __future__ import annotations

from mission_control.objects import data_plane

PHASES = ("map_s", "shuffle_s", "reduce_s")


def note_phases(**seconds: float) -> None:
    """Report the seconds of phases of the task in this thread: some of :data:`PHASES`."""
    worker, plugin, _ = data_plane("mapreduce")
    plugin.note_phases(worker.get_current_task(), seconds)
