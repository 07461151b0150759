"""Traces in the format of SWIM: a line for each job, fields separated by tabs.

The fields (SWIM's wiki, "Workloads repository"): name, submit time in seconds, seconds since the previous job, bytes of
map input, of the shuffle, and of reduce output; a seventh, the name of the input, is in some files and not read. Empty
lines and lines that begin with `#` are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mission_control.errors import BadInput

SAMPLES = Path(__file__).parent / "samples"
"""Traces that come with the package; each was synthesised from a shape."""
FIELDS = ("name", "submit time in s", "gap in s", "map input bytes", "shuffle bytes", "reduce output bytes")
BYTES_MAX = 1 << 60
"""Largest input, shuffle or output of a job; more is treated as a mistake."""
SECONDS_MAX = 10 * 366 * 86400
"""Longest trace in seconds: ten years."""
SHOWN_MAX = 40
"""Most characters of a wrong field in an error."""


@dataclass(frozen=True)
class TraceJob:
    """A job of a trace."""

    name: str
    submit_s: float
    """Seconds since the beginning of the trace."""
    input_bytes: int
    """Bytes that its map tasks read."""
    shuffle_bytes: int
    """Bytes from map to reduce tasks; 0: the job has no reduce tasks."""
    output_bytes: int
    """Bytes that the job writes."""


QUANTITIES = ("input_bytes", "shuffle_bytes", "output_bytes")
"""Quantities of a job, in the order of the file."""


def samples() -> list[str]:
    """Names of the traces that come with the package."""
    return sorted(path.stem for path in SAMPLES.glob("*.tsv"))


def find(name: str) -> Path:
    """Return the file of a trace: one of the package, by its name, or another one, by its path.

    Raises:
        BadInput: there is no such trace.
    """
    if name in samples():
        return SAMPLES / f"{name}.tsv"
    path, said = Path(name), name.encode(errors="replace").decode()
    use = f"name a file in SWIM's format, or {', '.join(samples())}"
    try:
        if path.is_dir() and name:
            raise BadInput(f"trace {said}: this is a folder; {use}")
        if not path.is_file():
            raise BadInput(f"trace {said}: there is no such file; {use}")
    except OSError as error:
        raise BadInput(f"trace {said[:60]}...: {error.strerror}; {use}") from None
    return path


def read(path: Path) -> list[TraceJob]:
    """Read the jobs of a file, in the order of submission.

    Raises:
        BadInput: the file cannot be read, has no jobs, or a line is malformed; the text has the file, the number of the
            line and the expected format.
    """
    try:
        with open(path, encoding="utf-8", newline=None) as file:
            jobs = list(_jobs(path, file))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"trace {path} cannot be read: {error}") from None
    if not jobs:
        raise BadInput(f"trace {path} has no jobs: a line for each is expected, of {_fields()}")
    return jobs


def _jobs(path: Path, lines: Iterable[str]) -> Iterator[TraceJob]:
    before = 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            job = parse(line)
            if job.submit_s < before:
                raise ValueError(
                    f"submit time {job.submit_s:g} s, after {before:g} s in the line before; "
                    "jobs are expected in the order of submission"
                )
        except ValueError as error:
            raise BadInput(f"trace {path}, line {number}: {error}") from None
        before = job.submit_s
        yield job


def parse(line: str) -> TraceJob:
    """Parse the job of a line.

    Raises:
        ValueError: the line is malformed; the text has the found and the expected format.
    """
    fields = line.rstrip("\r\n").split("\t")
    if len(fields) not in (len(FIELDS), len(FIELDS) + 1):
        found = f"{len(fields)} field{'s' if len(fields) > 1 else ''}"
        raise ValueError(f"{found} separated by tabs; expected {len(FIELDS)}: {_fields()}")
    name = fields[0].strip()
    if not name.isprintable() or not name:
        raise ValueError(f"name {_shown(fields[0])}; expected one that is not empty and can be printed")
    submit, _ = (_seconds(*pair) for pair in zip(FIELDS[1:3], fields[1:3], strict=True))
    sizes = [_size(*pair) for pair in zip(FIELDS[3:], fields[3:6], strict=True)]
    return TraceJob(name, submit, *sizes)


def _fields() -> str:
    return ", ".join(FIELDS)


def _shown(field: str) -> str:
    return repr(field if len(field) <= SHOWN_MAX else field[:SHOWN_MAX] + "...")


def _seconds(what: str, field: str) -> float:
    try:
        value = float(field)
    except ValueError:
        value = math.nan
    if not 0 <= value <= SECONDS_MAX:
        raise ValueError(f"{what} {_shown(field)}; expected a number of seconds from 0 to {SECONDS_MAX}")
    return value


def _size(what: str, field: str) -> int:
    text = field.strip()
    if not (text.isascii() and text.isdecimal() and len(text) < 20) or int(text) > BYTES_MAX:
        raise ValueError(f"{what} {_shown(field)}; expected a whole number of bytes from 0 to {BYTES_MAX}")
    return int(text)


def write(path: Path, jobs: Iterable[TraceJob]) -> None:
    """Write a trace, whole or not at all.

    Raises:
        BadInput: the file cannot be written.
    """
    before, lines = 0.0, []
    for job in jobs:
        gap = job.submit_s - before
        sizes = (str(getattr(job, quantity)) for quantity in QUANTITIES)
        lines.append("\t".join((job.name, f"{job.submit_s:.10g}", f"{gap:.10g}", *sizes)) + "\n")
        before = job.submit_s
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text("".join(lines), encoding="utf-8", newline="\n")
        part.replace(path)
    except OSError as error:
        raise BadInput(f"--out {path} cannot be written ({error.strerror}); choose another file") from None
