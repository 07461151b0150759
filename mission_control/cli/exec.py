"""`mission exec`: run an unchanged program whose TCP sockets get another transport."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from mission_control import _native
from mission_control.lab import cgroup
from mission_control.lab.congestion import AVAILABLE
from mission_control.lab.machine import require
from mission_control.scenario import BadInput, PrerequisiteMissing

Option = typer.Option
MPTCP_ENABLED = Path("/proc/sys/net/mptcp/enabled")


def exec(
    context: typer.Context,
    transport: Annotated[
        str | None,
        Option(metavar="NAME", help="mptcp, or a congestion control: dctcp, cubic, reno, ... [the machine's default]"),
    ] = None,
    rto_min: Annotated[
        str | None, Option(metavar="TIME", help="Minimum retransmission timeout, e.g. 5ms [the kernel's: 200ms]")
    ] = None,
    window: Annotated[
        str | None, Option(metavar="SIZE", help="Largest receive window, e.g. 64KiB [the kernel's]")
    ] = None,
    pace: Annotated[
        str | None, Option(metavar="RATE", help="Highest rate of each connection, e.g. 50Mbit/s [no limit]")
    ] = None,
    ecn: Annotated[bool, Option("--ecn", help="Request ECN with every congestion control [off]")] = False,
    report: Annotated[
        Path | None, Option(metavar="FILE", help="Write what the connections had as JSON, e.g. had.json [off]")
    ] = None,
) -> None:
    """Run a program with another TCP transport (needs root).

    All TCP sockets of the program get the settings before their first packet. At its end, stderr has what its
    connections really had. Stdout and the exit status are the program's.
    """
    if not context.args:
        raise BadInput("which program? Use mission exec --transport dctcp -- COMMAND")
    if shutil.which(context.args[0]) is None:
        raise BadInput(f"{context.args[0]}: there is no such program; give its path, or a name that is on PATH")
    try:
        wanted: dict[str, Any] = {
            "congestion_control": None if transport == "mptcp" else transport,
            "rto_min_us": round(_native.parse_duration(rto_min) * 1e6) if rto_min else None,
            "window_clamp_bytes": _native.parse_bytes(window) if window else None,
            "pacing_bytes_per_second": _native.parse_rate(pace) // 8 if pace else None,
            "ecn": ecn,
        }
    except ValueError as error:
        raise BadInput(str(error)) from None
    require()
    if report is not None:
        # Before the program runs: afterwards its result would be lost. What the file has stays until then.
        write_report(report, None)
    with ExitStack() as stack:
        available = AVAILABLE.read_text().split()
        environment = dict(os.environ)
        subflows: Path | None = None
        if transport == "mptcp":
            subflows = multipath(Path(stack.enter_context(TemporaryDirectory(prefix="mission-exec-"))), environment)
        elif transport == "dctcp" and transport not in available:
            stack.callback(_native.Dctcp().close)
        elif transport is not None and transport not in available:
            raise BadInput(f"--transport {transport}: this kernel has none; use mptcp, dctcp, {', '.join(available)}")
        cgroup.remove_stale("exec")
        # A process id alone comes back after a crash.
        folder = stack.enter_context(cgroup.group(f"exec.{os.getpid()}.{secrets.token_hex(4)}"))
        setter = _native.Setter(str(folder), json.dumps(wanted))
        # The program is in the group before it is the program.
        join = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'
        status = subprocess.run(["sh", "-c", join, "mission", str(folder), *context.args], env=environment).returncode
        agreed = json.loads(setter.agreed())
        paths = Counter(map(int, subflows.read_text().split())) if subflows else Counter()
    if report is not None:
        write_report(report, {"wanted": wanted, "agreed": agreed, "subflows": paths})
    for entry in agreed:
        print(f"mission: {describe(entry, wanted)}", file=sys.stderr)
    for count, connections in sorted(paths.items()):
        what = f"mptcp with {count} subflow{'' if count == 1 else 's'}" if count else "plain tcp: its peer has no mptcp"
        print(f"mission: {connections} connection{'' if connections == 1 else 's'} had {what}", file=sys.stderr)
    if transport == "mptcp" and not paths:
        print("mission: no connection had mptcp: the program made none, or is linked statically", file=sys.stderr)
    raise typer.Exit(status if status >= 0 else 128 - status)


def write_report(path: Path, facts: dict[str, Any] | None) -> None:
    """Write the file of ``--report``; ``None``: only check that it can be written.

    Raises:
        BadInput: It cannot be written.
    """
    try:
        with path.open("a" if facts is None else "w") as file:
            file.write("" if facts is None else json.dumps(facts))
    except OSError as error:
        raise BadInput(f"--report {path} cannot be written ({error.strerror}); choose another file") from None


def multipath(folder: Path, environment: dict[str, str]) -> Path:
    """Has programs with this environment ask for Multipath TCP; gives the file in which they write the number of
    subflows of each connection that they close (0: it fell back to plain TCP)."""
    if not MPTCP_ENABLED.exists() or MPTCP_ENABLED.read_text().strip() != "1":
        raise PrerequisiteMissing(
            "this kernel gives no Multipath TCP: sysctl net.mptcp.enabled=1, or a kernel that has it"
        )
    library, result = folder / "mptcp.so", folder / "subflows"
    library.write_bytes(_native.mptcp_preload())
    result.touch()
    # A program may give up root.
    folder.chmod(0o711)
    library.chmod(0o644)
    result.chmod(0o666)
    before = environment.get("LD_PRELOAD")
    environment["LD_PRELOAD"] = f"{library} {before}" if before else str(library)
    environment["MISSION_EXEC_REPORT"] = str(result)
    return result


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
