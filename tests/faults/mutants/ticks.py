"""Every tick of a schedule fires at most once, and is fired or counted as skipped: I4."""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta
from typing import Any

import psycopg

from tests.faults.drill import Drill
from tests.faults.mutants.mutant import mutant
from tests.sql.support import Session

NAME, CRON, MINUTE = "drill", "* * * * *", timedelta(minutes=1)
HOUR = timedelta(hours=1)
# Four are fired at a time, so that the last time there are fewer than a hasty clock finds.
TICKS_DUE = 31


def many_fire_the_ticks_of_one_schedule(drill: Drill) -> None:
    """As every worker does: look what is due, compute the ticks, fire. The clock of one is an hour ahead."""
    first = _make_schedule(drill)
    hasty, *others = [drill.open() for _ in range(4)]
    while entries := drill.session.call("due_schedules"):
        # Everybody has looked; the hasty one is the first to fire, and the others all come too late.
        _fire(hasty, entries[0], entries[0].database_now + HOUR)
        for future in [drill.start(_fire, other, entries[0], entries[0].database_now) for other in others]:
            future.result()
    drill.evidence.ticks_due[NAME] = drill.db.one(
        "SELECT 1 + floor(extract(epoch FROM clock_timestamp() - %s::timestamptz) / 60)::bigint", first
    )
    drill.cancel_all()


def _make_schedule(drill: Drill) -> datetime:
    """Make a schedule of every minute with ticks due, the last of them half a minute ago; gives the first."""
    return drill.db.one(
        "INSERT INTO pgqueue.schedules (name, cron, task, catch_up, next_tick) "
        "VALUES (%s, %s, 'drill', 'all', clock_timestamp() - make_interval(mins => %s, secs => 30)) "
        "RETURNING next_tick",
        NAME,
        CRON,
        TICKS_DUE - 1,
    )


def _fire(session: Session, entry: Any, now: datetime) -> None:
    """Fire the next few ticks that are due at this time, but for the first of four: that one is skipped."""
    ticks = [tick for tick in (entry.next_tick + MINUTE * number for number in range(4)) if tick <= now]
    skipped = len(ticks) // 4
    # Refused if they are not due by the database's clock: somebody whose clock is right will fire what is.
    with contextlib.suppress(psycopg.errors.InvalidParameterValue):
        session.one(
            "SELECT pgqueue.fire(%s, %s, 'UTC', %s, %s::timestamptz[], %s, %s)",
            *(NAME, CRON, entry.next_tick, ticks[skipped:], skipped, ticks[-1] + MINUTE),
        )


@mutant("I4", many_fire_the_ticks_of_one_schedule)
def fires_without_comparing(drill: Drill) -> None:
    """Enqueue what one has found due, whoever has fired it meanwhile."""
    drill.alter("fire", "AND s.next_tick IS NOT DISTINCT FROM fire.expected", "")
    drill.alter("fire", "FOR NO KEY UPDATE SKIP LOCKED", "")
    drill.alter("fire", "CONTINUE WHEN EXISTS", "CONTINUE WHEN false AND EXISTS")
    drill.db.connection.execute("ALTER TABLE pgqueue.schedule_runs DROP CONSTRAINT schedule_runs_pkey")


@mutant("I4", many_fire_the_ticks_of_one_schedule)
def fires_by_the_local_clock(drill: Drill) -> None:
    drill.alter("fire", "OR fire.expected > now ", "")
    drill.alter("fire", "t.tick > now OR ", "")
