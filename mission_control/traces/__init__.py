"""Traces of the jobs of a cluster: read, described, synthesised, and scaled to another cluster.

- :mod:`.swim`: jobs, and the files that have them.
- :mod:`.describe`: statistics of a trace: quantiles of bytes, jobs per hour.
- :mod:`.synthesise`: a new trace, by windows of another one or from a shape.
- :mod:`.scale`: bytes for a smaller cluster, and the distortion that causes.

The format and the method are those of SWIM, the Statistical Workload Injector for MapReduce (Chen et al., MASCOTS 2011;
paper 000, 3.2).
"""

from __future__ import annotations
