"""The application that the outage tests run: its handlers need no database, so none of them fails with it."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import psycopg

import pgqueue
from pgqueue import JobContext

app = pgqueue.App()


def record(job: JobContext) -> None:
    """Write down that this attempt started, in a file that outlives every server."""
    line = f"{job.job_id} {job.attempt} {os.getpid()} {time.monotonic():.6f}\n"
    file = os.open(os.environ["OUTAGE_EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


@app.task
async def work(job: JobContext, mark: int = 0, seconds: float = 0.0) -> None:
    """Take some time; `mark` is the producer's."""
    record(job)
    await asyncio.sleep(seconds)


@app.task
def wait_for_file(job: JobContext, path: str) -> None:
    record(job)
    while not Path(path).exists():
        time.sleep(0.02)


@app.task(retry=0.2)
def fail_first(job: JobContext) -> None:
    record(job)
    if job.attempt == 1:
        raise RuntimeError("not yet")


@app.task(retry=0.0)
def fail_first_and_try_again_at_once(job: JobContext) -> None:
    record(job)
    if job.attempt == 1:
        raise RuntimeError("not yet")


@app.task(max_attempts=1)
def fail(job: JobContext) -> None:
    record(job)
    raise RuntimeError("no luck")


@app.task
def snooze_first(job: JobContext) -> None:
    """Snooze once, and that without a word in the job's history."""
    record(job)
    seen = Path(os.environ["OUTAGE_EFFECTS"]).read_text().splitlines()
    if len([line for line in seen if line.startswith(f"{job.job_id} ")]) == 1:
        raise pgqueue.Snooze(0.2)


@app.task(max_attempts=1, transactional=True)
def transact(job: JobContext, conn: psycopg.Connection) -> None:
    record(job)


@app.task(max_attempts=1)
def enqueue_another(job: JobContext) -> None:
    record(job)
    work.enqueue()
