"""Workloads: what a scenario computes. To add one, add a file here with a class of settings, and one line in
:data:`WORKLOADS`. The class defines its keys in a scenario, its flags, its measures and its jobs."""

from __future__ import annotations

from mission_control.workloads.blocks import ReadSettings, WriteSettings
from mission_control.workloads.frames import FramesSettings
from mission_control.workloads.gather import GatherSettings
from mission_control.workloads.incast import IncastSettings
from mission_control.workloads.kmeans import KMeansSettings
from mission_control.workloads.mix import MixSettings, ShuffleSettings
from mission_control.workloads.replay import ReplaySettings
from mission_control.workloads.settings import Settings
from mission_control.workloads.sort import SortSettings
from mission_control.workloads.wordcount import WordCountSettings

WORKLOADS: dict[str, type[Settings]] = {
    "sort": SortSettings,
    "kmeans": KMeansSettings,
    "wordcount": WordCountSettings,
    "mix": MixSettings,
    "shuffle": ShuffleSettings,
    "frames": FramesSettings,
    "write": WriteSettings,
    "read": ReadSettings,
    "gather": GatherSettings,
    "incast": IncastSettings,
    "replay": ReplaySettings,
}
"""By kind."""
