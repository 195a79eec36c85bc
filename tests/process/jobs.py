"""The application that the process tests run: each handler leaves a row in `effects` when it starts."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psycopg

import pgqueue
from pgqueue import JobContext

app = pgqueue.App()
_local = threading.local()

EFFECTS = """
CREATE TABLE IF NOT EXISTS effects (
    job_id bigint NOT NULL,
    attempt integer NOT NULL,
    pid integer NOT NULL DEFAULT 0,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""


def record(job: JobContext) -> None:
    """Write down that this attempt started, in a transaction of its own."""
    if not hasattr(_local, "connection"):
        _local.connection = psycopg.connect(os.environ["PGQUEUE_DSN"], autocommit=True)
    _local.connection.execute(
        "INSERT INTO effects (job_id, attempt, pid) VALUES (%s, %s, %s)",
        (job.job_id, job.attempt, os.getpid()),
    )


@app.task
async def nothing() -> None:
    """Do nothing."""


@app.task
def touch(job: JobContext) -> None:
    record(job)


@app.task
def double(number: int) -> int:
    return number * 2


@app.task
async def sleep(job: JobContext, seconds: float) -> None:
    record(job)
    await asyncio.sleep(seconds)


@app.task
def block(job: JobContext, seconds: float) -> None:
    """Block the thread."""
    record(job)
    time.sleep(seconds)


@app.task
def wait_at_first(job: JobContext) -> None:
    """Wait for ever, but only the first time this job starts."""
    record(job)
    if job.attempt == 1:
        time.sleep(3600)


@app.task
def spin(job: JobContext, seconds: float) -> None:
    """Burn the processor in Python."""
    record(job)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@app.task
def hold_the_gil(job: JobContext, seconds: int) -> None:
    """Wait inside a C call that lets no other thread of the process run."""
    record(job)
    ctypes.PyDLL(None).sleep(seconds)


@app.task
async def block_the_loop(job: JobContext, seconds: float) -> None:
    record(job)
    time.sleep(seconds)  # noqa: ASYNC251


@app.task(max_attempts=3, retry=0)
def fail(job: JobContext, message: str = "no luck") -> None:
    record(job)
    raise RuntimeError(message)


@app.task(max_attempts=2, retry=0)
def fail_first(job: JobContext) -> str:
    record(job)
    if job.attempt == 1:
        raise RuntimeError("not yet")
    return "done"


@app.task
def die(job: JobContext) -> None:
    """Take the process down."""
    record(job)
    os._exit(7)


@app.task(timeout_seconds=1, max_attempts=1)
def hang(job: JobContext) -> None:
    """Wait for ever, deaf to everything."""
    record(job)
    threading.Event().wait()


@app.task(timeout_seconds=1, max_attempts=1)
async def hang_async(job: JobContext) -> None:
    record(job)
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


@app.task(timeout_seconds=1, max_attempts=1)
async def too_slow(job: JobContext) -> None:
    record(job)
    await asyncio.sleep(3600)


@app.task(queue="other")
def elsewhere(job: JobContext) -> None:
    record(job)


@app.task
def raise_exit(job: JobContext, kind: str) -> None:
    record(job)
    raise {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt, "GeneratorExit": GeneratorExit}[
        kind
    ]


@app.task(max_attempts=1)
async def exit_in_a_part(job: JobContext, kind: str, how: str) -> None:
    """Leave from a task of the handler's own, or from a callback."""
    record(job)

    def leave() -> None:
        raise {"SystemExit": SystemExit(3), "KeyboardInterrupt": KeyboardInterrupt}[kind]

    async def part() -> None:
        await asyncio.sleep(0)
        leave()

    if how == "gather":
        await asyncio.gather(part(), asyncio.sleep(0.1))
    elif how == "left behind":
        _left_behind.add(asyncio.create_task(part()))
    else:
        asyncio.get_running_loop().call_soon(leave)
    await asyncio.sleep(0.1)


@app.task(max_attempts=1)
def raise_unprintable() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("cannot be printed")

    raise Unprintable


@app.task(max_attempts=1)
def raise_hostile() -> None:
    raise RuntimeError("nul \x00 and half a pair \ud800 and " + "megabytes " * 200_000)


@app.task
def big_result(size: int) -> str:
    return "x" * size


@dataclass
class Found:
    path: str

    def __post_init__(self) -> None:
        if not self.path.isascii():
            raise ValueError(f"odd path {self.path}")


@app.task
async def find_odd_file() -> Found:
    """Return a file's name as the system gives it, which its own result type refuses."""
    return {"path": os.fsdecode(b"caf\xe9")}  # type: ignore[return-value]


@app.task
async def mask(bits: int = 2**64) -> int:
    """Have a default that is beyond 64 bits."""
    return bits


@app.task
def leave_a_grandchild(job: JobContext) -> None:
    """Fork a process that outlives this one, and take this one down, the first time."""
    record(job)
    if job.attempt == 1:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        os._exit(7)


@app.task
def terminate_a_program() -> int:
    """Start a program and ask it to end, as a handler that runs ffmpeg does."""
    program = subprocess.Popen(["sleep", "20"])
    program.terminate()
    try:
        return program.wait(5)
    finally:
        program.kill()


@app.task
async def say_nonsense(job: JobContext) -> None:
    """Report progress that is no JSON."""
    job.progress(float("nan"), object(), "half a pair \ud800 \x00")  # type: ignore[arg-type]
    await asyncio.sleep(0.5)


@app.task(max_attempts=1)
async def be_deaf(job: JobContext) -> None:
    """Ignore every cancellation."""
    record(job)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


@app.task
def measure(text: str) -> int:
    return len(text)


@app.task
def enqueue_another(job: JobContext) -> None:
    touch.enqueue()


@app.task
def report_progress(job: JobContext) -> None:
    job.progress(3, 10, "three of ten")
    time.sleep(30)


@app.task
async def snooze_once(job: JobContext) -> None:
    record(job)
    if job.headers.get("snoozed") is None and _snoozed.add(job.job_id):
        raise pgqueue.Snooze(0.1)


@app.task
async def snooze_long_once(job: JobContext) -> None:
    record(job)
    if _snoozed.add(job.job_id):
        raise pgqueue.Snooze(2)


@app.task
def wait_for_file(job: JobContext, path: str) -> None:
    record(job)
    while not Path(path).exists():
        time.sleep(0.02)
    Path(path).unlink()


@app.task
def keep(job: JobContext, megabytes: int) -> None:
    """Leave memory behind."""
    record(job)
    _kept.append(b"x" * (megabytes << 20))


@app.task
def kill_itself(job: JobContext) -> None:
    record(job)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(max_attempts=2, retry=0)
def allocate_too_much(job: JobContext) -> None:
    """Allocate past a limit of this process's own, which the interpreter is told of."""
    record(job)
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), before[1]))
    try:
        bytearray(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@app.task
def allocate_until_killed(job: JobContext, group: str) -> None:
    """Move this process to a control group with a limit, and allocate past it."""
    record(job)
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    time.sleep(1.5)  # the parent looks every second where its children live
    allocated = []
    for _ in range(100):
        allocated.append(b"x" * (16 << 20))


@app.task
def leave_orphans(job: JobContext) -> None:
    """Leave two programs behind without a parent: one that ends soon, and one that does not."""
    record(job)
    subprocess.run(["sh", "-c", "sleep 0.3 & sleep 600 &"], check=True)


_kept: list[bytes] = []
_left_behind: set[asyncio.Task[None]] = set()


class _Once:
    def __init__(self) -> None:
        self._seen: set[int] = set()

    def add(self, job_id: int) -> bool:
        if job_id in self._seen:
            return False
        self._seen.add(job_id)
        return True


_snoozed = _Once()
