"""The application under fault: handlers that behave, misbehave, and leave a trace of what they did.

Every handler that can succeed leaves an effect before it returns, by a connection of its own and in
a transaction of its own: at least once is what the queue promises for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg

import pgqueue
from pgqueue import JobContext
from tests.faults.journal import Journal

app = pgqueue.App()
_local = threading.local()
_journals: list[Journal] = []

# Threads of our own for async handlers: each has a connection, and the server has only so many.
ASIDE_THREADS = 2
_aside = ThreadPoolExecutor(ASIDE_THREADS)

# How long a handler goes on trying to leave its effect while the database is away.
_PATIENCE_SECONDS = 4.0


def _connection() -> psycopg.Connection[Any]:
    connection = getattr(_local, "connection", None)
    if connection is None or connection.closed:
        connection = _local.connection = psycopg.connect(
            os.environ["PGQUEUE_DSN"], autocommit=True, connect_timeout=3, application_name="handler"
        )
    return connection


EFFECT = "INSERT INTO faults.effects (job_id, attempt, mark, key, pid) VALUES (%s, %s, %s, %s, %s)"


def leave_effect(job: JobContext, mark: str) -> None:
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            _connection().execute(EFFECT, (job.job_id, job.attempt, mark, None, os.getpid()))
        except psycopg.Error:
            _forget_broken_connection()
            if time.monotonic() > end:
                raise
            time.sleep(random.uniform(0.05, 0.2))
        else:
            return


async def leave_effect_aside(job: JobContext, mark: str) -> None:
    await asyncio.get_running_loop().run_in_executor(_aside, leave_effect, job, mark)


def _forget_broken_connection() -> None:
    connection = getattr(_local, "connection", None)
    if connection is not None and connection.broken:
        connection.close()
        _local.connection = None


def count_effects(job: JobContext) -> int:
    row = (
        _connection()
        .execute("SELECT count(*) FROM faults.effects WHERE job_id = %s", (job.job_id,))
        .fetchone()
    )
    return row[0] if row else 0


# Those that behave.


@app.task(retry=0.1, max_attempts=20)
def touch(job: JobContext, mark: str) -> None:
    leave_effect(job, mark)


@app.task(retry=0.1, max_attempts=20)
async def touch_async(job: JobContext, mark: str) -> None:
    await leave_effect_aside(job, mark)


@app.task(retry=0.1, max_attempts=20)
async def sleep(job: JobContext, mark: str, seconds: float) -> None:
    """Sleep as a well-behaved handler does: it can be cancelled at any instant."""
    await asyncio.sleep(seconds)
    await leave_effect_aside(job, mark)


@app.task(retry=0.1, max_attempts=20)
def work_long(job: JobContext, mark: str, seconds: float) -> None:
    """Work longer than a lease, asking now and then whether there is a point in going on."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        job.check()
        job.progress(seconds - (end - time.monotonic()), seconds)
        time.sleep(0.05)
    leave_effect(job, mark)


@app.task(retry=0.1, max_attempts=20)
def share(job: JobContext, mark: str, key: str) -> None:
    """Be one of at most three at once; the limit comes with the job."""
    time.sleep(random.uniform(0.0, 0.05))
    leave_effect(job, mark)


@app.task(concurrency_key="one:{key}", retry=0.05, max_attempts=50)
def count(job: JobContext, mark: str, key: str) -> None:
    """Raise a counter by reading and writing it, with nothing to protect it but the job's own key.

    The transaction ends by asking whether this attempt still holds the job, and is rolled back if
    not: of those who may *run* at once after a freeze, only the holder commits.
    """
    connection = _connection()
    try:
        with connection.transaction():
            # The first statement, never repeated: an attempt that cannot say who it was when it began
            # might take its successor's token for its own.
            token = connection.execute(
                "SELECT claim_token FROM pgqueue.jobs WHERE id = %s AND attempt = %s AND state = 'running'",
                (job.job_id, job.attempt),
            ).fetchone()
            if token is None:
                raise pgqueue.LeaseLost("somebody else has this job")
            row = connection.execute("SELECT value FROM faults.counters WHERE key = %s", (key,)).fetchone()
            assert row is not None
            time.sleep(random.uniform(0.0, 0.01))
            connection.execute("UPDATE faults.counters SET value = %s WHERE key = %s", (row[0] + 1, key))
            connection.execute(EFFECT, (job.job_id, job.attempt, mark, key, os.getpid()))
            held = connection.execute(
                "SELECT id FROM pgqueue.jobs WHERE id = %s AND claim_token = %s AND state = 'running' "
                "FOR NO KEY UPDATE",
                (job.job_id, token[0]),
            ).fetchone()
            if held is None:
                raise pgqueue.LeaseLost("somebody else has this job by now")
    except psycopg.Error:
        _forget_broken_connection()
        raise


@app.task(retry=0.1, max_attempts=20)
def carry(job: JobContext, mark: str, load: str) -> None:
    """Be large on the way."""
    leave_effect(job, mark)


@app.task(retry=0.05, max_attempts=20)
def embrace(job: JobContext, mark: str, first: str, second: str) -> None:
    """Lock two rows of the application's in the order given; somebody else has the other one."""
    connection = _connection()
    try:
        with connection.transaction():
            for key in (first, second):
                connection.execute("SELECT value FROM faults.counters WHERE key = %s FOR UPDATE", (key,))
                time.sleep(0.02)
    except psycopg.Error:
        _forget_broken_connection()
        raise
    leave_effect(job, mark)


@app.task(unique_key="refresh:{name}", retry=0.1, max_attempts=20)
def refresh(job: JobContext, mark: str, name: str) -> None:
    time.sleep(0.02)
    leave_effect(job, mark)


@app.task(retry=0.2, max_attempts=20)
def enqueue_others(job: JobContext, mark: str) -> None:
    """Ask for two more jobs, one at a time, and write down what was answered."""
    for _ in range(2):
        enqueue_journalled("touch")
    leave_effect(job, mark)


def enqueue_journalled(task: str) -> None:
    if not _journals:
        _journals.append(Journal(Path(os.environ["FAULTS_FOLDER"]), "handler"))
    journal = _journals[0]
    mark = journal.mark()
    journal.intend(mark)
    try:
        handle = app.enqueue(task, {"mark": mark})
    except (pgqueue.DatabaseUnreachable, pgqueue.InvalidJob):
        journal.refuse(mark)
        raise
    except psycopg.Error as error:
        if was_refused(error):
            journal.refuse(mark)
        raise
    journal.acknowledge([mark], [handle.job_id])


def was_refused(error: psycopg.Error) -> bool:
    """Say whether the server answered that it did nothing; no answer, or its last words, say nothing."""
    return error.diag.severity_nonlocalized == "ERROR"


# Those whose effect and whose end are one.


@app.task(transactional=True, retry=0.1, max_attempts=20)
def pay(tx: psycopg.Connection[Any], job: JobContext, mark: str) -> None:
    tx.execute(EFFECT, (job.job_id, job.attempt, mark, None, os.getpid()))
    time.sleep(random.uniform(0.0, 0.05))


@app.task(transactional=True, retry=0.1, max_attempts=20)
async def pay_async(tx: psycopg.AsyncConnection[Any], job: JobContext, mark: str) -> None:
    await tx.execute(EFFECT, (job.job_id, job.attempt, mark, None, os.getpid()))
    await asyncio.sleep(random.uniform(0.0, 0.05))


@app.task(transactional=True, idempotency_key="charge:{order}", retry=0.1, max_attempts=20)
def charge(tx: psycopg.Connection[Any], job: JobContext, mark: str, order: int) -> None:
    """Charge an order; others have been asked to do the same."""
    tx.execute(EFFECT, (job.job_id, job.attempt, mark, f"charge:{order}", os.getpid()))
    time.sleep(random.uniform(0.0, 0.05))


TRANSACTIONAL = [definition.name for definition in app.registry if definition.is_transactional]


# Those that fail, and say so.


@app.task(retry=0.1, max_attempts=6)
def fail_at_first(job: JobContext, mark: str, times: int) -> None:
    if job.attempt <= times:
        raise RuntimeError(f"attempt {job.attempt} was to fail, of job {job.job_id}")
    leave_effect(job, mark)


@app.task(retry=0, max_attempts=3)
def fail_always(job: JobContext, mark: str) -> None:
    raise RuntimeError("no luck")


@app.task
async def give_up(job: JobContext, mark: str) -> None:
    raise pgqueue.Unrecoverable("there is no such customer")


@app.task(retry=0.1, max_attempts=20)
def snooze_at_first(job: JobContext, mark: str) -> None:
    if count_effects(job) == 0:
        leave_effect(job, mark)
        raise pgqueue.Snooze(0.2)
    leave_effect(job, mark)


@app.task(retry=0.1, max_attempts=3)
def exit_python(job: JobContext, mark: str) -> None:
    if job.attempt == 1:
        raise SystemExit(3)
    leave_effect(job, mark)


# Those that take something with them.


@app.task(timeout_seconds=0.7, retry=0.1, max_attempts=3)
def hang_at_first(job: JobContext, mark: str) -> None:
    """Wait for ever, deaf to everything, but only the first time."""
    if job.attempt == 1:
        threading.Event().wait()
    leave_effect(job, mark)


@app.task(timeout_seconds=0.7, retry=0.1, max_attempts=2)
async def refuse_to_stop(job: JobContext, mark: str) -> None:
    """Swallow every cancellation."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


@app.task(retry=0.1)
def die_at_first(job: JobContext, mark: str) -> None:
    if job.attempt == 1:
        os._exit(7)
    leave_effect(job, mark)


@app.task(retry=0.1)
def die(job: JobContext, mark: str) -> None:
    """Take the process down, each time."""
    os._exit(9)


@app.task(retry=0.1, max_attempts=20)
def hold_the_gil(job: JobContext, mark: str, microseconds: int) -> None:
    """Stay inside a C call that lets no other thread of the process run."""
    ctypes.PyDLL(None).usleep(microseconds)
    leave_effect(job, mark)


@app.task(retry=0.1, max_attempts=20)
async def block_the_loop(job: JobContext, mark: str, seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251
    await leave_effect_aside(job, mark)


# By the clock.


@app.task(retry=0.1, max_attempts=20)
def tick(job: JobContext) -> None:
    leave_effect(job, "tick")


# For the step table: a handler that stops where it is told to, once, until told to go on.


@app.task(retry=0, max_attempts=5)
async def stop_at(job: JobContext, mark: str, step: str, folder: str) -> None:
    """Say `started`, `written` and `sent` by files; wait for `go` at the step named."""
    place = Path(folder) / mark
    is_first = await asyncio.to_thread(_take, place.with_suffix(".first"))
    await _reach(place, "started", waits=is_first and step == "started")
    await leave_effect_aside(job, mark)
    await _reach(place, "written", waits=is_first and step == "written")
    # A timer comes up after what the loop has to do at once: by then the outcome is on its way.
    asyncio.get_running_loop().call_later(0.05, place.with_suffix(".sent").touch)


def _take(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


async def _reach(place: Path, step: str, *, waits: bool) -> None:
    place.with_suffix(f".{step}").write_text(str(os.getpid()))
    while waits and not place.with_suffix(".go").exists():
        await asyncio.sleep(0.01)
