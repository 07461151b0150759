"""Mission Control: decides per transfer how big a share of the network it gets and which transport carries it.

In the program that submits work: :func:`install`, :func:`job` and :func:`uninstall`. In any task: :func:`put` and
:func:`fetch`, and :func:`allocate` where a task can write its parts into the data plane's memory at once.
"""

from mission_control._native import Cancelled, Damaged, Denied, Lost, TransferError, Unreachable
from mission_control.jobs import JobRejected, install, job, uninstall
from mission_control.objects import Fetched, Reference, allocate, fetch, put

__all__ = [
    "Cancelled",
    "Damaged",
    "Denied",
    "Fetched",
    "JobRejected",
    "Lost",
    "Reference",
    "TransferError",
    "Unreachable",
    "allocate",
    "fetch",
    "install",
    "job",
    "put",
    "uninstall",
]
