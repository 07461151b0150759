"""Several jobs on one cluster under faults of all kinds: `python -m tests.chaos --rounds 200`.

The seed of a round determines its faults: a harm to all connections, and a blow in the middle of the jobs. `MAY_FAIL`
lists for each blow the errors with which a job may end; otherwise every job must end with the correct result, compared
by content. After all rounds nothing may be left: no objects, memory, connections or spool files. Workers have 1,024
descriptors.
"""
