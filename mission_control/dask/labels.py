"""What keys and annotations of Dask's tasks say, as core takes it. Any program may have written anything there."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from mission_control.dask.seams.seam import ERRORS
from mission_control.jobs import UNDEMANDING


def as_json(spec: Any) -> str:
    """Return a job's specification from annotations, into which a client may write anything."""
    try:
        return json.dumps(spec, sort_keys=True)
    except ERRORS:  # of the program's own classes, too
        return json.dumps(f"a {type(spec).__name__}")  # such an annotation is no specification


def as_text(text: str) -> str:
    """Return a text that UTF-8 has: keys and names of programs may have halves of characters."""
    return text if text.isascii() else text.encode(errors="replace").decode()


@lru_cache(256)
def parsed(spec: str) -> dict[str, Any]:
    return json.loads(spec)


@lru_cache(256)
def for_worker(spec: str) -> dict[str, Any]:
    """Return what a worker needs to know of a job, without default values, because it travels with each task."""
    job = parsed(spec)
    usual = {"priority": 1.0, "demands": UNDEMANDING}
    return {"job": job["job"]} | {name: job[name] for name, other in usual.items() if job[name] != other}


@lru_cache(10_000)
def kind_of(stage: str) -> str:
    """Return the role of a stage's tasks in the graph (docs/explanation/design-control.md)."""
    if stage.startswith("shuffle-barrier"):
        return "barrier"
    return "select" if stage == "getitem" or stage.startswith("split-") else "work"
