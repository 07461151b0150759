"""A host of a lab: where it is, and how commands run on it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mission_control.lab import namespaces

if TYPE_CHECKING:
    from mission_control.lab.lab import Lab


class Host:
    """A host of a lab that is up."""

    def __init__(self, lab: Lab, name: str):
        self.lab, self.name = lab, name
        self.address = lab.topology.address(name)
        self.namespace = lab.namespace(name)

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on this host; the process keeps its number."""
        # Not `ip netns exec`: it would hide what is mounted under /sys.
        with_names = 'mount --bind "$0" /etc/hosts && exec "$@"'
        inside = ["nsenter", f"--net={namespaces.FOLDER / self.namespace}", "unshare", "--mount"]
        return [*inside, "sh", "-c", with_names, str(self.lab.hosts_file), *command]

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on this host; options are those of :class:`subprocess.Popen`."""
        return subprocess.Popen(self.command(command), **options)

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Runs a command on this host to its end; options are those of :func:`subprocess.run`."""
        return subprocess.run(self.command(command), **options)


def mac(address: str) -> str:
    """A hardware address that follows from the network's."""
    return "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))
