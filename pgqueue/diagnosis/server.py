"""The server, the roles, and this side of the connection."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from pgqueue.database import implementation
from pgqueue.diagnosis.finding import Exam, Finding
from pgqueue.dsn import of_sessions
from pgqueue.model.spoken import duration
from pgqueue.shell import sql_name, write_psql
from pgqueue.sql import doctor as questions


def identity(exam: Exam) -> Iterator[Finding]:
    before = time.time()  # noqa: TID251  to be compared with the database's
    identity = exam.ask(questions.identity())
    after = time.time()  # noqa: TID251
    if not identity.sees_all_sessions:
        exam.notes.append(
            f"sessions of other roles: role {identity.role} may not see what they do; allow it with: GRANT "
            f"pg_read_all_stats TO {identity.role}"
        )
    if identity.is_standby:
        yield Finding(
            "standby",
            "critical",
            "this server is a standby: no job can be enqueued or run here",
            [
                write_psql("SELECT pg_promote()"),
                "export PGQUEUE_DSN='host=a,b target_session_attrs=read-write ...'",
            ],
        )
    is_pooler = exam.connection.info.backend_pid != identity.backend_pid
    if is_pooler and not of_sessions("", os.environ):
        yield Finding(
            "pooler",
            "warning",
            "this connection goes through a pooler, which keeps no LISTEN in transaction mode: workers hear "
            "of new jobs only by polling, unless one session of each is led past it",
            ["export PGQUEUE_LISTEN_DSN='host=the-server-itself ...'   # for pgqueue worker"],
        )
    now = identity.now.timestamp()
    off = before - now if now < before else max(0.0, now - after)
    if abs(off) > exam.at.clock_seconds:
        which = "ahead of" if now < before else "behind"
        yield Finding(
            "clock_differs",
            "warning",
            f"this machine's clock is {duration(off)} {which} the database's: the queue goes by the "
            "database's, but times in logs and run_at values computed here are wrong by as much",
            ["timedatectl status", "chronyc tracking"],
        )


def settings(exam: Exam) -> Iterator[Finding]:
    found = exam.ask(questions.settings())
    for name, danger in (
        ("fsync", "a power cut destroys the database, not only the latest jobs"),
        ("full_page_writes", "a power cut can leave half-written pages, which destroys data"),
        ("synchronous_commit", "a power cut loses jobs whose enqueue was acknowledged"),
        ("autovacuum", "dead rows are never removed, and every claim becomes slower by the hour"),
        ("track_counts", "autovacuum does not know what to do, and dead rows are never removed"),
    ):
        if found[name].value == "off":
            yield Finding(
                name, "critical", f"{name} is off: {danger}", [_set(exam, name, "on", found[name].source)]
            )
    name = "default_transaction_read_only"
    if found[name].value == "on":
        yield Finding(
            "read_only",
            "critical",
            f"{name} is on for this role or database: nothing can be enqueued, claimed or finished",
            [_set(exam, name, "off", found[name].source)],
        )
    for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
        milliseconds = int(found[name].value)
        if 0 < milliseconds < exam.at.short_timeout_seconds * 1000:
            yield Finding(
                name,
                "warning",
                f"{name} is {milliseconds:,} ms for this role or database: under load enqueues and "
                "commands are cut off",
                [_set(exam, name, "60s", found[name].source)],
            )


def ages(exam: Exam) -> Iterator[Finding]:
    ages = exam.ask(questions.ages())
    if ages.transactions >= exam.at.transaction_age:
        yield Finding(
            "wraparound",
            "critical",
            f"{ages.transactions:.0%} of the transaction ids are used up; at 100 % the server refuses all "
            "writes",
            [
                write_psql("VACUUM (FREEZE, VERBOSE)"),
                exam.command("doctor", transactions_older_than="1m"),
            ],
        )
    if ages.notifications >= exam.at.notifications:
        yield Finding(
            "notifications",
            "critical",
            f"the server's queue of notifications is {ages.notifications:.0%} full, because a session that "
            "listens has had a transaction open for long; when it is full, inserts fail",
            [exam.command("doctor", transactions_older_than="1m")],
        )


def connections(exam: Exam) -> Iterator[Finding]:
    found = exam.ask(questions.connections())
    for code, what, used, allowed in (
        ("connections", "the server", found.used, found.allowed),
        (
            "connections_database",
            f"database {exam.connection.info.dbname}",
            found.of_database,
            found.allowed_of_database,
        ),
        ("connections_role", "this role", found.of_role, found.allowed_of_role),
    ):
        if allowed > 0 and used >= allowed * exam.at.connections:
            yield Finding(
                code,
                "critical" if used >= allowed else "warning",
                f"{used:,} of the {allowed:,} connections of {what} are in use ({', '.join(found.most)}): "
                "soon workers and producers are turned away",
                [
                    write_psql(
                        "SELECT application_name, client_addr, state, count(*) FROM pg_stat_activity "
                        "GROUP BY 1, 2, 3 ORDER BY 4 DESC"
                    ),
                ],
            )


def roles(exam: Exam) -> Iterator[Finding]:
    if roles := exam.ask(questions.roles()):
        yield Finding(
            "superuser",
            "warning",
            f"workers are logged in as {', '.join(roles)}, a superuser: what breaks into a handler owns "
            "the server",
            [exam.command("roles", sql=True)],
        )


def driver(exam: Exam) -> Iterator[Finding]:
    if implementation() == "python":
        yield Finding(
            "psycopg_python",
            "warning",
            "psycopg runs in pure Python here, which costs a worker several times the processor time",
            ["pip install 'psycopg[binary]'"],
        )
    parameters = exam.connection.info.get_parameters()
    is_network = not exam.connection.info.host.startswith(("/", "@"))
    if is_network and parameters.get("keepalives") == "0":
        yield Finding(
            "keepalives",
            "warning",
            "the DSN switches keepalives off: a connection that a firewall or a dead server has cut is "
            "not noticed",
            ["export PGQUEUE_DSN='... keepalives=1'   # or leave it out: pgqueue sets short ones"],
        )


def _set(exam: Exam, name: str, value: str, source: str) -> str:
    """Give the command that sets it where it comes from."""
    info = exam.connection.info
    match source:
        case "database":
            place = f"ALTER DATABASE {sql_name(info.dbname)}"
        case "user":
            place = f"ALTER ROLE {sql_name(info.user)}"
        case "database user":
            place = f"ALTER ROLE {sql_name(info.user)} IN DATABASE {sql_name(info.dbname)}"
        case _:
            return write_psql(f"ALTER SYSTEM SET {name} = '{value}'", "SELECT pg_reload_conf()")
    # Where sessions are read-only this one must not be.
    return write_psql("SET default_transaction_read_only = off", f"{place} SET {name} = '{value}'")
