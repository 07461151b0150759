"""A host of a lab: its namespace, and how commands run there."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mission_control.lab import namespaces

if TYPE_CHECKING:
    from mission_control.lab.lab import Lab


class Host:
    """A host of a running lab."""

    def __init__(self, lab: Lab, name: str):
        self.lab, self.name = lab, name
        self.address = lab.topology.address(name)
        self.namespace = lab.namespace(name)

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on this host; the process keeps its ID."""
        # Not `ip netns exec`, because that hides what is mounted under /sys.
        with_names = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'
        inside = ["nsenter", f"--net={namespaces.FOLDER / self.namespace}", "unshare", "--mount"]
        return [*inside, "sh", "-c", with_names, "mission", str(self.lab.hosts_file), *command]

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on this host; options are those of :class:`subprocess.Popen`."""
        return subprocess.Popen(self.command(command), **options)

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command on this host to its end; options are those of :func:`subprocess.run`."""
        return subprocess.run(self.command(command), **options)


def mac(address: str) -> str:
    """Return the hardware address that belongs to an IPv4 address."""
    return "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))
