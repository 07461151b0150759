"""Generates documents. In docs/reference: scenario.md from the model, defaults.md from core's table, command-line.md
from the commands, python.md from docstrings. In docs/explanation: the table of what is replaced in Dask. In
docs/measurements: the table of a subject from the pages of its questions.

`python -m mission_control.docs` writes them; `--check` only reports which are out of date.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import mission_control
from mission_control import _native
from mission_control.scenario import Scenario
from mission_control.workloads import WORKLOADS

DOCS = Path(__file__).parent.parent / "docs"
QUESTIONS = re.compile(r"(<!-- questions: .*? -->\n).*(<!-- end -->\n)", re.DOTALL)
"""Where the table of a subject of measurements lies on its page."""
DESIGN = DOCS / "explanation/design-dask.md"
SEAMS = re.compile(r"(<!-- seams: .*? -->\n).*(<!-- end -->\n)", re.DOTALL)
"""Where the table of what is replaced in Dask lies on its page."""


def scenario() -> str:
    lines = [
        "# Scenarios",
        "",
        "<!-- Generated from mission_control/scenario.py and workloads/ by `make docs`; change it there. -->",
        "",
        "A scenario is one TOML file that every world reads. " + (Scenario.__doc__ or "").strip(),
        "`mission run FILE.toml` runs it; an unknown key or a missing unit is refused with its line.",
        "",
        *table(Scenario),
    ]
    lines += parts(Scenario, "")
    return "\n".join(lines) + "\n"


def parts(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if model is Scenario and name == "workload":
            yield from workloads()
            continue
        own, many = model_of(field.annotation)
        if own is not None:
            text = " ".join((own.__doc__ or "").split())
            head = f"[[{prefix}{name}]]" if many else f"[{prefix}{name}]"
            yield from ["", f"## {head}", "", text, "", *table(own)]
            yield from parts(own, f"{prefix}{name}.")


def workloads() -> Iterator[str]:
    """The settings of each workload; `kind` selects the one of a scenario."""
    for kind, settings in WORKLOADS.items():
        head = f'## [workload], kind = "{kind}"' + (" (the default)" if kind == "sort" else "")
        text = " ".join((settings.__doc__ or "").split())
        worlds = f"Runs in the worlds {', '.join(f'`{world}`' for world in settings.worlds)}."
        measures = [f"`{name}`" + (f" ({one.unit})" if one.unit else "") for name, one in settings.measures.items()]
        yield from ["", head, "", f"{text} {worlds} Measures: {', '.join(measures)}.", "", *table(settings)]


def model_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the model of a table, and whether it is a list of tables."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    inner = next(iter(get_args(annotation)), None)
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        return inner, get_origin(annotation) is tuple
    return None, False


def table(model: type[BaseModel]) -> Iterator[str]:
    rows = []
    for key, field in model.model_fields.items():
        if model_of(field.annotation)[0] is not None or (model is Scenario and key == "workload"):
            continue
        default = "required" if field.default is PydanticUndefined else field.default
        if isinstance(default, tuple):
            default = list(default)
        shown = "absent" if default is None else f"`{default}`".replace("False", "false")
        rows.append(f"| `{key}` | {shown} | {field.description or 'which workload'} |")
    if rows:
        yield from ["| key | default | meaning |", "|---|---|---|", *rows]


def defaults() -> str:
    rows = [f"| {name} | {value} | {meaning} |" for name, value, meaning in _native.defaults()]
    head = [
        "# Defaults",
        "",
        "<!-- Generated from crates/core/src/defaults.rs by `make docs`; change it there. -->",
        "",
        "| what | default | meaning |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


def command_line() -> str:
    from mission_control.cli.lazy import COMMANDS, load

    lines = [
        "# Command line",
        "",
        "<!-- Generated from mission_control/cli/ by `make docs`; change it there. -->",
        "",
        "`mission COMMAND --help` prints the same. `mission run sort --help` and so on print the flags of a workload,",
        "which are also the keys of [its table](scenario.md). [Exit status](exit-status.md).",
        "`mission --install-completion` adds completion to the shell that it runs in (bash, zsh, fish).",
    ]
    for name in COMMANDS:
        lines += of_command(load(name), name, 2)
    return "\n".join(lines) + "\n"


def of_command(command: Any, name: str, depth: int) -> Iterator[str]:
    """Describe a command, its arguments and options, and its subcommands."""
    yield from ["", f"{'#' * depth} mission {name}", "", (command.help or "").strip()]
    rows = [row for row in map(parameter, command.params) if row is not None]
    if rows:
        yield from ["", "| option | default | meaning |", "|---|---|---|", *rows]
    if command.epilog:
        examples = [line.strip() for line in command.epilog.splitlines()[2:]]
        yield from ["", "```text", *examples, "```"]
    for below, own in getattr(command, "commands", {}).items():
        yield from of_command(own, f"{name} {below}", min(depth + 1, 4))


def parameter(own: Any) -> str | None:
    if own.name == "help" or getattr(own, "hidden", False):
        return None
    is_argument = own.param_type_name == "argument"
    if not is_argument and not own.help:
        return None  # an option of a workload; the workload's help describes it
    names = (own.metavar or own.name.upper()) if is_argument else ", ".join([*own.opts, *own.secondary_opts])
    names = names.replace("|", "\\|")
    default = own.default
    if callable(default) or default in (None, (), [], False) or str(default).startswith("Sentinel"):
        shown = "required" if own.required else ""
    else:
        shown = f"`{default}`"
    text = " ".join((own.help or "").split()).replace("|", "\\|")
    return f"| `{names}` | {shown} | {text} |"


PYTHON = {
    "Jobs": ("install", "job", "uninstall"),
    "Objects": ("put", "fetch", "keep", "allocate", "Reference", "Fetched"),
    "Streams": ("open_stream", "stream", "Stream", "StreamReference"),
    "Tasks that hand on their result": ("delegate", "Delegation"),
    "Programs and Java": ("run", "In", "Out", "java"),
    "MapReduce": ("mapreduce",),
    "Errors": (
        *("JobRejected", "TransferError", "Lost", "Unreachable", "Denied", "Damaged", "Cancelled", "StreamFailed"),
        "ProgramFailed",
    ),
}
"""Sections of python.md; a test holds them to ``mission_control.__all__``."""
FIELDS = ("Args", "Returns", "Raises", "Yields")


def python() -> str:
    lines = [
        "# Python",
        "",
        "<!-- Generated from docstrings by `make docs`; change them there. -->",
        "",
        "What a program imports from `mission_control`. Tasks in Java: [Java](../how-to/java.md).",
    ]
    for title, names in PYTHON.items():
        lines += ["", f"## {title}"]
        for name in names:
            lines += of_object(name, getattr(mission_control, name), 3)
    return "\n".join(lines) + "\n"


def of_object(name: str, own: Any, depth: int) -> Iterator[str]:
    """Describe a function, or a class and its public methods and properties, by signature and docstring."""
    is_error = isinstance(own, type) and issubclass(own, BaseException)
    yield from ["", f"{'#' * depth} {name}", ""]
    if not is_error and callable(own):
        with suppress(ValueError):  # of a class that has none of its own
            yield from ["```python", f"{name}{signature(own)}", "```", ""]
    yield from paragraphs(inspect.getdoc(own) or "")
    if isinstance(own, type) and not is_error:
        for member, value in vars(own).items():
            if not member.startswith("_") and (callable(value) or isinstance(value, property)) and value.__doc__:
                yield from of_object(f"{name}.{member}", value, depth + 1)


def signature(own: Any) -> str:
    """Return a signature without the quotes of annotations and the modules of their types."""
    return re.sub(
        r"(collections\.abc|typing|mission_control[\w.]*|numpy|distributed[\w.]*)\.",
        "",
        str(inspect.signature(own)).replace("'", ""),
    )


def paragraphs(text: str) -> Iterator[str]:
    """Turn a docstring into Markdown: the arguments, errors and so on of Google's style become lists."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    inside = False
    for line in text.splitlines():
        if line.rstrip(":") in FIELDS and line.endswith(":"):
            inside = True
            yield f"**{line}**"
            yield ""
        elif inside and re.match(r" {4}[\w*]+.*?: ", line):
            what, _, rest = line.strip().partition(": ")
            yield f"- `{what}`: {rest}"
        elif inside and line.startswith(" "):
            yield "  " + line.strip()
        else:
            inside = inside and not line
            yield line
    yield ""


def seams() -> str:
    """Return the page of the design with Dask, with a table of what is replaced there."""
    import mission_control.dask.scheduler
    import mission_control.dask.seams.follow
    import mission_control.dask.worker  # noqa: F401 - these know all seams
    from mission_control.dask.seams.seam import Seam

    rows = ["", "| in Dask | what ours does | in place |", "|---|---|---|"]
    rows += [f"| `{seam}` | {seam.does} | {seam.when} |" for seam in sorted(Seam.all, key=str)]
    table = "\n".join([*rows, "", ""])
    drawn, count = SEAMS.subn(lambda around: around[1] + table + around[2], DESIGN.read_text())
    if count != 1:
        sys.exit(f"{DESIGN}: it needs one place for its table, between <!-- seams: ... --> and <!-- end -->")
    return drawn


def measurements(subject: Path) -> str:
    """Return the page of a subject, with a table of its questions: answers and dates as their pages have them."""
    text = subject.read_text()
    rows = ["", "| question | answer | measured |", "|---|---|---|"]
    for name in re.findall(rf"^{subject.stem}/[\w-]+$", text, re.MULTILINE):
        title, answer, *rest = (subject.parent / f"{name}.md").read_text().split("\n\n")
        question = title.removeprefix("# ").strip()
        # To the end of the first sentence; its links are relative to its own page.
        answer = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", answer)
        first = re.split(r"(?<=\.) (?=[A-Z\d`*(\[])", " ".join(answer.split()))[0].removesuffix(".")
        day = re.search(r"\d{4}-\d\d-\d\d", "\n".join(rest))
        rows.append(f"| [{question}]({name}.md) | {first} | {day[0] if day else ''} |")
    table = "\n".join([*rows, "", ""])
    drawn, count = QUESTIONS.subn(lambda around: around[1] + table + around[2], text)
    if count != 1:
        sys.exit(f"{subject}: it needs one place for its table, between <!-- questions: ... --> and <!-- end -->")
    return drawn


def main() -> int:
    stale = []
    reference = DOCS / "reference"
    generated = {
        reference / "scenario.md": scenario(),
        reference / "defaults.md": defaults(),
        reference / "command-line.md": command_line(),
        reference / "python.md": python(),
        DESIGN: seams(),
        **{subject: measurements(subject) for subject in sorted((DOCS / "measurements").glob("*.md"))},
    }
    for path, text in generated.items():
        if path.exists() and path.read_text() == text:
            continue
        stale.append(str(path.relative_to(DOCS.parent)))
        if "--check" not in sys.argv:
            path.write_text(text)
    if stale and "--check" in sys.argv:
        print(f"{', '.join(stale)}: out of date; run 'make docs'", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
