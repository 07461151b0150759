"""Mission Control: decides per transfer how big a share of the network it gets and which transport carries it.

In the program that submits work: :func:`install`, :func:`job` and :func:`uninstall`. In any task: :func:`put` and
:func:`fetch`, :func:`keep` for what is fetched again and again, and :func:`allocate` where a task can write its parts
into the data plane's memory at once;
:func:`open_stream` and :func:`stream`, where others read what is still being written; :func:`delegate`, where another
call makes the task's result; :func:`run`, which runs a program; :func:`java`, which runs a class of Java.
:func:`mapreduce` submits the tasks of a whole job.
"""

from mission_control._native import Cancelled, Damaged, Denied, Lost, StreamFailed, TransferError, Unreachable
from mission_control.delegates import Delegation, delegate
from mission_control.jobs import JobRejected, install, job, uninstall
from mission_control.jvm import java
from mission_control.map_reduce import mapreduce
from mission_control.objects import Fetched, Reference, allocate, fetch, keep, put
from mission_control.programs import In, Out, ProgramFailed, run
from mission_control.streams import Stream, StreamReference, open_stream, stream

__all__ = [
    "Cancelled",
    "Damaged",
    "Delegation",
    "Denied",
    "Fetched",
    "In",
    "JobRejected",
    "Lost",
    "Out",
    "ProgramFailed",
    "Reference",
    "Stream",
    "StreamFailed",
    "StreamReference",
    "TransferError",
    "Unreachable",
    "allocate",
    "delegate",
    "fetch",
    "install",
    "java",
    "job",
    "keep",
    "mapreduce",
    "open_stream",
    "put",
    "run",
    "stream",
    "uninstall",
]
