"""`mission exec`: runs an unchanged program, and gives its TCP sockets another transport."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from mission_control import _native
from mission_control.lab import cgroup
from mission_control.lab.congestion import AVAILABLE
from mission_control.lab.lab import require
from mission_control.scenario import BadInput

Option = typer.Option


def exec(
    context: typer.Context,
    transport: Annotated[str | None, Option(help="a congestion control: dctcp, cubic, reno, ...")] = None,
    rto_min: Annotated[str | None, Option(help="minimum retransmission timeout, as in 5ms")] = None,
    window: Annotated[str | None, Option(help="most that a peer may send ahead, as in 64KiB")] = None,
    pace: Annotated[str | None, Option(help="highest rate of each connection, as in 50mbit")] = None,
    ecn: Annotated[bool, Option("--ecn", help="ask for ECN, whatever the congestion control")] = False,
    report: Annotated[Path | None, Option(help="file for what connections were found to have, as JSON")] = None,
) -> None:
    """Runs a program whose TCP sockets get this before their first packet; says at its end what they really had.

    Its status is the program's. Nothing is left behind. Needs root.
    """
    if not context.args:
        raise BadInput("which program? mission exec --transport dctcp -- COMMAND")
    try:
        wanted: dict[str, Any] = {
            "congestion_control": transport,
            "rto_min_us": round(_native.parse_duration(rto_min) * 1e6) if rto_min else None,
            "window_clamp_bytes": _native.parse_bytes(window) if window else None,
            "pacing_bytes_per_second": _native.parse_rate(pace) // 8 if pace else None,
            "ecn": ecn,
        }
    except ValueError as error:
        raise BadInput(str(error)) from None
    require()
    with ExitStack() as stack:
        available = AVAILABLE.read_text().split()
        if transport == "dctcp" and transport not in available:
            stack.callback(_native.Dctcp().close)
        elif transport is not None and transport not in available:
            raise BadInput(f"this kernel has no {transport}: use dctcp, {', '.join(available)}")
        folder = stack.enter_context(cgroup.group(f"exec.{os.getpid()}"))
        setter = _native.Setter(str(folder), json.dumps(wanted))
        # The program is in the group before it is the program.
        join = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        status = subprocess.run(["sh", "-c", join, str(folder), *context.args]).returncode
        agreed = json.loads(setter.agreed())
    if report is not None:
        report.write_text(json.dumps({"wanted": wanted, "agreed": agreed}))
    for own in agreed:
        print(f"mission: {describe(own, wanted)}", file=sys.stderr)
    raise typer.Exit(status if status >= 0 else 128 - status)


def describe(agreed: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What some connections had, as far as it was wanted."""
    count = agreed["connections"]
    words = [f"{count} connection{'' if count == 1 else 's'} had {agreed['congestion_control']}"]
    if wanted["rto_min_us"]:
        words.append(f"minimum RTO {agreed['rto_min_us'] / 1000:g} ms")
    if wanted["pacing_bytes_per_second"]:
        words.append(f"at most {agreed['pacing_bytes_per_second'] * 8 / 1e6:g} Mbit/s each")
    if wanted["window_clamp_bytes"]:
        words.append(f"window of at most {_native.format_bytes(agreed['window_clamp_bytes'])}")
    return ", ".join(words)
