"""An application whose handlers never end, or fail all at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from pathlib import Path

import pgqueue
from pgqueue import JobContext
from tests.process.jobs import record

app = pgqueue.App()

TIMEOUT_SECONDS = 1.0


@app.task
def touch(job: JobContext) -> None:
    record(job)


@app.task
def wait_for_file(job: JobContext, path: str) -> None:
    record(job)
    while not Path(path).exists():
        time.sleep(0.02)


@app.task(timeout_seconds=TIMEOUT_SECONDS, max_attempts=1)
def hear_nothing(job: JobContext, port: int) -> None:
    """Wait for a peer that takes the connection and never says a word."""
    record(job)
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.recv(1)


@app.task(timeout_seconds=TIMEOUT_SECONDS, retry=0, max_attempts=3)
def put_things_away(job: JobContext, seconds: float) -> None:
    """Stop at the deadline, and take some time about it."""
    record(job)
    while job.remaining_seconds:
        time.sleep(0.02)
    time.sleep(seconds)


@app.task(timeout_seconds=TIMEOUT_SECONDS, max_attempts=1)
async def ignore_cancellation(job: JobContext) -> None:
    record(job)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


@app.task(timeout_seconds=TIMEOUT_SECONDS, max_attempts=1)
def wait_for_a_dead_lock(job: JobContext) -> None:
    """Hold what a thread wants, and want what it holds."""
    record(job)
    ours, theirs, both_held = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def hold(first: threading.Lock, second: threading.Lock) -> None:
        with first:
            both_held.wait()
            with second:
                pass

    threading.Thread(target=hold, args=(theirs, ours), daemon=True).start()
    hold(ours, theirs)


@app.task(timeout_seconds=0)
async def block_the_loop(job: JobContext, path: str) -> None:
    """Hold the loop of this process up until the file is there."""
    record(job)
    while not Path(path).exists():  # noqa: ASYNC240
        time.sleep(0.02)  # noqa: ASYNC251


@app.task(timeout_seconds=3 * TIMEOUT_SECONDS, max_attempts=1)
def send_mail(job: JobContext, path: str) -> None:
    """Have an effect, and end once the file is there."""
    record(job)
    while not Path(path).exists():
        time.sleep(0.02)


@app.task(timeout_seconds=TIMEOUT_SECONDS, max_attempts=1)
async def begin_in_time(job: JobContext) -> None:
    record(job)


@app.task
def begin_ever(job: JobContext) -> None:
    record(job)


@app.task(max_attempts=25)
async def fail_together(path: str) -> None:
    """Fail once the file is there: all that wait for it, at the same instant."""
    while not Path(path).exists():  # noqa: ASYNC240  a look at a local file
        await asyncio.sleep(0.05)
    raise ConnectionError("the service is down")
