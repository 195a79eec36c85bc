"""What is measured besides time: processor time, memory, percentiles."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Result = dict[str, Any]

_TICKS = os.sysconf("SC_CLK_TCK")
CORES = len(os.sched_getaffinity(0))


def tree_seconds(*roots: int) -> float:
    """Give the processor time of these processes and all below them, those that have ended too."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid] = int(fields[1])
            ticks[pid] = sum(map(int, fields[11:15]))  # with those of its buried children
    return sum(ticks[pid] for pid in ticks if roots and _is_below(pid, roots, parents)) / _TICKS


def _is_below(pid: int, roots: Iterable[int], parents: dict[int, int]) -> bool:
    while pid not in roots:
        pid = parents.get(pid, 0)
        if not pid:
            return False
    return True


def machine_seconds() -> float:
    """Give the processor time that was used at all, by anybody."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / _TICKS


class Meter:
    """Processor time since it was made: of the server, of the programs that we started, of everybody else."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._began_at = time.monotonic()
        self._before = self._now()

    def _now(self) -> tuple[float, float, float, float]:
        ours = time.process_time()
        return tree_seconds(self._server), tree_seconds(os.getpid()) - ours, ours, machine_seconds()

    def spent(self) -> tuple[float, float, float]:
        """Give the seconds of the server and of our programs, and how many cores everybody else took."""
        server, programs, ours, machine = (
            late - early for late, early in zip(self._now(), self._before, strict=True)
        )
        others = max(0.0, machine - server - programs - ours) / (time.monotonic() - self._began_at)
        return server, programs, others

    def per_job(self, jobs: int) -> Result:
        server, programs, others = self.spent()
        return {
            "worker_cpu_us_per_job": round(programs / max(1, jobs) * 1e6, 1),
            "server_cpu_us_per_job": round(server / max(1, jobs) * 1e6, 1),
            "other_cores": round(others, 2),
        }


def resident_mb(pid: int) -> float:
    """Give the memory that a process holds now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def percentiles(seconds: Iterable[float]) -> Result:
    """Give p50, p95, p99 and the largest, in ms."""
    ordered = sorted(seconds)
    if not ordered:
        return {"n": 0}
    at = {
        f"p{percent}_ms": ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
        for percent in (50, 95, 99)
    }
    return {
        "n": len(ordered),
        **{name: round(value * 1000, 2) for name, value in {**at, "max_ms": ordered[-1]}.items()},
    }


def wait_until(predicate: Callable[[], Any], seconds: float, what: str, pause: float = 0.01) -> Any:
    """Ask until the answer is true, and give it; end the benchmark when the time is over."""
    end = time.monotonic() + seconds
    while not (answer := predicate()):
        if time.monotonic() > end:
            raise SystemExit(f"not within {seconds:g} s: {what}")
        time.sleep(pause)
    return answer


def in_turn(cases: Iterable[Any], run: int) -> list[Any]:
    """Give the cases in one order, or, in every second run, in the other."""
    ordered = list(cases)
    return ordered if run % 2 else ordered[::-1]


def medians(results: Iterable[Result], figure: str, *keys: str) -> dict[Any, tuple[float, float, float]]:
    """Give median, least and greatest of a figure for each value of these keys, in order of appearance."""
    found: dict[Any, list[float]] = {}
    for result in results:
        if result.get(figure) is not None:
            key = tuple(result.get(name, "") for name in keys)
            found.setdefault(key[0] if len(keys) == 1 else key, []).append(result[figure])
    return {key: (statistics.median(values), min(values), max(values)) for key, values in found.items()}


def paced(count: int, pause: float) -> Iterator[int]:
    """Count, one each `pause` seconds."""
    began_at = time.monotonic()
    for i in range(count):
        time.sleep(max(0.0, began_at + i * pause - time.monotonic()))
        yield i
