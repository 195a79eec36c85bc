"""The only door to psycopg: connections, and running a Statement on one of any kind.

Every connection made here is READ COMMITTED whatever the role's default (the claim is only
correct there), notices a dead peer within seconds, and never puts a password into an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection, conninfo, errors, pq
from psycopg.rows import tuple_row

from pgqueue.errors import ConfigurationError, DatabaseUnreachable
from pgqueue.sql import Statement

__all__ = [
    "AsyncConnection",
    "Connection",
    "Error",
    "aconnect",
    "arenew",
    "arun",
    "connect",
    "cut",
    "describe",
    "errors",
    "implementation",
    "is_busy",
    "is_infrastructure",
    "is_of_connection",
    "normalise",
    "redact",
    "renew",
    "run",
    "unreachable",
    "watched",
]

T = TypeVar("T")
Error = psycopg.Error

# A peer that vanished is noticed in about six seconds whether we wait for it or write to it: neither
# setting alone covers both. Shorter than the lease, so that a cut is seen before a job is taken over.
_NETWORK: Mapping[str, Any] = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 3,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": 6000,
}

# A peer may fall silent, though its address answers, when it has let us in: then none of these helps.
_SETTING_SECONDS = 5.0

# What the server says when it, not the statement, is the trouble: going away, not yet there, out of
# room, a standby, a timeout set by somebody. The same statement may succeed later as it stands.
_INFRASTRUCTURE = (
    errors.OperationalError,
    errors.InterfaceError,
    errors.ReadOnlySqlTransaction,
)

# The server gave up on a statement for another's sake and rolled it back whole.
_BUSY = (
    errors.LockNotAvailable,
    errors.QueryCanceled,
    errors.DeadlockDetected,
    errors.SerializationFailure,
)


def normalise(dsn: str) -> str:
    """Take URLs as other libraries spell them (`postgresql+psycopg://`), and conninfo strings as they are."""
    return re.sub(r"^(postgres(?:ql)?)\+\w+://", r"\1://", dsn.strip())


def connect(
    dsn: str,
    *,
    application_name: str = "pgqueue",
    autocommit: bool = True,
    settings: Mapping[str, str] | None = None,
    must_write: bool = False,
) -> Connection[tuple[Any, ...]]:
    """Open a connection; `settings` are session settings such as `statement_timeout`.

    With `must_write` a standby, or whatever else takes no writes now, counts as a server that is away: of
    several hosts in the DSN the next one is tried.

    Raises:
        DatabaseUnreachable: no server, or it refused us; one line, no password.
        ConfigurationError: the DSN cannot be read.
    """
    parameters = _parameters(dsn, application_name, must_write=must_write)
    try:
        connection = psycopg.connect(**parameters, autocommit=True)
    except psycopg.Error as error:
        raise unreachable(dsn, error) from None
    try:
        with watched(connection, _SETTING_SECONDS):
            for tries_left in reversed(range(_SETTING_TRIES)):
                try:
                    connection.execute(_setting(settings, connection.info.server_version))
                    break
                except errors.QueryCanceled:
                    if not tries_left:
                        raise
            connection.autocommit = autocommit
    except psycopg.Error as error:
        connection.close()
        raise unreachable(dsn, error) from None
    return connection


async def aconnect(
    dsn: str,
    *,
    application_name: str = "pgqueue",
    autocommit: bool = True,
    settings: Mapping[str, str] | None = None,
    must_write: bool = False,
) -> AsyncConnection[tuple[Any, ...]]:
    """Open an async connection; see `connect`."""
    parameters = _parameters(dsn, application_name, must_write=must_write)
    try:
        connection = await AsyncConnection.connect(**parameters, autocommit=True)
    except psycopg.Error as error:
        raise unreachable(dsn, error) from None
    try:
        with watched(connection, _SETTING_SECONDS):
            for tries_left in reversed(range(_SETTING_TRIES)):
                try:
                    await connection.execute(_setting(settings, connection.info.server_version))
                    break
                except errors.QueryCanceled:
                    if not tries_left:
                        raise
            await connection.set_autocommit(autocommit)
    except psycopg.Error as error:
        await connection.close()
        raise unreachable(dsn, error) from None
    return connection


def run(connection: Connection[Any], statement: Statement[T], schema: str = "pgqueue") -> T:
    """Run a statement on a connection of the caller's and read its rows; transactions stay the caller's."""
    with connection.cursor(row_factory=tuple_row) as cursor:
        cursor.execute(statement.in_schema(schema), statement.params)
        return statement.read(cursor.fetchall() if cursor.description else ())


async def arun(connection: AsyncConnection[Any], statement: Statement[T], schema: str = "pgqueue") -> T:
    """Run a statement on an async connection of the caller's; see `run`."""
    async with connection.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(statement.in_schema(schema), statement.params)
        return statement.read(await cursor.fetchall() if cursor.description else ())


def renew(connection: Connection[Any]) -> None:
    """Make an idle session of ours like new after somebody else has used it; close it if that fails."""
    try:
        connection.row_factory = tuple_row
        connection.execute(_LIKE_NEW)
    except psycopg.Error:
        connection.pgconn.finish()


async def arenew(connection: AsyncConnection[Any]) -> None:
    """Make an idle async session of ours like new; see `renew`."""
    try:
        connection.row_factory = tuple_row
        await connection.execute(_LIKE_NEW)
    except psycopg.Error:
        connection.pgconn.finish()


def cut(connection: Connection[Any] | AsyncConnection[Any]) -> None:
    """Break a connection whose other side does not answer; whoever waits on it hears at once, in any thread.

    A cancel would not do: the driver then waits for the answer to that.
    """
    with (
        contextlib.suppress(OSError, psycopg.Error),
        socket.socket(fileno=os.dup(connection.fileno())) as peer,
    ):
        peer.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def watched(connection: Connection[Any] | AsyncConnection[Any], seconds: float) -> Iterator[None]:
    """Cut a connection that has not said within the time what the block waits for."""
    watchdog = threading.Timer(seconds, cut, (connection,))
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def is_infrastructure(error: BaseException) -> bool:
    """Say whether an error is the server's or the network's trouble rather than the statement's."""
    return isinstance(error, (*_INFRASTRUCTURE, DatabaseUnreachable, OSError))


def is_busy(error: BaseException) -> bool:
    """Say whether the statement met a lock or a timeout: rolled back whole, the connection fine."""
    return isinstance(error, _BUSY)


def is_of_connection(error: BaseException) -> bool:
    """Say of infrastructure's trouble whether another connection may have better luck."""
    return isinstance(error, errors.ReadOnlySqlTransaction)


def implementation() -> str:
    """Name the psycopg implementation in use: `binary`, `c` or `python`."""
    return pq.__impl__


def describe(dsn: str) -> str:
    """Name the database of a DSN for people: host, port and name, nothing secret."""
    try:
        parts = conninfo.conninfo_to_dict(normalise(dsn))
    except psycopg.Error:
        return "the database"
    where = f"{parts.get('host') or 'local socket'}"
    if parts.get("port"):
        where += f":{parts['port']}"
    return f"{where}/{parts.get('dbname') or parts.get('user') or ''}".rstrip("/")


def redact(text: str) -> str:
    """Hide what may be a password in a text that quotes a DSN."""
    text = re.sub(r"(\w://[^:/@\s]*):[^@\s]*@", r"\1:***@", text)
    return re.sub(r"(password\s*=\s*)('(?:[^'\\]|\\.)*'|\S+)", r"\1***", text, flags=re.IGNORECASE)


def unreachable(dsn: str, error: BaseException) -> DatabaseUnreachable:
    """Turn a failed connect into one line that names the database and the server's reason."""
    reason = redact(str(error)).strip().partition("\n")[0]
    reason = re.sub(r"^(connection failed|connection is bad): ", "", reason)
    # libpq names the address once more; we have said which database it is.
    reason = re.sub(r"^connection to server (?:at|on) .*? failed: (?:FATAL:\s+)?", "", reason)
    return DatabaseUnreachable(f"cannot connect to {describe(dsn)}: {reason or type(error).__name__}")


# A timeout set for the role holds until ours is set.
_SETTING_TRIES = 5

# Whatever a session can keep beyond its transactions. DISCARD ALL would do it too, and would throw our own
# prepared statements away each time.
_LIKE_NEW = b"""
RESET SESSION AUTHORIZATION;
RESET ALL;
SET default_transaction_isolation TO 'read committed';
CLOSE ALL;
UNLISTEN *;
SELECT pg_advisory_unlock_all();
DISCARD TEMP;
DISCARD SEQUENCES
"""


def _setting(settings: Mapping[str, str] | None, version: int) -> bytes:
    """Give one message that sets these for the session, against what somebody has set for the role.

    Utility commands only: under a statement_timeout of 1 ms, one message in sixteen with a query in it did
    not make it.
    """
    wanted = {"default_transaction_isolation": "read committed", **(settings or {})}
    if settings and version >= 170_000:
        # It holds for this message, too, until it is changed; the statement's own is what bounds ours.
        wanted = {"transaction_timeout": "0", **wanted}
    commands = [f"SET {name} TO '{value.replace(chr(39), chr(39) * 2)}'" for name, value in wanted.items()]
    return "; ".join(commands).encode()


def _parameters(dsn: str, application_name: str, *, must_write: bool) -> dict[str, Any]:
    try:
        given = conninfo.conninfo_to_dict(normalise(dsn))
    except psycopg.Error:
        # libpq quotes the DSN, password and all, in what it says about a malformed one.
        raise ConfigurationError(
            "the DSN cannot be read; it should look like postgresql://user@host:5432/dbname"
        ) from None
    asked = {"target_session_attrs": "read-write"} if must_write else {}
    return {**_NETWORK, "application_name": application_name, **given, **asked}
