"""Starting other processes so that none of them outlives us, however we end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_END_SECONDS = 3.0


@contextlib.contextmanager
def start_python(
    *arguments: str,
    environment: Mapping[str, str],
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a Python; if it still runs at the end of the block, it is told to end, then killed.

    In a process group of its own: a terminal's Ctrl-C is for us, and we tell the others.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=dict(environment),
        process_group=0,
        preexec_fn=_end_with_parent(),  # noqa: PLW1509  one thread, and all it does is one system call
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
    )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block like Ctrl-C does, so that it is tidied up after."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_at_work(pid: int, work_of: Callable[[], list[T]]) -> list[T]:
    """Kill a process at an instant at which it is at work, and give that work; nothing if it has none.

    Stopped while the question is asked, it cannot end its work between the answer and the kill.
    """
    verdict = signal.SIGCONT
    work: list[T] = []
    try:
        os.kill(pid, signal.SIGSTOP)
        try:
            work = work_of()
            if work:
                verdict = signal.SIGKILL
        finally:
            os.kill(pid, verdict)
    except ProcessLookupError:
        return []
    return work


def children_of(pid: int) -> list[int]:
    """Give the pids of a process's children, as far as the system tells; none elsewhere than on Linux."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _end_with_parent() -> Callable[[], object] | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
