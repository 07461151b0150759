"""The lab: a data centre in one machine. Hosts and switches are network namespaces; links have rates, and ports have
buffers.

``with Lab(star(hosts=16)) as lab: lab.host("h1").run(["ping", "-c1", "h7"])``. Needs root; see ``mission lab check``.
"""

from mission_control.lab.host import Host
from mission_control.lab.lab import Lab
from mission_control.lab.stack import PROFILES, Stack
from mission_control.lab.topology import KINDS, Link, Port, Topology, bonded, custom, star, two_path, two_rack

__all__ = [
    "KINDS",
    "PROFILES",
    "Host",
    "Lab",
    "Link",
    "Port",
    "Stack",
    "Topology",
    "bonded",
    "custom",
    "star",
    "two_path",
    "two_rack",
]
