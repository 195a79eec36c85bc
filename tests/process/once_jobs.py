"""The application of the tests about effects that happen once: it pays, and can be held at any step."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

import pgqueue
from pgqueue import JobContext

app = pgqueue.App()

# A payment that is held back by whoever holds this advisory lock: before it, after it, or at COMMIT.
HOLD = 4711
TABLES = f"""
CREATE TABLE payments (
    job_id bigint NOT NULL,
    attempt integer NOT NULL,
    amount integer NOT NULL DEFAULT 1,
    is_held_at_commit boolean NOT NULL DEFAULT false
);
CREATE FUNCTION hold_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared({HOLD});
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER hold_commit AFTER INSERT ON payments DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.is_held_at_commit) EXECUTE FUNCTION hold_commit();
CREATE TABLE calls (job_id bigint NOT NULL, attempt integer NOT NULL, what text NOT NULL, key text NOT NULL);
"""
_HOLD = f"SELECT pg_advisory_xact_lock_shared({HOLD})"
# What a session keeps beyond its transactions.
_TRACES = """
SELECT pg_backend_pid(), current_setting('search_path'), to_regclass('pg_temp.trace') IS NULL,
    (SELECT count(*) FROM pg_listening_channels()), current_setting('default_transaction_isolation'),
    (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objid = 4712)
"""
_LEAVE = """
SET search_path TO pg_catalog;
SET default_transaction_isolation TO 'serializable';
CREATE TEMPORARY TABLE trace ();
LISTEN trace;
SELECT pg_advisory_lock(4712);
SET lock_timeout TO '7s'
"""
_PAY = "INSERT INTO payments (job_id, attempt, is_held_at_commit) VALUES (%s, %s, %s)"


@app.task(transactional=True)
def pay(tx: psycopg.Connection, job: JobContext, step: str = "") -> dict[str, int]:
    if step == "before":
        tx.execute(_HOLD)
    tx.execute(_PAY, (job.job_id, job.attempt, step == "commit"))
    if step == "after":
        tx.execute(_HOLD)
    return {"job": job.job_id}


@app.task(transactional=True)
async def pay_async(tx: psycopg.AsyncConnection, job: JobContext, step: str = "") -> dict[str, int]:
    if step == "before":
        await tx.execute(_HOLD)
    await tx.execute(_PAY, (job.job_id, job.attempt, step == "commit"))
    if step == "after":
        await tx.execute(_HOLD)
    return {"job": job.job_id}


@app.task(transactional=True, idempotency_key="charge:{order}")
def charge(tx: psycopg.Connection, job: JobContext, order: str) -> str:
    tx.execute(_PAY, (job.job_id, job.attempt, False))
    return f"receipt of {job.job_id}"


@app.task(transactional=True, max_attempts=3, retry=0)
def pay_and_fail(tx: psycopg.Connection, job: JobContext, times: int = 1) -> None:
    tx.execute(_PAY, (job.job_id, job.attempt, False))
    with tx.transaction():
        tx.execute(_PAY, (job.job_id, job.attempt, False))
    if job.attempt <= times:
        raise RuntimeError("after the effect")


@app.task(transactional=True, max_attempts=1)
def end_the_transaction(tx: psycopg.Connection, job: JobContext, how: str) -> None:
    tx.execute(_PAY, (job.job_id, job.attempt, False))
    if how == "rollback exception":
        raise psycopg.Rollback
    if how == "commit()":
        tx.commit()
    else:
        tx.execute(how)


@app.task(transactional=True)
def pay_and_pass_on(tx: psycopg.Connection, job: JobContext, fails: bool = False) -> None:
    pay.using(conn=tx).enqueue()
    if fails:
        raise pgqueue.Unrecoverable("no")


@app.task(transactional=True, timeout_seconds=1, max_attempts=1)
def wait_in_a_statement(tx: psycopg.Connection, job: JobContext) -> None:
    tx.execute(_PAY, (job.job_id, job.attempt, False))
    tx.execute("SELECT pg_sleep(600)")


@app.task(transactional=True, timeout_seconds=1, max_attempts=1)
async def wait_in_a_statement_async(tx: psycopg.AsyncConnection, job: JobContext) -> None:
    await tx.execute(_PAY, (job.job_id, job.attempt, False))
    await tx.execute("SELECT pg_sleep(600)")


@app.task(transactional=True)
def crash_the_session(tx: psycopg.Connection, job: JobContext) -> None:
    """Take its own session down, every time, as a query that the server cannot stand would."""
    tx.execute(_PAY, (job.job_id, job.attempt, False))
    tx.pgconn.finish()
    tx.execute("SELECT 1")


@app.task(transactional=True)
def leave_traces(tx: psycopg.Connection, job: JobContext) -> list[object]:
    """Say what the session is like, and leave it otherwise."""
    found = tx.execute(_TRACES).fetchone()
    tx.row_factory = dict_row
    tx.execute(_LEAVE)
    return list(found)


@app.task(transactional=True)
async def leave_traces_async(tx: psycopg.AsyncConnection, job: JobContext) -> list[object]:
    found = await (await tx.execute(_TRACES)).fetchone()
    tx.row_factory = dict_row
    await tx.execute(_LEAVE)
    return list(found)


# Effects elsewhere: `calls` stands for the world outside, written by a connection of its own.


def _call(job: JobContext, what: str) -> None:
    with psycopg.connect(os.environ["PGQUEUE_DSN"], autocommit=True) as world:
        world.execute(
            "INSERT INTO calls (job_id, attempt, what, key) VALUES (%s, %s, %s, %s)",
            (job.job_id, job.attempt, what, job.idempotency_key),
        )


def _wait_at_first(job: JobContext, hangs: bool) -> None:
    if hangs and job.attempt == 1:
        time.sleep(3600)


@app.task(idempotency_key="mail:{to}")
def mail(job: JobContext, to: str, hangs: bool = False) -> str:
    _call(job, "mail")
    _wait_at_first(job, hangs)
    return "sent"


@app.task(idempotency_key="mail:{to}", idempotent=True)
def mail_with_key(job: JobContext, to: str, hangs: bool = False) -> str:
    _call(job, "mail again" if job.is_takeover else "mail")
    _wait_at_first(job, hangs)
    return "sent"


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate as one does who thinks of plain functions only."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@app.task(transactional=True)
@logged
async def pay_later(tx: psycopg.Connection, job: JobContext) -> None:
    tx.execute("INSERT INTO payments (job_id) VALUES (%s)", (job.job_id,))


@logged
async def was_it_sent_later(job: JobContext, to: str, hangs: bool) -> str:
    return was_it_sent(job, to, hangs)


@app.task(idempotency_key="mail:{to}", reconcile=was_it_sent_later)
def mail_and_ask_later(job: JobContext, to: str, hangs: bool = False) -> str:
    _call(job, "mail")
    _wait_at_first(job, hangs)
    return "sent"


def was_it_sent(job: JobContext, to: str, hangs: bool) -> str | pgqueue.model.task.NotDone:
    _call(job, "ask")
    return "found sent" if to.startswith("sent") else pgqueue.NOT_DONE


@app.task(idempotency_key="mail:{to}", reconcile=was_it_sent)
def mail_and_ask(job: JobContext, to: str, hangs: bool = False) -> str:
    _call(job, "mail")
    _wait_at_first(job, hangs)
    return "sent"


async def was_it_sent_async(job: JobContext, to: str, hangs: bool) -> str | pgqueue.model.task.NotDone:
    return was_it_sent(job, to, hangs)


@app.task(idempotency_key="mail:{to}", reconcile=was_it_sent_async)
async def mail_and_ask_async(job: JobContext, to: str, hangs: bool = False) -> str:
    _call(job, "mail")
    if hangs and job.attempt == 1:
        await asyncio.sleep(3600)
    return "sent"


@app.task(idempotency_key="mail:{to}", max_attempts=3, retry=0)
def mail_and_fail(job: JobContext, to: str) -> str:
    _call(job, "mail")
    if job.attempt < 3:
        raise RuntimeError("the other side said no")
    return "sent"


@app.task(idempotency_key="mail:{to}", timeout_seconds=1, max_attempts=2, retry=0)
async def mail_too_slowly(job: JobContext, to: str) -> None:
    _call(job, "mail")
    await asyncio.sleep(600)


@app.task(idempotency_key="mail:{to}")
def mail_when_told(job: JobContext, to: str, path: str) -> str:
    _call(job, "mail")
    while not Path(path).exists():
        time.sleep(0.02)
    return "sent"
