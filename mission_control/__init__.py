"""Mission Control: decides which share of the network each transfer gets, and which transport carries a job's bytes
between two hosts.

The program that submits work uses :func:`install`, :func:`job` and :func:`uninstall`. Any task may use: :func:`put` and
:func:`fetch`; :func:`keep` for an object that is fetched repeatedly; :func:`allocate` to write parts directly to the
data plane's memory; :func:`open_stream` and :func:`stream` to read data while another task writes it; :func:`delegate`
to let another call make the task's result; :func:`run` to run a program; :func:`java` to run a class of Java.
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
