"""Experiments: a scenario becomes points (variant, grid, repetition), points are measured in worlds, and what they say
is one result and one report.

- :mod:`.points`: which points, in which order.
- :mod:`.engine`: measures them; :mod:`.parallel`: scenarios side by side; :mod:`.jobs`: a point of jobs;
  :mod:`.observed`: what the Mission Controller's records say of jobs.
- :mod:`.result`: the one type of results; :mod:`.compare`: medians, intervals, ratios; :mod:`.report`, :mod:`.charts`.
"""
