"""``mission://``: Dask's messages, with large frames on the data plane.

A message travels over a TCP or TLS connection as with ``tcp://`` and ``tls://``: those classes are used as they are. If
its frames are large and both processes have a data plane of the same cluster, the message has the location of the
frames. Its reader fetches them: with the job's share, transport and encryption, over several connections or through
shared memory, and without Python's lock. In the terms of MPI, small messages are *eager*, and large ones use a
*rendezvous*.

A writer never waits for its reader. It keeps frames until the reader acknowledges them; after the connection has ended,
it keeps them for :data:`LINGER_S`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import struct
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distributed.comm.addressing import get_address_host
from distributed.comm.core import CommClosedError
from distributed.comm.tcp import (
    TCP,
    TLS,
    BaseTCPBackend,
    BaseTCPConnector,
    BaseTCPListener,
    TLSConnector,
    TLSListener,
    convert_stream_closed_error,
)
from distributed.comm.utils import from_frames, to_frames
from distributed.protocol.core import dumps
from distributed.protocol.utils import pack_frames_prelude
from distributed.utils import ensure_memoryview, get_ip
from tornado import gen
from tornado.iostream import IOStream, SSLIOStream, StreamClosedError

from mission_control import _native
from mission_control.jobs import UNDEMANDING, UNNAMED

if TYPE_CHECKING:
    from distributed import Scheduler, Worker

logger = logging.getLogger(__name__)

EAGER_BYTES = 512 << 10
"""Messages with fewer bytes are sent eagerly."""
WRITE_BYTES = 1 << 30
"""Most bytes that are given to a socket in one call: OpenSSL counts them in an `int`."""
FRAME_BYTES = 64 << 10
"""Smaller frames of a large message travel with it, because each fetched frame needs its own mapping."""
FRAMES_MAX = 16 << 10
"""A message with more large frames goes through its connection, because a process has only 65,530 mappings."""
KEPT_MAX = 64
"""Most messages whose frames are kept for one reader. Until the reader acknowledges one, more messages go through the
connection: a reader that never acknowledges must not fill the memory."""
UNSPLIT = 1 << 62
"""Dask splits frames that go through a socket; here they stay whole."""
ACKNOWLEDGE_WITHIN_S = 1.0
"""A reader acknowledges frames with its next message, or after this time."""
LINGER_S = 300.0
"""How long frames without an acknowledgment are kept after their connection was closed. If the connection was aborted,
they are freed at once."""
LOOK_EVERY_S = 0.5
"""How often a reader of frames checks whether its connection was aborted."""
FETCHES, PUTS = 64, 4
"""Most messages whose frames a process fetches at the same time, and copies at the same time; each needs a thread. Dask
requests 50 messages at once (``distributed.worker.connections.outgoing``); one may wait a minute for a dead peer."""
AVOID_S = 300.0
"""For this time, a peer whose data plane could not be reached should send through connections what may go through
them."""

HANDSHAKE, FRAMES, RECEIVED = "mission-control", "mission-control-frames", "mission-control-received"
"""Keys of the handshake and of messages."""
HAS_PLANE = "has-plane"
"""In the handshake: this process has a data plane, even if it does not want frames from the other end's."""
AVOIDS = "avoids"
"""In the handshake: addresses of the data planes from which this process could not fetch frames recently."""
MARK = "mark"
"""In both: a random number for this connection, so that no message of Dask's can be mistaken for one with frames."""


@dataclass(frozen=True)
class Whose:
    """The transfer that a message belongs to, and what its job demands."""

    job: str
    source: str
    to: str
    demands: dict[str, Any]

    @property
    def is_secret(self) -> bool:
        """Whether it must be encrypted."""
        return self.demands.get("encrypt", "none") != "none"


UNKNOWN = Whose(UNNAMED, "message", "message", UNDEMANDING)
_whose: ContextVar[Whose] = ContextVar("whose", default=UNKNOWN)


@contextmanager
def belongs_to(whose: Whose) -> Iterator[None]:
    """Messages written in this block belong to a transfer."""
    token = _whose.set(whose)
    try:
        yield
    finally:
        _whose.reset(token)


# --- the data planes of this process --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plane:
    """A data plane of this process."""

    cluster: str
    endpoint: _native.Endpoint
    address: str
    authenticates: bool
    """It has certificates, so others can authenticate it."""


class Planes:
    """The data planes of this process. There are several where it has several workers."""

    def __init__(self) -> None:
        self.all: list[Plane] = []
        self.version = 0
        """Number of changes so far."""
        self.avoided: dict[str, float] = {}
        """Addresses of data planes from which frames could not be fetched, and until when that counts."""
        self.lingering: deque[tuple[float, _native.Endpoint, str]] = deque()
        """Objects of ended connections, and when they are freed; in the order of freeing."""
        self.fetches: ThreadPoolExecutor | None = None
        self.puts: ThreadPoolExecutor | None = None
        """Threads that wait for the network, and threads that copy, while there is a data plane."""

    def add(self, token: bytes, endpoint: _native.Endpoint) -> None:
        authenticates = bool(json.loads(endpoint.environment)["engine_tls"])
        if self.fetches is None or self.puts is None:
            self.fetches = ThreadPoolExecutor(FETCHES, thread_name_prefix="mission-read")
            self.puts = ThreadPoolExecutor(PUTS, thread_name_prefix="mission-write")
        self.all.append(Plane(cluster_of(token), endpoint, endpoint.address, authenticates))
        self.version += 1

    def remove(self, endpoint: _native.Endpoint) -> None:
        self.all = [own for own in self.all if own.endpoint is not endpoint]
        self.version += 1
        # The data plane frees its objects.
        self.lingering = deque(own for own in self.lingering if own[1] is not endpoint)
        if not self.all and self.fetches is not None and self.puts is not None:
            self.fetches.shutdown(wait=False)
            self.puts.shutdown(wait=False)
            self.fetches = self.puts = None

    def announced(self) -> dict[str, bool]:
        """Return the clusters of the data planes, and whether they authenticate others."""
        return {own.cluster: own.authenticates for own in self.all}

    def avoids(self) -> list[str]:
        """Return the addresses of the data planes from which frames could not be fetched recently."""
        now = time.monotonic()
        self.avoided = {address: until for address, until in self.avoided.items() if until > now}
        return list(self.avoided)

    def avoid(self, address: str) -> None:
        self.avoided[address] = time.monotonic() + AVOID_S

    def shared_with(self, remote: dict[str, bool], encrypted: bool, server: Any) -> Plane | None:
        """Return a data plane that the other end of a connection can use, given its announcement; if possible the
        server's.

        Args:
            server: Dask's server whose connection it is, if that is known. Several workers may live in this process.
        """
        plugin = getattr(server, "plugins", {}).get("mission-control")
        known = (own for own in self.all if own.cluster in remote)
        usable = [own for own in known if not encrypted or (own.authenticates and remote[own.cluster])]
        # The scheduler's plug-in has no data plane.
        endpoint = getattr(plugin, "endpoint", None)
        mine = (own for own in usable if own.endpoint is endpoint)
        return next(mine, None) or next(iter(usable), None)

    def linger(self, kept: dict[int, tuple[_native.Endpoint, str]]) -> None:
        """Take over the objects of an ended connection."""
        until = time.monotonic() + LINGER_S
        while kept:
            _, (endpoint, name) = kept.popitem()
            self.lingering.append((until, endpoint, name))

    def sweep(self) -> None:
        """Free objects whose time is over."""
        while self.lingering and self.lingering[0][0] <= time.monotonic():
            _, endpoint, name = self.lingering.popleft()
            free(endpoint, name)


def cluster_of(token: bytes) -> str:
    """Return a name for a cluster that reveals nothing about the token."""
    return hashlib.sha256(b"mission:// " + token).hexdigest()[:32]


def free(endpoint: _native.Endpoint, name: str) -> None:
    # A data plane that is closed has freed everything.
    with suppress(RuntimeError):
        endpoint.free(name)


PLANES = Planes()


# --- a connection ---------------------------------------------------------------------------------------------------


class MissionComm(TCP):
    """A connection between two processes of Dask."""

    stream: IOStream | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # TCP's constructor makes the finalizer.
        self.kept: dict[int, tuple[_native.Endpoint, str]] = {}
        """By the message's number: objects with frames that the reader may not have yet."""
        self.written = 0
        """Number of the last message with frames on the data plane."""
        self.to_acknowledge = 0
        """Number of the last such message that was read, until it is acknowledged."""
        self.mark = secrets.token_hex(16)
        self.listener: MissionListener | None = None
        """The listener that accepted this connection, if it was accepted here."""
        self.shared: Plane | None = None
        self.looked_at = -1
        """The version of :data:`PLANES` for which that was chosen."""
        super().__init__(*args, **kwargs)

    def _read_extra(self) -> None:
        if isinstance(self.stream, SSLIOStream):
            TLS._read_extra(self)

    def _get_finalizer(self) -> Any:
        close, kept = super()._get_finalizer(), self.kept

        def finalize() -> None:
            close()
            PLANES.linger(kept)

        return finalize

    def handshake_info(self) -> dict[str, Any]:
        said = {
            "clusters": PLANES.announced(),
            HAS_PLANE: bool(PLANES.all),
            AVOIDS: PLANES.avoids(),
            MARK: self.mark,
        }
        return {**super().handshake_info(), HANDSHAKE: said}

    def plane(self) -> Plane | None:
        """Return the data plane that carries the frames of large messages; ``None``: the connection does."""
        announced = self.remote_info.get(HANDSHAKE)
        announced = announced.get("clusters") if isinstance(announced, dict) else None
        if not isinstance(announced, dict) or MARK not in self.remote_info[HANDSHAKE]:
            return None
        if self.looked_at != PLANES.version:
            version = PLANES.version
            self.shared = PLANES.shared_with(announced, self.is_encrypted, self.server())
            self.looked_at = version
        return self.shared

    def server(self) -> Any:
        """Return Dask's server whose connection it is; ``None`` where it has none that is known."""
        if self.listener is not None:
            return getattr(self.listener.comm_handler, "__self__", None)
        # Dask's connection pool has a weak reference to its server.
        pool = getattr(self, "_pool", lambda: None)()
        server = getattr(pool, "server", None)
        return server() if server is not None else None

    def refuses(self, whose: Whose) -> str | None:
        """Return why data of a transfer may not be sent to a worker; ``None``: it may.

        Clients and schedulers have no data plane, so they receive ordinary messages of Dask.
        """
        if not whose.is_secret or self.is_encrypted or self.plane() is not None:
            return None
        why = f"shares none with {self._local_addr}" if self.has_plane else "has none; its log says why"
        return f"job {whose.job} demands encryption, which needs the data plane, and {self._peer_addr} {why}"

    @property
    def has_plane(self) -> bool:
        """Whether the other end has a data plane, reachable or not."""
        announced = self.remote_info.get(HANDSHAKE)
        return isinstance(announced, dict) and bool(announced.get(HAS_PLANE))

    def is_avoided(self, plane: Plane) -> bool:
        """Whether the other end prefers the connection to this data plane, for messages that may use either."""
        announced = self.remote_info.get(HANDSHAKE)
        avoided = announced.get(AVOIDS) if isinstance(announced, dict) else None
        return isinstance(avoided, list | tuple) and plane.address in avoided

    @property
    def is_encrypted(self) -> bool:
        return isinstance(self.stream, SSLIOStream)

    # --- writing ------------------------------------------------------------------------------------------------------

    async def write(self, msg: Any, serializers: Any = None, on_error: str = "message") -> int:
        self.acknowledge()
        whose, plane = _whose.get(), self.plane()
        if plane is None:
            if self.has_plane and (why := self.refuses(whose)) is not None:
                raise CommClosedError(why)
            return await super().write(msg, serializers, on_error)
        # The connection must never carry it: it lacks the security that the job demands.
        secret = whose.is_secret and not self.is_encrypted
        if self.is_avoided(plane) and not secret:
            return await super().write(msg, serializers, on_error)
        if self.stream is None:
            raise CommClosedError()
        frames = await to_frames(
            msg,
            allow_offload=self.allow_offload,
            serializers=serializers,
            on_error=on_error,
            context={"sender": self.local_info, "recipient": self.remote_info, **self.handshake_options},
            frame_split_size=UNSPLIT,
        )
        if self.stream is None:
            raise CommClosedError()
        # Cast to bytes: buffers of NumPy's arrays have a format.
        frames = [ensure_memoryview(frame) for frame in frames]
        sizes = [frame.nbytes for frame in frames]
        if sum(sizes) < EAGER_BYTES and not secret:
            return self.write_frames(frames)
        least = 1 if secret else FRAME_BYTES
        large = [number for number, size in enumerate(sizes) if size >= least]
        if (not large or len(large) > FRAMES_MAX or len(self.kept) >= KEPT_MAX) and not secret:
            return self.write_frames(frames)
        try:
            name = await self.keep(plane.endpoint, [frames[number] for number in large], whose)
        except (OSError, RuntimeError) as error:
            # There is no memory, or no room in the spool, or the data plane closes.
            if secret:
                raise CommClosedError(
                    f"in {self}: results of job {whose.job} must be encrypted, and the data plane has no room: {error}"
                ) from error
            logger.info("A message goes through its connection: %s", error)
            return self.write_frames(frames)
        self.written += 1
        self.kept[self.written] = (plane.endpoint, name)
        if self.stream is None:
            self.free_all()
            raise CommClosedError()
        small = [bytes(frame) if size < least else b"" for frame, size in zip(frames, sizes, strict=True)]
        said = {
            "number": self.written,
            "cluster": plane.cluster,
            "object": name,
            "address": plane.address,
            "large": [(number, sizes[number]) for number in large],
            "frames": small,
            "job": whose.job,
            "from": whose.source,
            "to": whose.to,
            "demands": json.dumps(whose.demands),
        }
        return sum(sizes) + await super().write({FRAMES: said, MARK: self.remote_info[HANDSHAKE][MARK]})

    def write_frames(self, frames: list[Any]) -> int:
        """Send a message whose frames are there already, as :class:`TCP` does; small frames together."""
        prelude = pack_frames_prelude(frames)
        nbytes = len(prelude) + sum(frame.nbytes for frame in frames)
        stream = self.stream
        if stream is None:
            raise CommClosedError()
        together: list[Any] = [struct.pack("Q", nbytes), prelude]
        size = 0
        try:
            for frame in frames:
                together.append(frame)
                size += frame.nbytes
                if size < FRAME_BYTES:
                    continue
                # A large frame is not copied, but small ones are one call.
                large = together.pop() if frame.nbytes >= FRAME_BYTES else frame[:0]
                stream.write(b"".join(together))
                for at in range(0, large.nbytes, WRITE_BYTES):
                    stream.write(large[at : at + WRITE_BYTES])
                together, size = [], 0
            stream.write(b"".join(together))
        except StreamClosedError as error:
            self.stream = None
            self._closed = True
            convert_stream_closed_error(self, error)
        except BaseException:
            # How many bytes were sent is not known.
            self.abort()
            raise
        return nbytes

    async def keep(self, endpoint: _native.Endpoint, frames: list[Any], whose: Whose) -> str:
        """Copy frames to the data plane, because the caller may change or free the memory once the message is
        written."""
        PLANES.sweep()
        if PLANES.puts is None:
            raise RuntimeError("the data plane closes")
        put = PLANES.puts.submit(endpoint.put, frames, whose.job, json.dumps(whose.demands))
        try:
            name, _ = await asyncio.wrap_future(put)
        except asyncio.CancelledError:
            put.add_done_callback(
                lambda done: None if done.cancelled() or done.exception() else free_of(endpoint, done)
            )
            raise
        return name

    # --- reading ------------------------------------------------------------------------------------------------------

    async def read(self, deserializers: Any = None) -> Any:
        while True:
            msg = await super().read(deserializers)
            if not self.remote_info or type(msg) is not dict or msg.get(MARK) != self.mark:
                return msg
            if RECEIVED in msg:
                self.received(msg[RECEIVED])
            else:
                return await self.read_frames(msg[FRAMES], deserializers)

    def received(self, number: int) -> None:
        """Handle an acknowledgment: the reader has the frames of all messages up to this one."""
        for own in [own for own in self.kept if own <= number]:
            free(*self.kept.pop(own))

    async def read_frames(self, said: dict[str, Any], deserializers: Any) -> Any:
        """Fetch the frames of a message.

        Raises:
            CommClosedError: They cannot be fetched. The connection is aborted.
        """
        plane = self.plane()
        try:
            if plane is None or plane.cluster != said["cluster"] or PLANES.fetches is None:
                raise CommClosedError(f"{self} announced frames, but the data plane is gone")
            numbers = {number for number, _ in said["large"]}
            if len(numbers) != len(said["large"]) or not numbers <= set(range(len(said["frames"]))):
                raise CommClosedError(f"{self} announced frames that make no sense")
            wanted = [(said["object"], part, size, [said["address"]]) for part, (_, size) in enumerate(said["large"])]
            transfer = (said["job"], said["from"], said["to"], said["demands"])
            fetched = PLANES.fetches.submit(plane.endpoint.receive, *transfer, wanted, lambda: self.stream is None)
            segments = await self.unless_aborted(asyncio.wrap_future(fetched))
        except (_native.TransferError, RuntimeError, OSError) as error:
            # Raise no other kind of error: after one, a task that waits for the message waits for ever
            # (dask/distributed issue 6705).
            raise self.failed(error, said) from error
        except BaseException:
            # Cancelled.
            self.abort()
            raise
        self.to_acknowledge = said["number"]
        asyncio.get_running_loop().call_later(ACKNOWLEDGE_WITHIN_S, self.acknowledge)
        frames: list[Any] = [memoryview(frame) for frame in said["frames"]]
        for (number, _), segment in zip(said["large"], segments, strict=True):
            frames[number] = memoryview(segment)
        try:
            msg = await from_frames(
                frames, deserialize=self.deserialize, deserializers=deserializers, allow_offload=self.allow_offload
            )
        except EOFError:
            self.abort()
            raise CommClosedError("aborted stream on truncated data") from None
        whose = Whose(said["job"], said["from"], said["to"], json.loads(said["demands"]))
        if whose.is_secret and isinstance(msg, dict) and isinstance(msg.get("data"), dict):
            self.inherit(whose, msg["data"])
        return msg

    def inherit(self, whose: Whose, keys: Iterable[Any]) -> None:
        """Require that results that arrived encrypted leave encrypted: only the worker that computes them gets
        annotations."""
        plugin = getattr(self.server(), "plugins", {}).get("mission-control")
        if plugin is not None:
            plugin.inherited.add(keys, whose)

    def failed(self, error: Exception, said: dict[str, Any]) -> CommClosedError:
        """Abort. If frames cannot be fetched from this peer, the next connection with it carries what may go through
        it."""
        if isinstance(error, _native.Denied | _native.Unreachable):
            PLANES.avoid(said["address"])
        self.abort()
        return CommClosedError(f"in {self}: frames of a message could not be fetched: {error}")

    async def unless_aborted(self, fetched: asyncio.Future[Any]) -> Any:
        """Wait for a fetch; it ends by itself if the owner of the object is gone."""
        while not fetched.done():
            await asyncio.wait({fetched}, timeout=LOOK_EVERY_S)
            if self.stream is None and not fetched.done():
                fetched.cancel()
                raise CommClosedError(f"{self} was aborted")
        return fetched.result()

    # --- the end of frames --------------------------------------------------------------------------------------------

    def acknowledge(self) -> None:
        """Acknowledge messages with frames that were read, if there are new ones."""
        number, self.to_acknowledge = self.to_acknowledge, 0
        if number and self.stream is not None:
            frames = dumps({RECEIVED: number, MARK: self.remote_info[HANDSHAKE][MARK]})
            with suppress(CommClosedError):
                self.write_frames([ensure_memoryview(frame) for frame in frames])

    def free_all(self) -> None:
        while self.kept:
            _, (endpoint, name) = self.kept.popitem()
            free(endpoint, name)

    @gen.coroutine
    def close(self) -> Generator[Any, Any, None]:
        """Begin to close at once, even if nobody awaits the result, as :class:`TCP` does."""
        self.acknowledge()
        try:
            yield super().close()
        finally:
            PLANES.linger(self.kept)

    def abort(self) -> None:
        super().abort()
        self.free_all()


def free_of(endpoint: _native.Endpoint, put: Any) -> None:
    free(endpoint, put.result()[0])


# --- Dask's entry point ---------------------------------------------------------------------------------------------


class MissionConnector(BaseTCPConnector):
    prefix = "mission://"
    comm_class = MissionComm

    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Any:
        self.encrypted = connection_args.get("ssl_context") is not None
        return await super().connect(address, deserialize, **connection_args)

    def _get_connect_args(self, **connection_args: Any) -> dict[str, Any]:
        return TLSConnector._get_connect_args(self, **connection_args) if self.encrypted else {}


class MissionListener(BaseTCPListener):
    prefix = "mission://"
    comm_class = MissionComm

    def __init__(
        self, address: str, comm_handler: Any, *args: Any, default_host: str | None = None, **connection_args: Any
    ) -> None:
        self.encrypted = connection_args.get("ssl_context") is not None
        default_host = default_host or host_towards_scheduler(comm_handler)
        super().__init__(address, comm_handler, *args, default_host=default_host, **connection_args)

    def _get_server_args(self, **connection_args: Any) -> dict[str, Any]:
        return TLSListener._get_server_args(self, **connection_args) if self.encrypted else {}

    async def on_connection(self, comm: Any, handshake_overrides: dict[str, Any] | None = None) -> None:
        comm.listener = self
        await super().on_connection(comm, handshake_overrides)

    async def _prepare_stream(self, stream: Any, address: str) -> Any:
        return await TLSListener._prepare_stream(self, stream, address) if self.encrypted else stream


class MissionBackend(BaseTCPBackend):
    """Dask's backend for ``mission://``: TLS if its settings have certificates, otherwise TCP."""

    _connector_class = MissionConnector
    _listener_class = MissionListener


def host_towards_scheduler(comm_handler: Any) -> str | None:
    """Return this host's address on the network of a worker's scheduler; ``None``: the server is no worker.

    A worker announces that address if it was given none. Dask does this itself for ``tcp://`` and ``tls://`` only
    (``Worker.start_unsafe``).
    """
    scheduler = getattr(getattr(comm_handler, "__self__", None), "scheduler", None)
    address = getattr(scheduler, "address", None)
    return get_ip(get_address_host(address)) if address else None


def clear_addresses(server: Scheduler | Worker, role: str) -> list[str]:
    """Return the addresses where a server of Dask listens without TLS."""
    has_context = server.security.get_connection_args(role).get("ssl_context") is not None
    addresses = [listener.contact_address for listener in server.listeners]
    return [
        own for own in addresses if not (own.startswith("tls://") or (own.startswith("mission://") and has_context))
    ]


def is_encrypted(server: Scheduler | Worker, role: str) -> bool:
    """Whether a server of Dask uses TLS only, at all addresses where it listens."""
    return bool(server.listeners) and not clear_addresses(server, role)


def requires_encryption(server: Scheduler | Worker, role: str) -> bool:
    """Whether the data plane has to encrypt everything. With ``tls://`` it follows each job's demands."""
    return server.address.startswith("mission://") and is_encrypted(server, role)
