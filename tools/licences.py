"""Print the licences of everything that a wheel contains, with their texts: `make wheel` puts them into it."""

from __future__ import annotations

import json
import subprocess
import sys
from glob import glob
from pathlib import Path
from typing import Any

ROOT = "mission-python"
"""The crate that becomes the wheel's extension."""
TEXTS = ("LICENSE*", "LICENCE*", "COPYING*", "COPYRIGHT*", "NOTICE*", "UNLICENSE*")
COPIED = (
    # auditwheel copies this library into the wheel; the distribution keeps its licence here.
    ("libelf", "LGPL-3.0-or-later OR GPL-2.0-or-later", "/usr/share/doc/libelf1*/copyright"),
    # Maven puts it into mission-control.jar; the text is that of Mission Control's own licence.
    ("gson", "Apache-2.0", "LICENSE"),
)
"""What no crate brings: name, licence, pattern of the file with the text."""


def crates() -> list[dict[str, Any]]:
    """Return the crates that are linked into the extension, ours left out, as `cargo metadata` describes them."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--features", f"{ROOT}/kernel"]
    command += ["--filter-platform", "x86_64-unknown-linux-gnu"]
    known = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    packages = {package["id"]: package for package in known["packages"]}
    nodes = {node["id"]: node for node in known["resolve"]["nodes"]}
    waiting = [name for name, package in packages.items() if package["name"] == ROOT]
    linked: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in linked:
            linked.add(name)
            # A kind is null for what is linked; "build" and "dev" are not in the extension.
            waiting += [
                dep["pkg"] for dep in nodes[name]["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])
            ]
    found = [packages[name] for name in linked if packages[name]["source"] is not None]
    return sorted(found, key=lambda package: (package["name"], package["version"]))


def texts(folder: Path) -> dict[str, str]:
    """Return the licence texts of a folder by the name of their file."""
    files = sorted({path for pattern in TEXTS for path in folder.glob(pattern) if path.is_file()})
    return {path.name: path.read_text(errors="replace").strip() for path in files}


def main() -> int:
    linked = crates()
    rows = [(own["name"], own["version"], own["license"] or f"see {own['license_file']}") for own in linked]
    rows += [(name, "", licence) for name, licence, _ in COPIED]
    print("Licences of what this package contains. Mission Control itself: Apache-2.0.\n")
    for name, version, licence in rows:
        print(f"{name} {version}: {licence}".replace(" :", ":"))
    bodies: dict[str, list[str]] = {}
    for own in linked:
        for file, text in texts(Path(own["manifest_path"]).parent).items():
            bodies.setdefault(text, []).append(f"{own['name']} {own['version']}, {file}")
    for name, _, pattern in COPIED:
        file = next(iter(sorted(glob(pattern))), None)
        if file is None:
            print(f"licences: {pattern} is missing, which has the licence of {name}", file=sys.stderr)
            return 1
        bodies.setdefault(Path(file).read_text(errors="replace").strip(), []).append(name)
    for text, owners in bodies.items():
        print("\n" + "=" * 100, *owners, "-" * 100, text, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
