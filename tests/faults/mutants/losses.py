"""Nothing lost, nothing twice, nothing without its effect: I1, I2, I5."""

from __future__ import annotations

import contextlib
from typing import Any

import psycopg
from psycopg import sql

from tests.faults.drill import Drill
from tests.faults.mutants.mutant import mutant
from tests.sql.support import Session
from tests.support import wait_until


def the_power_is_cut(drill: Drill) -> None:
    drill.delay_writing()
    drill.enqueue(20)
    claimed = drill.session.claim(max_jobs=10)
    for attempt in claimed:
        drill.leave_effect(drill.session, attempt)
    drill.complete(drill.session, *claimed)
    # PostgreSQL 15 and older write each page of the log that is full, so the loss is what came last.
    drill.enqueue(3)

    drill.cut_the_power()

    drill.work()


@mutant("I1", the_power_is_cut, is_slow=True)
def commits_everything_asynchronously(drill: Drill) -> None:
    name = sql.Identifier(drill.name)
    drill.db.connection.execute(sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(name))
    drill.reconnect()


def jobs_run(drill: Drill) -> None:
    drill.enqueue(10)
    session = drill.open()
    claimed = session.claim()
    for attempt in claimed[:8]:
        drill.leave_effect(session, attempt)
    if drill.habit == "completes first":
        drill.complete(session, *claimed)
    # Here it dies; the effects of two were still to come.
    session.connection.close()
    drill.session.expire(*claimed)
    drill.session.call("reap")
    drill.work()


@mutant("I2", jobs_run)
def completes_before_the_effect(drill: Drill) -> None:
    drill.habit = "completes first"


def a_transactions_client_dies(drill: Drill) -> None:
    """The effect and the end of its job are to be one commit; whoever dies before it leaves neither."""
    drill.evidence.transactional = ["drill"]
    drill.enqueue()
    victim, heir = drill.open(), drill.open()
    (lost,) = victim.claim()
    with contextlib.suppress(psycopg.OperationalError), victim.connection.transaction():
        _begin(drill, victim, lost)
        pid = victim.connection.info.backend_pid
        victim.connection.close()
    # The server notices in its own time; until then the transaction holds what it has locked.
    is_there = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
    wait_until(lambda: not drill.db.one(is_there, pid), 60, "its transaction is over")
    drill.session.expire(lost)
    drill.session.call("reap")
    drill.session.make_due()
    (now,) = heir.claim()
    with heir.connection.transaction():
        _end(drill, heir, now, _begin(drill, heir, now))


def _begin(drill: Drill, session: Session, attempt: Any) -> str:
    """Take the key of the job's effect and leave the effect; gives which transaction that was."""
    key = f"job:{attempt.job_id}"
    asked = {"key": key, "job_name": "drill", "token": attempt.token, "job_id": attempt.job_id}
    (answer,) = session.call("begin_once", **asked)
    assert answer.verdict == "started"
    drill.leave_effect(drill.session if drill.habit == "commits its effect first" else session, attempt)
    return answer.began


def _end(drill: Drill, session: Session, attempt: Any, began: str) -> None:
    key = f"job:{attempt.job_id}"
    asked = {"key": key, "token": attempt.token, "job_id": attempt.job_id, "began": began}
    assert session.call("finish_once", **asked)[0][0] == "done"
    drill.accept(session, attempt)


@mutant("I2", a_transactions_client_dies)
def completes_outside_of_the_effects_transaction(drill: Drill) -> None:
    drill.habit = "commits its effect first"


@mutant("I1", jobs_run)
def asks_twice(drill: Drill) -> None:
    """Repeat a request as if its answer had been lost."""
    drill.habit = "asks twice"


def jobs_die(drill: Drill) -> None:
    drill.enqueue(3)
    drill.session.fail(*drill.session.claim(), is_dead=[True] * 3, errors=["Unrecoverable: no"] * 3)


@mutant("I5", jobs_die)
def loses_dead_letters(drill: Drill) -> None:
    drill.alter("settle", "WHERE g.state = 'dead'", "WHERE g.state = 'dead' AND false")
