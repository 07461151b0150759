"""The control service: one Mission Control for several clusters.

`serving.py` starts a replica of it (`mission serve`), `membership.py` is a cluster's connection to it, and `asking.py`
is the client of command-line tools. Its decisions are in `crates/core` (`service`), its server in `crates/service`.
"""
