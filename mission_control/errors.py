"""Errors that end a command with one line. Without imports: `mission --help` loads this module."""

from __future__ import annotations


class BadInput(ValueError):
    """What the user gave is wrong; one line that names the fix."""


class PrerequisiteMissing(RuntimeError):
    """A program or privilege that this needs is not there; the text says how to get it."""


class EnvironmentFailed(RuntimeError):
    """A scheduler or worker that was started for this ended, or did not answer; the text says which."""
