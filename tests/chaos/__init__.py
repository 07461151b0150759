"""Several jobs on one cluster, while everything that can go wrong does: `python -m tests.chaos --rounds 200`.

Each round has a seed; what it does follows from it: a harm to all connections, and a blow in the middle of the jobs.
`MAY_FAIL` says for each blow with which errors a job may end; otherwise every job ends right, and its result is
compared by content. When all rounds are over nothing may be left: no objects, memory, connections or spool files.
Workers have 1,024 descriptors.
"""
