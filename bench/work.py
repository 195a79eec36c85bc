"""Work in Python of about so long, and how long the machine's cores take over it when there is nothing else.

A fixed number of steps, not a look at the clock: that would be a call of the system every microsecond, and
what runs next would find the processor cold.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from bench.measure import CORES

_TRIAL_STEPS = 5_000


def work(steps: int) -> int:
    """Do so many steps."""
    total = 0
    for step in range(steps):
        total += step & 7
    return total


def steps_of(us: int) -> int:
    """Say how many steps take so many microseconds here, now."""
    trials = []
    for _ in range(101):
        began_at = time.perf_counter()
        work(_TRIAL_STEPS)
        trials.append(time.perf_counter() - began_at)
    return max(1, round(_TRIAL_STEPS * us / 1e6 / statistics.median(trials)))


def alone_seconds(jobs: int, steps: int) -> float:
    """Measure the time of that work, shared out to a process for each core."""
    command = [sys.executable, "-m", "bench.work", str(-(-jobs // CORES)), str(steps)]
    programs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(CORES)]
    return max(float(program.communicate()[0]) for program in programs)


def _main() -> None:
    jobs, steps = map(int, sys.argv[1:])
    began_at = time.perf_counter()
    for _ in range(jobs):
        work(steps)
    print(time.perf_counter() - began_at)


if __name__ == "__main__":
    _main()
