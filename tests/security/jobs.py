"""An application that uses everything a worker has a right for."""

from __future__ import annotations

import logging
import os

import psycopg

import pgqueue
from pgqueue import JobContext

app = pgqueue.App()
api = app.breaker("api", min_calls=2)
log = logging.getLogger("shop")


@app.task
async def plain() -> None: ...


@app.task
def slow_with_progress(job: JobContext) -> None:
    import time

    for step in range(12):
        job.progress(step, 12)
        time.sleep(0.1)


@app.task(transactional=True)
def transact(tx: psycopg.Connection, job: JobContext) -> None:
    tx.execute("INSERT INTO effects (job_id, attempt, pid) VALUES (%s, %s, 0)", [job.job_id, job.attempt])


@app.task(idempotency_key="once")
async def call_once() -> str:
    return "called"


@app.task(retry=pgqueue.Fixed(0.1))
def fail_once(job: JobContext) -> None:
    if job.attempt == 1:
        raise ConnectionError("later")


@app.task
def die() -> None:
    raise pgqueue.Unrecoverable("no such order")


@app.task
def cancel_itself() -> None:
    raise pgqueue.Cancel("not wanted any more")


@app.task(rate_limit="5/s", concurrency_key="one")
async def limited() -> None: ...


@app.task(breaker=api)
def behind_a_breaker(job: JobContext) -> None: ...


@app.task
def enqueue_another() -> None:
    plain.enqueue()


@app.task
def kill_its_process() -> None:
    os._exit(7)


@app.schedule("* * * * * *", name="tick")
@app.task
def tick() -> None: ...
