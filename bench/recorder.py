"""What handlers leave behind, in files of a folder: how many ran, and when. The database has no work with it.

The other products' handlers use this, too, in their own environments: nothing but the standard library here.
Times are of the clock that all processes of the machine share.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

FOLDER = "PGQUEUE_BENCH_FOLDER"

_COUNTS = struct.Struct("=QQdd")


class Recorder:
    """Where one process counts its handlers' calls."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        path = Path(folder or os.environ[FOLDER])
        with (path / f"count.{os.getpid()}").open("w+b") as file:
            file.write(bytes(_COUNTS.size))
            file.flush()
            shared = memoryview(mmap.mmap(file.fileno(), _COUNTS.size))
        # Each number is stored at once: `struct` would write it byte by byte, and somebody reads meanwhile.
        self._counts, self._times = shared.cast("Q"), shared.cast("d")
        self._starts = (path / f"starts.{os.getpid()}").open("a", buffering=1, encoding="ascii")
        self._count = self._total = 0
        self._first_at = 0.0

    def hit(self, i: int, sent: float | None = None) -> None:
        """Note that job `i` runs; with `sent` (when it was asked for, or due), also its start."""
        now = time.monotonic()
        if not self._count:
            self._first_at = now
        self._count += 1
        self._total += i
        self._counts[0], self._counts[1] = self._count, self._total
        self._times[2], self._times[3] = self._first_at, now
        if sent is not None:
            self._starts.write(f"{i} {sent:.6f} {now:.6f}\n")


class Seen(NamedTuple):
    """Calls of all processes, the sum of their numbers, and when the first and the last were."""

    calls: int
    total: int
    first_at: float
    last_at: float


class Start(NamedTuple):
    pid: int
    i: int
    sent: float
    started: float


def seen(folder: Path) -> Seen:
    found = [_COUNTS.unpack(text) for text in _texts(folder, "count.*") if len(text) >= _COUNTS.size]
    began = [one for one in found if one[0]]
    if not began:
        return Seen(0, 0, 0.0, 0.0)
    counts, totals, firsts, lasts = zip(*began, strict=True)
    return Seen(sum(counts), sum(totals), min(firsts), max(lasts))


def starts(folder: Path) -> list[Start]:
    """Give the noted starts, first to last."""
    found = []
    for path in folder.glob("starts.*"):
        pid = int(path.suffix[1:])
        for line in path.read_text(encoding="ascii").splitlines(keepends=True):
            if line.endswith("\n"):
                i, sent, started = line.split()
                found.append(Start(pid, int(i), float(sent), float(started)))
    return sorted(found, key=lambda start: start.started)


def _texts(folder: Path, pattern: str) -> list[bytes]:
    # What other runtimes write may be longer: they have no struct of that size.
    return [path.read_bytes()[: _COUNTS.size] for path in folder.glob(pattern)]
