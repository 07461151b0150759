"""Helpers of tests that build a lab. They are not in conftest, because workers of tests import that, and must not check
the kernel."""

from __future__ import annotations

import pytest

from mission_control.lab.check import check

lacking = [f"{entry.what}: {entry.why}" for entry in check() if entry.needed and not entry.there]
NEEDS_LAB = [
    pytest.mark.lab,
    pytest.mark.skipif(bool(lacking), reason=f"no lab here: {'; '.join(lacking)} (mission lab check)"),
]
"""Marks of tests that build a lab."""
