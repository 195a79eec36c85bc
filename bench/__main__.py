"""`python -m bench throughput`: measure, and print one JSON line for each run."""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from bench import blocked, throughput


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    benches = parser.add_subparsers(dest="bench", required=True)
    drain = benches.add_parser("throughput", help=throughput.__doc__)
    drain.add_argument("--jobs", type=int, default=200_000)
    drain.add_argument("--processes", type=int, default=1, help="child processes of the worker; 0 = none")
    drain.add_argument("--concurrency", type=int, default=10, help="slots of the worker")
    drain.add_argument("--handler", choices=("nothing", "nothing_sync"), default="nothing")
    drain.add_argument("--log-level", choices=("warning", "info"), default="warning")
    drain.add_argument("--runs", type=int, default=3)
    crowd = benches.add_parser("blocked", help=blocked.__doc__)
    crowd.add_argument("--crowd", type=int, default=100_000, help="jobs of the full key")
    crowd.add_argument("--jobs", type=int, default=20_000, help="the others")
    crowd.add_argument("--runs", type=int, default=3)
    wanted = vars(parser.parse_args())

    measure, figure, unit = {
        "throughput": (throughput.measure, "jobs_per_second", "jobs/s"),
        "blocked": (blocked.measure, "ratio", "of the time without the crowd"),
    }[wanted.pop("bench")]
    figures = []
    for result in measure(**wanted):
        print(json.dumps(result), flush=True)
        figures.append(result[figure])
    print(f"median {statistics.median(figures):,g} {unit}, of {len(figures)} runs", file=sys.stderr)


if __name__ == "__main__":
    main()
