"""Decisions and data plane in Rust. What crosses seldom crosses as JSON; the types are those of `crates/core`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from typing_extensions import Buffer

FLOWS_PER_HOST: int
PROTOCOL: int
BEGINS_AGAIN_MAX: int
REPORT_EVERY_MS: int
STORE_MEMORY_FRACTION: float
"""Defaults that Python reads (docs/defaults.md)."""

class PanicException(BaseException):
    """A panic of Rust: a bug of Mission Control."""

class TransferError(RuntimeError):
    """A fetch did not bring what it was asked for; the text names the cause."""

class Lost(TransferError):
    """No source has the object: its task has to run again."""

class Unreachable(TransferError):
    """No source could be reached within the patience."""

class Damaged(TransferError):
    """The data arrived damaged repeatedly."""

class Denied(TransferError):
    """The server, or the flight plan, refuses."""

class Cancelled(TransferError):
    """The caller was interrupted, or the worker closes."""

class StreamFailed(TransferError):
    """The task that writes the stream raised an error; the text is its."""

class Segment(Buffer):
    """Writable memory of the data plane."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Part(Buffer):
    """A part that has arrived: a read-only buffer."""

    def __len__(self) -> int: ...
    def place(self) -> tuple[int, int] | None:
        """Where it lies in memory that other processes can map: a descriptor of this process, and where it begins
        there. It stays as it is as long as this lives."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class Endpoint:
    """Store, server and fetcher of one process."""

    def __init__(
        self,
        host: str,
        token: bytes,
        *,
        memory_limit: int,
        spool_folder: str,
        flows_per_host: int | str,
        send_limit: int | None = None,
        ca: bytes | None = None,
        certificate: bytes | None = None,
        key: bytes | None = None,
        requires_encryption: bool = False,
        ports: Sequence[int] = (0,),
        cluster: str | None = None,
        host_token: bytes | None = None,
    ) -> None: ...
    @property
    def address(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def environment(self) -> str: ...
    @property
    def problems(self) -> list[str]:
        """What this data plane cannot do, and why; everything else works."""
    def allocate(self, len: int, job: tuple[str, str] | None = None, cohort: int = 0) -> Segment:
        """Return memory for what a job is going to put; what is of one cohort is freed at about the same time."""
    def allocate_result(self, len: int) -> Segment:
        """Return memory for a task's result; Dask accounts for it, so it does not make objects go to the disk."""
    def join_columns(
        self, parts: Sequence[Buffer], kinds: Sequence[Sequence[tuple[str, int]]]
    ) -> tuple[int, list[list[tuple[Segment | None, int, int, int, int]]]]:
        """Join parts that :class:`ColumnSplit` made, in memory for results.

        Args:
            kinds: The buffers of each column: ``("fixed", width)``, ``("bits", 0)``,
                ``("variable", width_of_offsets)``.

        Returns:
            The number of rows; and for each buffer of each column the memory that it lies in, start and length of its
            values, bits or offsets, and start and length of the bytes that offsets name. ``None``: all bits are set.

        Raises:
            ValueError: A part does not have these buffers.
        """
    def sort_parts(self, parts: Sequence[Buffer], width: int) -> tuple[int, Segment] | None:
        """Sort the rows of parts that :class:`ColumnSplit` made of one column of fixed width, by their bytes.

        Returns:
            The number of rows, and their values; ``None``: a row is a gap.

        Raises:
            ValueError: A part does not have this column.
        """
    def put(self, parts: Sequence[Buffer], job: str, demands: str) -> tuple[str, list[int]]: ...
    def adopt(self, segment: Segment, sizes: Sequence[int], demands: str) -> str: ...
    def free(self, object: str) -> bool: ...
    def fetch(
        self,
        job: str,
        source: str,
        to: str,
        demands: str,
        parts: Sequence[tuple[str, int, int, list[str]]],
        packed: bool,
        whole: bool = False,
        receiver: str | None = None,
        part_count: int = 0,
        keep: Sequence[str] = (),
    ) -> tuple[list[Part], Part | None, str]:
        """`receiver`: who asks, and how many parts each object has: for the pattern of the transfer. `keep`: objects
        whose parts stay here while there is room."""

    def receive(
        self,
        job: str,
        source: str,
        to: str,
        demands: str,
        parts: Sequence[tuple[str, int, int, list[str]]],
        given_up: Callable[[], bool],
    ) -> list[Segment]:
        """As `fetch`; each part comes into memory of its own that the caller may write to, and accounts for.

        `given_up`: whether nobody wants it any more."""

    def open_stream(self, job: str, demands: str, parts: int, ahead_bytes: int, keep: bool) -> StreamWriter: ...
    def read_stream(
        self, job: str, source: str, to: str, demands: str, place: tuple[str, int, int, str], receiver: str, run: int
    ) -> StreamReader:
        """Read a part of a stream.

        Args:
            place: The stream, the part, the number of its parts, and the address of its writer's data plane.
            receiver: The task that reads.
            run: A number for its run.
        """
    def command(self, command: str) -> None:
        """One command for the data plane, outside the numbered messages."""

    def joined(self, briefing: str) -> bool:
        """Take the briefing (JSON) of a process that has joined. Return whether two jobs or more were named."""

    def hear(self, version: int, message: str) -> tuple[int | None, str | None, list[str], bool | None]:
        """Does what a message says. Gives the version after which something is missing, the job on which to say the
        last words, the addresses to be probed, and whether two jobs or more were named, where that has changed."""

    @property
    def heard(self) -> int:
        """The version of the last message that was obeyed."""

    def known_lost(self, objects: Sequence[str]) -> list[str]: ...
    def probe_ecn(self, senders: Sequence[str]) -> str: ...
    def lost(self, objects: Sequence[str], why: str) -> None: ...
    def forget_job(self, job: str) -> None: ...
    def leaves_session(self) -> None:
        """Have this process say the rest itself, and not by way of another one of its host: it is about to end."""

    def report(self, cpu: float = 0.0, last_of: str | None = None) -> str | None:
        """What has changed since the last report, as JSON (`WorkerReport`); `None`: nothing."""

    def news(self) -> int:
        """Return a descriptor that is readable while there is something to report, looked at every `REPORT_EVERY_MS`.

        It is an eventfd: whoever makes the report reads it first. It is valid until the endpoint is closed.

        Raises:
            OSError: The process is out of descriptors or threads.
        """

    def transfers(self) -> str: ...
    def weights(self) -> dict[str, float]:
        """What each job's transfers weigh together, of the jobs that move bytes."""

    def live_bytes(self) -> int:
        """Bytes of memory that objects and what was fetched use now."""

    def resources(self) -> str: ...
    def close(self) -> None: ...

class StreamWriter:
    """A stream that this process writes."""

    @property
    def object(self) -> str: ...
    def write(self, part: int, buffer: Buffer) -> None:
        """Copies it; waits while an active reader of the part is far behind.

        Raises:
            Cancelled: Nobody wants the stream any more.
            OSError: No memory, or no room in the spool.
            ValueError: There is no such part.
        """
    def end(self, error: str | None = None) -> None: ...
    def free(self) -> None: ...

class StreamReader:
    """A part of a stream that is read ahead, by a thread of its own."""

    def next(self, wait: bool = True) -> tuple[Part | None, Part | None, bool]:
        """Return the next chunk; the sizes of the writes in it (64 bits each, little-endian), if they are several; and
        whether there may be more. Without `wait` the chunk may be missing although there is more."""
    def close(self) -> None: ...

class StreamPrefix:
    """What a task has read of a part of a stream whose writer writes the same each time it runs."""

    def __init__(self) -> None: ...
    def take(self, chunk: Part, sizes: Part | None) -> int:
        """How many writes of this chunk, from its first, the task has read before.

        Raises:
            mission_control.StreamFailed: They are not what it has read.
        """

    def begin_again(self) -> None:
        """Another run of the writer is read, from its beginning."""

    def end(self) -> None:
        """The stream has ended.

        Raises:
            mission_control.StreamFailed: It is shorter than what the task has read.
        """

class Dctcp:
    """DCTCP as a congestion control of this machine. Only where it was built with eBPF."""

    def __init__(self) -> None: ...
    def pin(self, path: str) -> None: ...
    def close(self) -> None: ...
    @staticmethod
    def alpha_after(alpha: int, marked: int, all: int) -> int: ...

class Setter:
    """Gives the sockets of a cgroup another transport, as long as it lives. Only where it was built with eBPF."""

    def __init__(self, cgroup: str, wanted: str) -> None: ...
    def agreed(self) -> str: ...

def mptcp_preload() -> bytes: ...
def bond(pairs: list[tuple[int, int]]) -> None: ...
def checksums_off(interface: str) -> None: ...

class Delays:
    """Delay lines between pairs of interfaces. Only where it was built with eBPF; in the thread's own namespace."""

    def __init__(self, pairs: list[tuple[int, int]], delay_us: int, frames_max: int) -> None: ...
    def counted(self) -> str: ...
    def close(self) -> None: ...

class Switch:
    """Ports of a bridge that behave as a switch's. Only where it was built with eBPF; in the thread's own namespace."""

    @staticmethod
    def build(groups: str) -> Switch: ...
    @staticmethod
    def open(interface: int) -> Switch: ...
    def set(self, interface: int, settings: str) -> None: ...
    def counters(self) -> str: ...
    def trace(self, on: bool) -> None: ...
    def samples(self) -> list[tuple[int, int, int, int]]: ...

class Threads:
    """The threads of a worker: whose task runs next. A task that has no turn waits in its thread."""

    def __init__(self, threads: int) -> None: ...
    def begins(self, task: int, job: str, priority: float) -> None:
        """The engine gives a task to a thread: waits for its turn, with a bound."""

    def lends(self, task: int) -> None:
        """It waits for the network."""

    def goes_on(self, task: int) -> None:
        """It has what it waited for: waits for a thread, with a bound."""

    def ends(self, task: int) -> None:
        """It is over, or leaves the threads."""

    def weigh(self, weights: dict[str, float]) -> None:
        """What the jobs that move bytes weigh now."""

    def next(self, jobs: list[str]) -> str | None:
        """Of several jobs, whose task is to be begun next."""

    def ahead(self, live_bytes: int, limit_bytes: int) -> int:
        """How many tasks more than threads may have begun."""

    def close(self) -> None:
        """Nobody waits for a turn any more."""

    @property
    def closed(self) -> bool: ...
    @property
    def most(self) -> int:
        """How many tasks may have lent their threads at most."""

    def __len__(self) -> int: ...

class Lanes:
    """What a worker has asked its peers for, by job: decides of which job the next message is."""

    def weigh(self, weights: dict[str, float]) -> None:
        """What the jobs that move bytes weigh now."""

    def free(self, peer: str, job: str) -> int | None:
        """The number of the message that may begin now in the lane of a job to a peer, if one may."""

    def begins(self, peer: str, job: str, number: int, bytes: int) -> None:
        """A message is asked for."""

    def ends(self, peer: str, job: str, number: int) -> None:
        """It has arrived, or failed."""

    def next(self, jobs: list[tuple[str, float]]) -> str | None:
        """Of several jobs and their priorities, whose message comes next; the first of equals."""

class Service:
    """A replica of the control service, which runs in threads of its own until it is stopped.

    Args:
        settings: `mission_service::settings::Settings` as JSON.

    Raises:
        ValueError: The store, the certificate or the address cannot be used; the text names the fix.
    """

    def __init__(self, settings: str) -> None: ...
    @property
    def port(self) -> int: ...
    def status(self) -> str | None: ...
    def stop(self) -> None: ...

class Controller:
    """All that is known of a cluster, and what is said to whom about it; `now` in seconds since any start.

    Commands come as JSON, or not at all. Tasks are numbered by the caller.
    """

    def __init__(self, policy: str, flows_per_host: int | str, environment: str) -> None: ...
    def handle(self, now: float, event: str) -> str | None: ...
    def tasks(
        self,
        now: float,
        tasks: Sequence[tuple[int, str, str, Sequence[int]]],
        client: str,
        spec: str | None = None,
        by: int | None = None,
        span: str | None = None,
    ) -> str | None:
        """New tasks of one origin, each after its inputs: number, stage, kind (work, select or barrier), inputs."""

    def submitted(self, now: float, by: int, tasks: Sequence[int]) -> str | None:
        """A task has submitted others, new ones or not."""

    def begins(self, now: float, task: int, worker: str) -> str | None:
        """A task was given to a worker, or to another one."""

    def ends(self, now: float, task: int) -> str | None:
        """A task is done, or was taken away."""

    def carries(self, now: float, task: int, objects: Sequence[Any], alive: bool) -> str | None:
        """A task's result carries objects: name, owner, number of parts, bytes, and how many workers shall have them.

        What makes no sense is passed over.
        """

    def writes(self, now: float, task: int, worker: str, stream: tuple[str, bool], needs: Sequence[Any]) -> str | None:
        """A task writes a stream, and needs these objects of its inputs, as in `carries`; said before its result.

        `stream`: its name, and whether the task writes the same each time it runs."""

    def wrote(self, now: float, task: int, stream: str) -> str | None:
        """A task is over that wrote this stream."""

    def waits(self, now: float, task: int, worker: str, run: int | None) -> str | None:
        """The thread of a task, in this run of the engine's, waits until a stream that it reads is written again;
        ``None``: it waits no more."""

    def continues(self, task: int, worker: str) -> int | None:
        """The engine's run in which the thread of a task waits on this worker."""

    def repeats(self, task: int) -> bool:
        """Whether a task writes the same stream each time it runs."""

    def written_again(self, writers: Sequence[int]) -> dict[str, tuple[str, str]]:
        """By each lost stream of these tasks what is written now: the stream, and the address of its writer's data
        plane."""

    def writers(self) -> list[str]:
        """Workers on which a task writes a stream."""

    def is_carried(self, task: int, object: str) -> bool:
        """Whether a task's present result carries an object."""

    def delegates(
        self, now: float, task: int, inputs: Sequence[int], objects: Sequence[Any], alive: bool
    ) -> str | None:
        """A task's next step takes the results of these tasks, and names these objects, as in `carries`."""

    def delegate_ends(self, now: float, task: int, again: bool) -> str | None:
        """The last step of a task is over; or an object is lost that it needs, and the task begins again."""

    def lost_step(self, task: int) -> bool | None:
        """Whether a task may begin again because its next step needs an object that nobody has any more; ``None``: it
        has all."""

    def is_furthest(self, task: int) -> bool:
        """Whether a task that delegates has never come further than now."""

    def job_of(self, task: int) -> str | None:
        """The job of a task."""

    def named_job_of(self, task: int) -> str | None:
        """The job of a task, if somebody has named it."""

    @property
    def named(self) -> int:
        """Jobs that somebody has named, and that are not over."""

    def next(self, waiting: Sequence[str | None]) -> int:
        """Of jobs with queued tasks (``None``: all that nobody has named), the place of the one whose task is next."""

    def is_handing_over(self, worker: str) -> bool:
        """Whether a worker that leaves has still to wait until others have its objects."""

    def object_bytes(self, worker: str) -> int:
        """Bytes of whole objects that lie with a worker."""

    def far_bytes(self, inputs: Sequence[int], worker: str) -> int:
        """Bytes of objects that a task with these inputs would probably have to bring to a worker."""

    def result_gone(self, now: float, task: int, wanted: bool) -> str | None:
        """A result is gone, and is going to be computed again or not."""

    def forgotten(self, now: float, task: int) -> str | None: ...
    def shuffle_demands(self, task: int, workers: Sequence[str]) -> tuple[str | None, str | None]:
        """Return what a shuffle of the engine demands on the data plane between these workers, as JSON.

        Or ``None``, and why the engine has to carry it.
        """
    def engine_refuses(self, task: int) -> str | None:
        """Say why Dask may not carry a shuffle of this task; ``None``: it may."""

    def engine_alone_refuses(self) -> str | None:
        """Say why Dask alone would not do for one of the jobs that there are; ``None``: it would."""
    def spec_of(self, task: int) -> str | None:
        """The job of a task as it is specified now."""

    def status(self, most: int | None = None) -> str: ...
    def held(self) -> dict[str, int]:
        """How many of each thing are remembered."""

    @property
    def policy(self) -> str: ...

def check_priority(job: str, priority: float) -> None:
    """Raises ValueError: one line that says which priority a job can have."""

def weights(spec: str, transfers: str, flows_per_host: int | str) -> list[tuple[float, int]]: ...

class IncastServer:
    """Serves synthetic bytes for synchronized reads until it is closed."""

    def __init__(
        self, descriptor: int, token: bytes, connections: int, bytes: int, pace: int | None = None
    ) -> None: ...
    def served(self) -> tuple[int, int]: ...
    def variables(self) -> str: ...
    def close(self) -> None: ...

def incast_measure(reads: str, token: bytes, watch: Callable[[int], bool]) -> str: ...
def incast_advise(path: str, form: str, senders: int) -> str: ...
def incast_predict(question: str) -> str: ...
def contradiction(demands: str) -> str | None: ...
def policies() -> list[tuple[str, str]]: ...
def seconds_per_grant(groups: int, waiting: int, chunks: int) -> float:
    """Seconds that a host's arbiter takes for one chunk, from request to grant."""

def transports() -> list[str]: ...
def carriers() -> list[str]: ...
def link_rate() -> int | None: ...
def defaults() -> list[tuple[str, str, str]]: ...
def parse_bytes(text: str) -> int: ...
def parse_rate(text: str) -> int: ...
def parse_duration(text: str) -> float: ...
def format_bytes(bytes: int) -> str: ...

class ColumnSplit:
    """Rows of columns, to be split by output partition; docs of the format: `crates/columns`."""

    def __init__(
        self,
        partitions: Buffer,
        part_of: Sequence[int],
        parts: int,
        buffers: Sequence[tuple[str, int, Buffer | None, Buffer | None]],
    ) -> None:
        """Look at the rows.

        Args:
            partitions: Of each row, the number of its output partition (int64).
            part_of: Of each output partition, its part, or 2^32 - 1 where nobody wants it.
            parts: Number of parts.
            buffers: Kind, number, bytes and offsets: ``("fixed", width, values, None)``,
                ``("bits", first_bit, bits, None)``, ``("all-set", 0, None, None)``,
                ``("variable", width_of_offsets, values, offsets)``.

        Raises:
            ValueError: A row has a partition that there is not, or a buffer too few rows.
        """
    @property
    def sizes(self) -> list[int]:
        """Bytes of each part."""
    @property
    def rows(self) -> list[int]:
        """Rows of each part."""
    @property
    def unwanted(self) -> int:
        """Rows of output partitions that nobody wants."""
    def write(self, outs: Sequence[Segment]) -> None:
        """Write all parts, one after another; each output takes as many whole parts as it has bytes for."""

def columns_hash(
    columns: Sequence[tuple[str, int, Buffer, Buffer | None, tuple[Buffer, int] | None]], tuples: bool, out: Buffer
) -> None:
    """Hash rows as pandas does.

    Args:
        columns: Kind, width in bytes, values, offsets, and bits of validity with the number of the first:
            ``("words", width, values, None, None)``, ``("floats", width, values, None, None)``,
            ``("texts", width_of_offsets, values, offsets, valid)``, or ``("hashed", 8, hashes, None, None)``.
        tuples: Whether the hashes of several columns are combined.
        out: uint64 of each row.

    Raises:
        ValueError: A column has too few rows.
    """

def columns_ranges(
    column: tuple[str, int, Buffer | None, Buffer | None], splitters: Sequence[bytes], out: Buffer
) -> None:
    """Say in which range each row is, by its bytes.

    Args:
        column: A buffer of fixed width or of variable length, as :class:`ColumnSplit` takes it.
        splitters: Ascending; a row is in the range of the last one that it is not below.
        out: int64 of each row.

    Raises:
        ValueError: The column has too few rows, or no bytes.
    """

def rows_sort(inputs: Sequence[Buffer], width: int, key: int, out: Segment) -> None:
    """Sort rows of `width` bytes, of at most 65,536 inputs, by the first `key` of them; equal ones keep their order.

    Raises:
        ValueError: An input is no whole number of rows, or the output has not their size, or is used otherwise.
    """

class Finder:
    """Finds the references in a value, as the garbage collector walks it: none of the program's code runs.

    Args:
        kind_of: Returns what objects of a type hold: ``"plain"`` (nothing), ``"reference"`` (it is one), ``"walked"``
            (what the garbage collector knows), ``"array"`` (of NumPy), ``"unknown"``. Called once for each type.
    """

    def __init__(self, kind_of: Callable[[type], str]) -> None: ...
    def find(self, value: Any) -> list[Any] | None:
        """Return the references that a value holds; ``None``: it has something of which nobody can tell."""

class Sums:
    """Sums by key, of pairs whose keys are texts or bytes and whose values are whole numbers of 64 bits.

    Exactly of these types: what is derived from them is not for here.
    """

    def __init__(self) -> None: ...
    def add(
        self, pairs: Iterator[Any], keys_max: int, bytes_max: int, others_max: int
    ) -> tuple[bool, bool, list[tuple[Any, Any]]]:
        """Add pairs until there are no more, or so many keys are here, or these have so many bytes, or so many pairs
        are not for here; and some milliseconds long at most.

        Returns:
            Whether there are no more; whether there are too many keys or bytes; and those that are not for here, or
            whose sum would be too large, in their order.
        """
    def take(self) -> list[tuple[str | bytes, int]]:
        """Return all keys with their sums, and forget them."""
    def __len__(self) -> int: ...

def records_partition(input: Buffer, splitters: bytes, out: Segment) -> list[int]: ...
def records_check(input: Buffer) -> tuple[int, bool, bytes, bytes, int]: ...
def _panic(text: str) -> None: ...
