"""`python -m bench throughput`: measure, and print one JSON line for each run."""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from bench import throughput


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
    wanted = parser.parse_args()

    rates = []
    for result in throughput.measure(
        jobs=wanted.jobs,
        processes=wanted.processes,
        concurrency=wanted.concurrency,
        handler=wanted.handler,
        log_level=wanted.log_level,
        runs=wanted.runs,
    ):
        print(json.dumps(result), flush=True)
        rates.append(result["jobs_per_second"])
    print(f"median {statistics.median(rates):,.0f} jobs/s of {len(rates)} runs", file=sys.stderr)


if __name__ == "__main__":
    main()
