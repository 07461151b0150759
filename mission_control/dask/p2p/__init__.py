"""Dask's own shuffles on the data plane: one object for each input partition, with a part for each output.

Dask keeps the graph, the barrier, restarts and the choice of workers. Mission Control replaces a shuffle's run on each
worker. The scheduler decides which engine carries a shuffle (:mod:`mission_control.dask.seams.shuffles`), so all
workers use the same one. :mod:`.run` is what data frames (:mod:`.frames`) and arrays (:mod:`.arrays`) have in common;
:mod:`.inputs` records which parts of each input an output takes.
"""
