"""All rounds, from the command line."""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests import chaos
from tests.chaos.rounds import run


def run_at_once(clusters: int, rounds: int, first_seed: int) -> int:
    """Run the rounds on several clusters, each in a separate process; return the exit status.

    A round mostly waits for paused, frozen or held processes.
    """
    each = -(-rounds // clusters)
    starts = range(first_seed, first_seed + rounds, each)
    command = [sys.executable, "-m", "tests.chaos", "--at-once", "1"]
    running = [
        subprocess.Popen(
            [*command, "--first-seed", str(start), "--rounds", str(min(each, first_seed + rounds - start))]
        )
        for start in starts
    ]
    try:
        return max(process.wait() for process in running)
    finally:
        for process in running:
            process.terminate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=chaos.__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=1, help="clusters that share the rounds")
    given = parser.parse_args()
    if given.at_once > 1:
        sys.exit(run_at_once(given.at_once, given.rounds, given.first_seed))
    print(dict(run(given.rounds, given.first_seed)))
