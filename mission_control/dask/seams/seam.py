"""A seam: one method of Dask that Mission Control replaces, and how it is put back.

Dask has no hooks in these places. What stands there runs inside Dask's own transitions and handlers, so an error of
ours must not reach them: it would leave tasks pending for ever, or close a worker. Seams that belong together are a
*part*. A part that fails once is switched off for good, as a whole: Dask goes on with its own methods. An error of
Dask, or of the user's code that Dask calls, passes through unchanged.

Each plug-in has one :class:`Parts`: what it has replaced is undone as a whole.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from mission_control import _native

logger = logging.getLogger(__name__)

ERRORS = (Exception, _native.PanicException)
"""What a part may raise by mistake. A panic of Rust is no `Exception` in Python."""


CONTENDED = "while two jobs or more are named"
"""When what shares between jobs is in place."""


@dataclass(frozen=True)
class Seam:
    """One method or attribute of Dask that a part replaces. `docs/explanation/design-dask.md` lists all of them."""

    owner: str
    """The class of Dask that has it, or its module."""
    name: str
    does: str
    """What the replacement does, for the list."""
    parameters: tuple[str, ...] | None = None
    """First parameters of Dask's method; if they differ, this version of Dask is not known. ``None``: any."""
    deliberate: tuple[type[BaseException], ...] = ()
    """Errors that the replacement raises on purpose, as Dask's method may."""
    when: str = "always"
    """When the replacement is in place, for the list."""

    all: ClassVar[list[Seam]] = []

    def __post_init__(self) -> None:
        Seam.all.append(self)

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"

    def fits(self, original: Any) -> bool:
        """Whether Dask's method is as expected."""
        if not callable(original):
            return False
        if self.parameters is None:
            return True
        try:
            known = tuple(inspect.signature(original).parameters)
        except (TypeError, ValueError):
            return False
        return known[: len(self.parameters)] == self.parameters


class Parts:
    """All that one plug-in has replaced in Dask.

    Args:
        where: The process in words, for the log: ``this worker``.
        soon: Calls a function in Dask's event loop, after the current event. May be called in any thread.
        report: Called with the name of a part that was switched off, and why; in any thread.
    """

    def __init__(
        self,
        where: str,
        soon: Callable[[Callable[[], Any]], Any],
        report: Callable[[str, str], Any] = lambda name, why: None,
    ):
        self.where, self.soon, self.report = where, soon, report
        self.off: dict[str, str] = {}
        """By the name of a part that was switched off: why."""
        self.faults: dict[str, str] = {}
        """By the name of a callback that has failed: its first error. It stays in use."""
        self.installed: list[Part] = []

    def part(self, name: str, without: str) -> Part:
        """Begin a part; it is switched off already if it failed before.

        Args:
            without: What users do not have without it, for the log.
        """
        part = Part(self, name, without)
        self.installed.append(part)
        return part

    def switch_off(self, name: str, why: str, without: str, error: BaseException | None = None) -> None:
        """Note that a part is off for good. Logged once."""
        if name in self.off:
            return
        self.off[name] = why
        text = "Mission Control's part %r is off on %s, and Dask goes on without it: %s (%s)"
        logger.warning(text, name, self.where, why, without, exc_info=error)
        self._report(name, why)

    def _report(self, name: str, why: str) -> None:
        try:
            self.report(name, why)
        except ERRORS:
            logger.debug("the report that %s is off was not sent", name, exc_info=True)

    def undo(self) -> None:
        """Put back everything, the last first."""
        while self.installed:
            self.installed[-1].undo()

    def callback(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that Dask calls, a callback of a plug-in or a handler, so that it never raises.

        Its event is lost, but the next ones may be handled, so it stays. The first error of each is logged.
        """
        name = getattr(function, "__name__", "a callback")

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                try:
                    return await function(*args, **kwargs)
                except ERRORS as error:
                    self.fault(name, error)

            return call_async

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except ERRORS as error:
                self.fault(name, error)

        return call

    def fault(self, name: str, error: BaseException) -> None:
        """Note that a callback has failed. Its first error is logged."""
        if name not in self.faults:
            self.faults[name] = reason(error)
            text = "An event of Mission Control's %s was lost on %s; the next ones are handled: %s"
            logger.warning(text, name, self.where, self.faults[name], exc_info=error)
            self._report(name, self.faults[name])


class Part:
    """Seams that belong together, of one plug-in. Made by :meth:`Parts.part`."""

    def __init__(self, parts: Parts, name: str, without: str):
        self.parts, self.name, self.without = parts, name, without
        self.stack = ExitStack()
        self.undone = False

    @property
    def is_off(self) -> bool:
        """Whether Dask's own methods run: it has failed, or was undone."""
        return self.undone or self.name in self.parts.off

    def fail(self, error: BaseException) -> None:
        """Switch the part off for good, because of an error of ours.

        Its methods pass everything to Dask's at once. What it has replaced is put back after the current event: Dask
        may be in the middle of it.
        """
        self.parts.switch_off(self.name, reason(error), self.without, error)
        self.parts.soon(self.undo)

    def unknown(self, what: str) -> None:
        """Switch the part off: this version of Dask is not as expected."""
        self.parts.switch_off(
            self.name, f"this version of Dask has no {what} as Mission Control knows it", self.without
        )
        self.undo()

    def replace(self, seam: Seam, owner: Any, ours: Callable[..., Any]) -> bool:
        """Replace a method of one object (its class keeps the original), or an entry of a dictionary of handlers.

        An object without a dictionary of its own (`__slots__`) gets a class of its own, derived from Dask's.

        Args:
            ours: Takes the original first, then the arguments.

        Returns:
            False if the part is off: then nothing was replaced, or everything is back.
        """
        return self.put_in(seam, owner, lambda original: self.guard(ours, original, seam.deliberate))

    def put_in(self, seam: Seam, owner: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
        """As :meth:`replace`, for a method that Dask calls so often that each microsecond counts.

        Args:
            make: Takes the original, and returns the replacement. That sees to its own errors: it passes everything to
                the original where the part is off, and calls :meth:`fail`.
        """
        if self.is_off:
            return False
        in_dict = isinstance(owner, dict)
        original = owner.get(seam.name) if in_dict else getattr(owner, seam.name, None)
        if original is None or not seam.fits(original):
            self.unknown(str(seam))
            return False
        replaced = make(original)
        if not in_dict and not hasattr(owner, "__dict__"):
            _override(self.stack, owner, seam.name, replaced)
            return True
        had = in_dict or seam.name in vars(owner)
        if in_dict:
            owner[seam.name] = replaced
        else:
            setattr(owner, seam.name, replaced)

        def restore() -> None:
            now = owner.get(seam.name) if in_dict else vars(owner).get(seam.name)
            if now is not replaced:
                return  # somebody has replaced it since, and calls ours, which passes everything on
            if in_dict:
                owner[seam.name] = original
            elif had:
                setattr(owner, seam.name, original)
            else:
                delattr(owner, seam.name)

        self.stack.callback(restore)
        return True

    def guard(
        self, ours: Callable[..., Any], original: Callable[..., Any], deliberate: tuple[type[BaseException], ...] = ()
    ) -> Callable[..., Any]:
        """Return `ours` with `original` as its first argument; if it fails, the part is switched off, and the call is
        made as without it."""

        def failed(error: BaseException, inner: _Original) -> None:
            """Raise the error again if it is not ours."""
            if error is inner.raised:
                raise error
            self.fail(error)
            if inner.raised is not None:
                raise inner.raised from None

        if inspect.iscoroutinefunction(ours):

            @functools.wraps(original)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                if self.is_off:
                    return await _awaited(original(*args, **kwargs))
                inner = _OriginalAsync(original)
                try:
                    return await ours(inner, *args, **kwargs)
                except deliberate:
                    raise
                except ERRORS as error:
                    failed(error, inner)
                return inner.value if inner.returned else await _awaited(original(*args, **kwargs))

            return call_async

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_off:
                return original(*args, **kwargs)
            inner = _Original(original)
            try:
                return ours(inner, *args, **kwargs)
            except deliberate:
                raise
            except ERRORS as error:
                failed(error, inner)
            return inner.value if inner.returned else original(*args, **kwargs)

        return call

    def undo(self) -> None:
        """Put back what the part has replaced. Another part of this name may begin again, unless this one failed."""
        with suppress(ValueError):
            self.parts.installed.remove(self)
        self.undone = True
        # Several threads may come here: each takes what is left.
        stack, self.stack = self.stack, ExitStack()
        stack.close()


def _override(undo: ExitStack, owner: Any, name: str, method: Callable[..., Any]) -> None:
    """Give one object another method, by a class that only this object has. Parts may come and go in any order."""
    kind = type(owner)
    if not hasattr(kind, "mission_control_plain"):
        kind = type(kind.__name__, (kind,), {"__slots__": (), "mission_control_plain": kind})
        owner.__class__ = kind
    setattr(kind, name, staticmethod(method))

    def restore() -> None:
        # Another part may have replaced it since; that passes on to ours, which passes on to Dask's.
        if getattr(vars(kind).get(name), "__func__", None) is method:
            delattr(kind, name)
        if not any(isinstance(own, staticmethod) for own in vars(kind).values()) and type(owner) is kind:
            owner.__class__ = kind.mission_control_plain

    undo.callback(restore)


class _Original:
    """Dask's method during one call of ours: what came of it, if it was called. It must not be called twice."""

    __slots__ = ("method", "raised", "returned", "value")

    def __init__(self, method: Callable[..., Any]):
        self.method = method
        self.raised: BaseException | None = None
        self.returned = False
        self.value: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.value = self.method(*args, **kwargs)
        except BaseException as error:
            self.raised = error
            raise
        self.returned = True
        return self.value


class _OriginalAsync(_Original):
    __slots__ = ()

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.value = await _awaited(self.method(*args, **kwargs))
        except BaseException as error:
            self.raised = error
            raise
        self.returned = True
        return self.value


async def _awaited(value: Any) -> Any:
    """What Dask's method returns: a coroutine may stand in for a plain method where Dask calls both."""
    return await value if inspect.isawaitable(value) else value


def reason(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
