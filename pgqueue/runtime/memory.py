"""What the system says of processes and memory: how much one holds, and whether its limit killed it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_PROC = Path("/proc")
_PS_SECONDS = 1.0


def resident_megabytes(pids: Sequence[int]) -> dict[int, float]:
    """Give the resident memory of those of these processes that live."""
    return _megabytes_by_proc(pids) if sys.platform == "linux" else _megabytes_by_ps(pids)


def _megabytes_by_proc(pids: Sequence[int]) -> dict[int, float]:
    page = os.sysconf("SC_PAGE_SIZE")
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            found[pid] = int((_PROC / str(pid) / "statm").read_text().split()[1]) * page / 2**20
    return found


def _megabytes_by_ps(pids: Sequence[int]) -> dict[int, float]:
    command = ["ps", "-o", "pid=,rss=", "-p", ",".join(map(str, pids))]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_PS_SECONDS, check=False)
        return {int(pid): int(size) / 1024 for pid, size in map(str.split, said.stdout.splitlines())}
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}


class OomKills:
    """Whether the kernel has killed something for its memory where a process was seen to live, since then."""

    def __init__(self, pid: int, proc: Path = _PROC) -> None:
        self._pid = pid
        self._proc = proc
        self._mounts = self._find_mounts()
        self._before: dict[Path, int] = {}
        self._note("self")
        self.look()

    def look(self) -> None:
        """See where the process lives now, in case somebody moved it: the dead one may not tell."""
        self._note(str(self._pid))

    def may_have_risen(self) -> bool:
        """Say whether a counter rose, or none can be read."""
        risen = [
            count > before for file, before in self._before.items() if (count := _kills(file)) is not None
        ]
        return not risen or any(risen)

    def _note(self, who: str) -> None:
        for file in self._files(who):
            if file not in self._before and (count := _kills(file)) is not None:
                self._before[file] = count

    def _files(self, who: str) -> Iterator[Path]:
        """Name the files with the counters of a process's control groups, of both versions."""
        for line in self._lines(who, "cgroup"):
            _, controllers, group = line.split(":", 2)
            if not controllers:
                kind, name = "cgroup2", "memory.events"
            elif "memory" in controllers.split(","):
                kind, name = "cgroup", "memory.oom_control"
            else:
                continue
            if kind in self._mounts:
                root, point = self._mounts[kind]
                # A container may see only its own part of the tree, under its own root.
                inner = group if root == "/" else group.removeprefix(root)
                yield Path(point) / inner.strip("/") / name

    def _find_mounts(self) -> dict[str, tuple[str, str]]:
        """Give the root and the place of each memory hierarchy that is mounted, by its file system."""
        mounts = {}
        for line in self._lines("self", "mountinfo"):
            left, _, right = line.partition(" - ")
            kind, _, options = right.split(" ", 2)
            if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
                root, point = left.split(" ")[3:5]
                mounts[kind] = (root, point)
        return mounts

    def _lines(self, who: str, name: str) -> list[str]:
        try:
            return (self._proc / who / name).read_text(errors="surrogateescape").splitlines()
        except OSError:
            return []


def _kills(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return int(dict(line.split(maxsplit=1) for line in file.read_text().splitlines())["oom_kill"])
    return None
