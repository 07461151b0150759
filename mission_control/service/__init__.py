"""The control service: one Mission Control for several clusters.

`serving.py` starts a replica of it (`mission serve`), `membership.py` is a cluster's connection to it, and `asking.py`
is what people's tools ask it. What it decides is in `crates/core` (`service`), how it runs in `crates/service`.
"""
