"""Experiments: a scenario becomes points (variant, grid, repetition), worlds measure the points, and all points make
one result and one report.

- :mod:`.points`: which points, in which order.
- :mod:`.engine`: measures them; :mod:`.parallel`: scenarios in parallel; :mod:`.jobs`: a point of jobs;
  :mod:`.observed`: jobs in the Mission Controller's records.
- :mod:`.result`: the one type of results; :mod:`.compare`: medians, intervals, ratios; :mod:`.report`, :mod:`.charts`.
"""
