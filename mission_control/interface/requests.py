"""Requests of programs to a worker over its local socket, and their answers (docs/how-to/tasks.md)."""

from __future__ import annotations

import json
import logging
import os
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from distributed.comm import CommClosedError

from mission_control import _native
from mission_control.interface.calls import (
    PARTS_MAX,
    BadRequest,
    call_of,
    described,
    is_size,
    number,
    plain,
    reference_of,
    seconds,
    shown,
)
from mission_control.interface.session import Conflict, Session, Stopped
from mission_control.map_reduce.phases import PHASES
from mission_control.programs.process import ProgramFailed
from mission_control.streams import AHEAD_BYTES, StreamReference

if TYPE_CHECKING:
    from mission_control.interface.server import Executor, Server

logger = logging.getLogger(__name__)

JSON_BYTES_MAX = 8 << 20
"""Largest JSON body: while Python parses it, for some tenths of a second, no other thread of the worker runs."""
BODY_BYTES_MAX = 512 << 20
"""Memory for all large bodies together that are not complete yet."""
PIECE_BYTES = 1 << 20
"""Memory for a body is reserved in steps of this size as it arrives; a smaller body never waits for another."""
WRITE_BYTES_MAX = 256 << 20
"""Largest write to a stream; it is held in memory until it is written."""
PROGRESS_S = 60.0
"""Seconds in a request without data from the program, or of waiting for others' bodies."""
LOOK_S = 0.05
"""Seconds between two attempts of a body that waits for memory."""
NEXT_S = 20.0
"""Longest wait in a request of an executor for its next task; then it requests again."""


class Refused(Exception):
    """The request is answered with this status, and has no effect."""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


def status_of(error: Exception) -> int:
    """Return the HTTP status for an error."""
    if isinstance(error, Refused):
        return error.status
    kinds: list[tuple[type[Exception] | tuple[type[Exception], ...], int]] = [
        ((Stopped, _native.Cancelled), 410),
        (Conflict, 409),
        (_native.TransferError, 502),
        ((TimeoutError, CommClosedError), 504),
        (OSError, 507),
        ((ValueError, TypeError, IndexError, RuntimeError), 400),
    ]
    return next((status for kind, status in kinds if isinstance(error, kind)), 500)


class Handler(BaseHTTPRequestHandler):
    """One connection of a program."""

    protocol_version = "HTTP/1.1"
    server: Server
    begun = False
    """Whether the status of the answer has been sent."""
    unread = 0
    """Bytes of the request's body that are still to be read."""

    def log_message(self, *args: Any) -> None:
        pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer invalid HTTP."""
        self.close_connection = True
        self.request_version = self.protocol_version
        self._say({"error": message or "this is no HTTP request", "kind": "BadRequest"}, int(code))

    def do_GET(self) -> None:
        self.begun = False
        self.unread = 0
        self.connection.settimeout(PROGRESS_S)
        holder = None
        try:
            self.unread = self._length()
            route = self._route()
            holder = self._holder()
            route(self, holder)
        except Exception as error:
            self._fail(error, holder)
        finally:
            self.connection.settimeout(None)
            if self.unread:
                self.close_connection = True

    do_POST = do_PUT = do_DELETE = do_GET

    def _route(self) -> Callable[[Handler, Any], None]:
        path = urlsplit(self.path).path
        if path not in ROUTES:
            raise Refused(404, f"there is no {shown(path)}; there are {' '.join(ROUTES)}")
        method, route = ROUTES[path]
        # `curl -T` sends PUT.
        if self.command != method and (method, self.command) != ("POST", "PUT"):
            raise Refused(405, f"{path} takes {method}")
        return route

    def _holder(self) -> Session | Executor:
        """Return the task, or the executor, whose credential this is."""
        kind, _, credential = self.headers.get("Authorization", "").partition(" ")
        interface = self.server.interface
        with interface.lock:
            path = urlsplit(self.path).path
            found: Session | Executor | None = None
            if kind.lower() == "bearer" and path != "/next":
                found = interface.sessions.get(credential.strip())
            if kind.lower() == "bearer" and path in ("/next", "/unmap"):
                found = found or interface.executors.get(credential.strip())
        if found is None:
            raise Refused(
                401,
                "send 'Authorization: Bearer ..' with the credential of a task that runs ($MISSION_CONTROL_CREDENTIAL)",
            )
        return found

    # --- requests ---------------------------------------------------------------------------------------------------

    def _length(self) -> int:
        if "Transfer-Encoding" in self.headers:
            self.close_connection = True
            raise Refused(411, "send the length of the body (Content-Length), and not in chunks")
        text = self.headers.get("Content-Length", "0")
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            self.close_connection = True
            raise Refused(400, f"Content-Length: {shown(text)} is no number of bytes")
        return int(text)

    def _read_into(self, view: memoryview) -> None:
        while view:
            got = self.rfile.readinto(view)
            if not got:
                raise Refused(400, "the body is shorter than its length")
            self.unread -= got
            view = view[got:]

    @contextmanager
    def _body(self, most: int) -> Iterator[bytearray]:
        """Read a body of at most this number of bytes."""
        length, interface = self.unread, self.server.interface
        if length > most:
            raise Refused(413, f"a body of {length} bytes: at most {most} are taken here")
        counted = length if length > PIECE_BYTES else 0
        deadline = time.monotonic() + PROGRESS_S
        while not interface.holds(counted):
            if time.monotonic() > deadline:
                raise Refused(503, "this worker holds too much of other requests: ask again")
            time.sleep(LOOK_S)
        try:
            yield self._read_some(length)
        finally:
            interface.holds(-counted)

    def _read_some(self, count: int) -> bytearray:
        """Read the beginning of the body."""
        if count > self.unread:
            raise BadRequest(f"the body has {self.unread} bytes, and is to begin with {count}")
        content = bytearray()
        while len(content) < count:
            piece = bytearray(min(count - len(content), PIECE_BYTES))
            self._read_into(memoryview(piece))
            content += piece
        return content

    def _json(self) -> dict[str, Any]:
        with self._body(JSON_BYTES_MAX) as body:
            try:
                given = json.loads(body or b"{}")
            except (ValueError, RecursionError) as error:
                raise BadRequest(f"the body is no JSON: {error}") from None
        if not isinstance(given, dict):
            raise BadRequest(f"the body is a JSON object, not {shown(given)}")
        return given

    def _query(self, names: tuple[str, ...]) -> dict[str, Any]:
        given = parse_qs(urlsplit(self.path).query, keep_blank_values=True, max_num_fields=16)
        if more := sorted(given.keys() - set(names)):
            raise BadRequest(f"?{more[0]}=: there are {', '.join(names)}")
        try:
            return {name: int(values[-1]) if name != "sizes" else values[-1] for name, values in given.items()}
        except ValueError as error:
            raise BadRequest(f"a number is wanted in {shown(self.path)}: {error}") from None

    # --- answers ----------------------------------------------------------------------------------------------------

    def _begin(self, status: int, kind: str, length: int | None, **more: str) -> None:
        self.begun = True
        self.send_response_only(status)
        self.send_header("Content-Type", kind)
        if length is None:
            self.send_header("Transfer-Encoding", "chunked")
        elif status != 204:
            self.send_header("Content-Length", str(length))
        for name, value in more.items():
            self.send_header(name.replace("_", "-"), value)
        if self.unread or self.close_connection:
            # The rest of the body would be parsed as the next request.
            self.close_connection = True
            self.send_header("Connection", "close")
        self.end_headers()

    def _say(self, said: dict[str, Any] | None, status: int = 200) -> None:
        body = b"" if said is None else json.dumps(said).encode() + b"\n"
        self._begin(204 if said is None else status, "application/json", len(body))
        self.wfile.write(body)

    def _fail(self, error: Exception, holder: Session | Executor | None) -> None:
        status = status_of(error)
        if status == 500:
            logger.exception("%s failed", shown(self.path))
        if self.begun:
            # The answer is incomplete. The program may not notice, and use it as complete.
            self.close_connection = True
            if isinstance(holder, Session) and not isinstance(error, BrokenPipeError | ConnectionResetError | Stopped):
                holder.fail(ProgramFailed(f"its program did not receive all of an answer: {error}"))
            return
        with suppress(OSError):
            self._say({"error": str(error) or type(error).__name__, "kind": type(error).__name__}, status)

    # --- operations -------------------------------------------------------------------------------------------------

    def task(self, session: Session) -> None:
        self._say(session.what)

    def put(self, session: Session) -> None:
        given = self._query(("sizes", "parts", "copies", "keep"))
        table = array("Q", self._read_some(8 * number(given, "parts", 0, PARTS_MAX, default=0)))
        length = self.unread
        sizes = sizes_of(given["sizes"]) if "sizes" in given else list(table) if "parts" in given else [length]
        if sum(sizes) != length:
            raise BadRequest(f"the parts have {sum(sizes)} bytes together, and the body has {length}")
        segment = None
        if length:
            # Allocate memory for all of it only once it arrives.
            first = self._read_some(min(length, PIECE_BYTES))
            segment = session.allocate(length)
            view = memoryview(segment)
            view[: len(first)] = first
            self._read_into(view[len(first) :])
            view.release()
        copies = number(given, "copies", 1, 1 << 16, default=1)
        self._say({"reference": described(session.put(segment, sizes, copies, bool(given.get("keep"))))}, 201)

    def fetch(self, session: Session) -> None:
        given = self._json()
        reference = reference_of(given.get("reference"))
        if isinstance(reference, StreamReference):
            raise BadRequest("this is a reference to a stream: read it (/stream/read)")
        part = None if given.get("part") is None else number(given, "part", 0, max(len(reference) - 1, 0))
        parts = session.fetch(reference, part)
        if given.get("mapped") is True and len(parts) == 1 and (place := parts[0].place()) is not None:
            self._lease(session, parts[0], *place)
            return
        sizes = [len(own) for own in parts]
        # A header has at most 64 KiB; for that many parts, the program knows the sizes from the reference.
        more = {"Mission_Sizes": ",".join(map(str, sizes))} if len(sizes) <= 1000 else {}
        # The program may read the answer as slowly as it likes.
        self.connection.settimeout(None)
        with session.ended_with(self.connection):
            self._begin(200, "application/octet-stream", sum(sizes), **more)
            for own in parts:
                self.connection.sendall(memoryview(own))

    def _lease(self, session: Session, part: _native.Part, descriptor: int, start: int) -> None:
        """Return the location of a part, so that the program can map it."""
        lease = session.lease(part)
        said = {"path": f"/proc/{os.getpid()}/fd/{descriptor}", "start": start, "length": len(part), "lease": lease}
        body = json.dumps(said).encode()
        try:
            self._begin(200, "application/json", len(body), Mission_Lease=lease)
            self.wfile.write(body)
        except OSError:
            session.leases.release([lease])
            raise

    def unmap(self, holder: Session | Executor) -> None:
        leases = self._json().get("leases")
        if not isinstance(leases, list) or not all(isinstance(lease, str) for lease in leases):
            raise BadRequest(f"leases={shown(leases)}: give a list of what /fetch said")
        holder.leases.release(leases)
        self._say(None)

    def open_stream(self, session: Session) -> None:
        given = self._json()
        parts = number(given, "parts", 1, 1 << 20, default=1)
        ahead = number(given, "ahead", 0, 1 << 50, default=AHEAD_BYTES)
        self._say({"reference": described(session.open_stream(parts, ahead, given.get("keep") is True))}, 201)

    def write_stream(self, session: Session) -> None:
        part = number(self._query(("part",)), "part", 0, 1 << 20, default=0)
        with self._body(WRITE_BYTES_MAX) as content:
            session.write(part, content)
        self._say(None)

    def close_stream(self, session: Session) -> None:
        error = self._json().get("error")
        if error is not None and not isinstance(error, str):
            raise BadRequest(f"error={shown(error)}: give a text, or nothing")
        session.close_stream(error)
        self._say(None)

    def read_stream(self, session: Session) -> None:
        given = self._json()
        reference = reference_of(given.get("reference"))
        if not isinstance(reference, StreamReference):
            raise BadRequest("this is no reference to a stream: fetch it (/fetch)")
        part = number(given, "part", 0, reference.parts - 1, default=0)

        def send(buffer: memoryview) -> None:
            if not self.begun:
                self._begin(200, "application/octet-stream", None)
            # A chunk of length 0 would be the end.
            if len(buffer):
                self.connection.sendall(b"%x\r\n" % len(buffer))
                self.connection.sendall(buffer)
                self.connection.sendall(b"\r\n")

        self.connection.settimeout(None)
        with session.ended_with(self.connection):
            session.read(reference, part, send)
        if not self.begun:
            self._begin(200, "application/octet-stream", None)
        self.wfile.write(b"0\r\n\r\n")

    def spawn(self, session: Session) -> None:
        self._say({"future": session.spawn(call_of(self._json(), session.futures, session.jars))}, 201)

    def delegate(self, session: Session) -> None:
        session.delegate(call_of(self._json(), session.futures, session.jars))
        self._say(None)

    def phases(self, session: Session) -> None:
        given = self._json()
        if not given or given.keys() - set(PHASES):
            raise BadRequest(f"phases are seconds of {', '.join(PHASES)}: give some of them")
        session.plugin.note_phases(session.thread.key, {name: seconds(given, name) for name in given})
        self._say(None)

    def result(self, session: Session) -> None:
        given = self._json()
        if "reference" in given:
            session.end(reference_of(given["reference"]))
        elif "references" in given:
            if not isinstance(given["references"], list):
                raise BadRequest(f"references={shown(given['references'])}: give a list")
            references = [reference_of(own) for own in given["references"]]
            session.end((given["value"], references) if "value" in given else references)
        elif "value" in given:
            session.end(given["value"])
        else:
            raise BadRequest("a result has a value, a reference, references, or a value and references")
        self._say(None)

    def error(self, session: Session) -> None:
        text = self._json().get("error")
        if not isinstance(text, str):
            raise BadRequest(f"error={shown(text)}: give a text that says what went wrong")
        session.end(error=ProgramFailed(plain(text)))
        self._say(None)

    def next(self, executor: Executor) -> None:
        task = executor.next(NEXT_S)
        try:
            self._say(task)
        except OSError:
            if task is not None:
                executor.not_taken(task)
            raise


ROUTES: dict[str, tuple[str, Callable[[Handler, Any], None]]] = {
    "/task": ("GET", Handler.task),
    "/put": ("POST", Handler.put),
    "/fetch": ("POST", Handler.fetch),
    "/unmap": ("POST", Handler.unmap),
    "/stream/open": ("POST", Handler.open_stream),
    "/stream/write": ("POST", Handler.write_stream),
    "/stream/close": ("POST", Handler.close_stream),
    "/stream/read": ("POST", Handler.read_stream),
    "/spawn": ("POST", Handler.spawn),
    "/delegate": ("POST", Handler.delegate),
    "/phases": ("POST", Handler.phases),
    "/result": ("POST", Handler.result),
    "/error": ("POST", Handler.error),
    "/next": ("POST", Handler.next),
}


def sizes_of(text: str) -> list[int]:
    """Return the sizes of parts, as in ``3,0,4``."""
    words = text.split(",") if text else []
    if not all(word.isascii() and word.isdigit() and len(word) < 19 for word in words):
        raise BadRequest(f"sizes={shown(text)}: give the bytes of each part, as in sizes=3,0,4")
    sizes = [int(word) for word in words]
    if not all(is_size(size) for size in sizes):
        raise BadRequest(f"sizes={shown(text)}: give the bytes of each part")
    return sizes
