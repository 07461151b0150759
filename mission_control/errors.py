"""Errors that end a command with one line. This module has no imports, because `mission --help` loads it."""

from __future__ import annotations


class BadInput(ValueError):
    """The user's input is wrong; the text is one line with a fix."""


class PrerequisiteMissing(RuntimeError):
    """A required program or privilege is missing; the text says how to get it."""


class EnvironmentFailed(RuntimeError):
    """A scheduler or worker that was started for the run ended, or did not answer; the text names it."""
