"""`python -m bench NAME`: measure; a line of JSON for each result, and the medians on standard error."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

from bench.measure import Result, medians
from bench.plot import figure

BENCHES = {
    "throughput": "bench.throughput",
    "steady": "bench.steady",
    "latency": "bench.latency",
    "enqueue": "bench.enqueue",
    "notify": "bench.notify",
    "backlog": "bench.backlog",
    "blocked": "bench.blocked",
    "snapshot": "bench.snapshot",
    "idle": "bench.idle",
    "recovery": "bench.recovery",
    "scrape": "bench.scrape",
    "peers": "bench.peers.compare",
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = parser.add_subparsers(dest="bench", required=True)
    modules: dict[str, ModuleType] = {}
    for name, place in BENCHES.items():
        module = modules[name] = importlib.import_module(place)
        options = names.add_parser(name, help=module.__doc__, description=module.__doc__)
        options.add_argument("--runs", type=int, default=getattr(module, "RUNS", 3))
        options.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the figures")
        module.options(options)
    wanted = vars(parser.parse_args(arguments))
    module, plot = modules[wanted.pop("bench")], wanted.pop("plot")

    results: list[Result] = []
    for result in module.measure(**wanted):
        print(json.dumps(result), flush=True)
        results.append(result)
    for name, unit in module.FIGURES.items():
        for case, (middle, least, greatest) in medians(results, name, "case").items():
            spread = f"{middle:,g} {unit} ({least:,g} to {greatest:,g})"
            print(f"{case}: {spread}" if case else spread, file=sys.stderr)
    if plot:
        plot.write_text(figure(module.plot(results), _note(results)), encoding="utf-8")


def _note(results: list[Result]) -> str:
    about = results[-1]
    runs = max(result["run"] for result in results)
    spread = "median, least and greatest"
    return (
        f"python -m bench {about['bench']}, {spread} of {runs} run(s); "
        f"{about['cores']} cores, PostgreSQL {about['postgres']}, Python {about['python']}, "
        f"pgqueue {about['pgqueue']}"
    )


if __name__ == "__main__":
    main()
