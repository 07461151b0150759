"""Runs a command beside other work: a test that fails on a busy machine is a wrong test.

``tools/under_load.py make test``: beside three loops that only count.
``tools/under_load.py --memory 2 make test``: beside two more that copy 64 MiB for ever, which no cache holds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys


def ends_with(parent: int) -> bool:
    return os.getppid() != parent


def count(parent: int) -> None:
    while not ends_with(parent):
        for _ in range(1_000_000):
            pass


def copy(parent: int) -> None:
    source, target = bytearray(os.urandom(1 << 20) * 64), bytearray(64 << 20)
    while not ends_with(parent):
        target[:] = source
        source[:] = target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=3, help="how many loops count")
    parser.add_argument("--memory", type=int, default=0, help="how many copy memory")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command:
        parser.error("say what to run: tools/under_load.py make test")
    loads = [count] * args.busy + [copy] * args.memory
    beside = [multiprocessing.Process(target=load, args=(os.getpid(),), daemon=True) for load in loads]
    for process in beside:
        process.start()
    try:
        return subprocess.run(args.command).returncode
    except KeyboardInterrupt:
        return 130
    finally:
        for process in beside:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main())
