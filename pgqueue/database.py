"""The only door to psycopg: connections, and running a Statement on one of any kind.

Every connection made here is READ COMMITTED whatever the role's default (the claim is only
correct there), notices a dead peer within seconds, and never puts a password into an error.

Behind a proxy that pools transactions (PgBouncer) there is no session to set up: what one sets, the
next client finds. There the settings go along with each statement and end with it, and nothing is
prepared on the server.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import psycopg
from psycopg import AsyncConnection, ClientCursor, Connection, IsolationLevel, conninfo, errors, pq
from psycopg.rows import tuple_row

from pgqueue.errors import ConfigurationError, DatabaseUnreachable
from pgqueue.sql import Statement
from pgqueue.sql.audit import act_as

__all__ = [
    "AsyncConnection",
    "Connection",
    "Error",
    "aconnect",
    "acting",
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
    "is_pooled",
    "normalise",
    "passwords",
    "pools_transactions",
    "redact",
    "renew",
    "run",
    "unreachable",
    "watched",
    "without_detail",
]

T = TypeVar("T")
Error = psycopg.Error

_actor: ContextVar[str | None] = ContextVar("actor", default=None)

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


class _Interruptible(Connection[Any]):
    """A connection that an interrupt leaves with nothing under way: idle, in a transaction, or closed.

    Ctrl-C cancels what the server is at. But where it comes between sending a statement and waiting for
    its answer, nobody reads that answer any more, and every later use fails, the rollback before all.
    """

    def wait(self, *args: Any, **named: Any) -> Any:
        try:
            return super().wait(*args, **named)
        except (KeyboardInterrupt, SystemExit):
            if self.pgconn.transaction_status == pq.TransactionStatus.ACTIVE:
                self.pgconn.finish()
            raise


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

    With `must_write` a standby, or whatever else takes no writes now, counts as a server that is away. So it
    does if there are several hosts, unless the DSN says which one is meant: the next one is tried.

    Raises:
        DatabaseUnreachable: no server, or it refused us; one line, no password.
        ConfigurationError: the DSN cannot be read.
    """
    parameters = _parameters(dsn, application_name, must_write=must_write)
    try:
        connection = _Interruptible.connect(**parameters, autocommit=True)
    except psycopg.Error as error:
        raise unreachable(dsn, error) from None
    try:
        with watched(connection, _SETTING_SECONDS):
            for tries_left in reversed(range(_SETTING_TRIES)):
                try:
                    if (pools := _pools(dsn)) is None:
                        row = connection.execute(_WHO_ANSWERS).fetchone()
                        pools = _note_who_answers(dsn, connection, row)
                    if pools:
                        connection.isolation_level = IsolationLevel.READ_COMMITTED
                        _carry_settings(connection, settings)
                    else:
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
                    if (pools := _pools(dsn)) is None:
                        row = await (await connection.execute(_WHO_ANSWERS)).fetchone()
                        pools = _note_who_answers(dsn, connection, row)
                    if pools:
                        await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
                        _carry_settings(connection, settings)
                    else:
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
    actor = _actor.get()
    if actor is None:
        return _run(connection, statement, schema)
    with connection.transaction() if connection.autocommit else contextlib.nullcontext():
        _run(connection, act_as(actor), schema)
        return _run(connection, statement, schema)


def _run(connection: Connection[Any], statement: Statement[T], schema: str) -> T:
    with connection.cursor(row_factory=tuple_row) as cursor:
        if (settings := _carried_settings(connection)) is None:
            cursor.execute(statement.in_schema(schema), statement.params)
        else:
            cursor.execute(settings + _with_values(connection, statement, schema))
            while cursor.nextset():
                pass
        return statement.read(cursor.fetchall() if cursor.description else ())


async def arun(connection: AsyncConnection[Any], statement: Statement[T], schema: str = "pgqueue") -> T:
    """Run a statement on an async connection of the caller's; see `run`."""
    actor = _actor.get()
    if actor is None:
        return await _arun(connection, statement, schema)
    async with connection.transaction() if connection.autocommit else contextlib.nullcontext():
        await _arun(connection, act_as(actor), schema)
        return await _arun(connection, statement, schema)


async def _arun(connection: AsyncConnection[Any], statement: Statement[T], schema: str) -> T:
    async with connection.cursor(row_factory=tuple_row) as cursor:
        if (settings := _carried_settings(connection)) is None:
            await cursor.execute(statement.in_schema(schema), statement.params)
        else:
            await cursor.execute(settings + _with_values(connection, statement, schema))
            while cursor.nextset():
                pass
        return statement.read(await cursor.fetchall() if cursor.description else ())


@contextlib.contextmanager
def acting(actor: str) -> Iterator[None]:
    """Say in the log who is behind what this block does through pgqueue, in this thread or task.

    `with acting("ann@example.com"): admin.cancel(connection, [42])`. The database role is written down
    anyway. In plain SQL the same is `SET LOCAL pgqueue.actor = 'ann@example.com'`.
    """
    token = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(token)


def is_pooled(connection: Connection[Any] | AsyncConnection[Any]) -> bool:
    """Say whether a connection of ours leads to a proxy that gives each transaction another session."""
    return connection in _pooled


def pools_transactions(dsn: str) -> bool:
    """Say whether a DSN leads to a proxy that pools transactions; one that cannot be reached now does not.

    PGQUEUE_POOLER tells (`transaction`, or `session` for one that does not). Else whoever answers is
    asked who it is: a server names the process that it said we had been connected to, a proxy cannot know
    it. That it may pool only sessions cannot be seen from here.
    """
    if (pools := _pools(dsn)) is None:
        try:
            connect(dsn).close()
        except DatabaseUnreachable:
            return False
        pools = _pools(dsn)
    return bool(pools)


def renew(connection: Connection[Any]) -> None:
    """Make an idle session of ours like new after somebody else has used it; close it if that fails."""
    try:
        connection.row_factory = tuple_row
        if not is_pooled(connection):
            connection.execute(_LIKE_NEW)
    except psycopg.Error:
        connection.pgconn.finish()


async def arenew(connection: AsyncConnection[Any]) -> None:
    """Make an idle async session of ours like new; see `renew`."""
    try:
        connection.row_factory = tuple_row
        if not is_pooled(connection):
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
        parts = _read(dsn)
    except ConfigurationError:
        return "the database"
    # A service says all of it elsewhere, and goes before the environment.
    has_service = bool(parts.get("service") or os.environ.get("PGSERVICE"))
    environ = {} if has_service else os.environ
    host, port, name, user = (
        parts.get(part) or environ.get(variable)
        for part, variable in (
            ("host", "PGHOST"),
            ("port", "PGPORT"),
            ("dbname", "PGDATABASE"),
            ("user", "PGUSER"),
        )
    )
    address = parts.get("hostaddr") or environ.get("PGHOSTADDR")
    where = str(host or address or ("the server of a service" if has_service else "local socket"))
    if port:
        where += f":{port}"
    return f"{where}/{name or user or ''}".rstrip("/")


def passwords(dsn: str) -> list[str]:
    """Give the passwords that a DSN holds, as they are and as a URL spells them, the longest first.

    Of one that cannot be read, what may be one.
    """
    try:
        parts = _read(dsn)
    except ConfigurationError:
        parts = {}
    found = {str(parts[name]) for name in ("password", "sslpassword") if parts.get(name)}
    for upto_at in (r"[^@\s]*", r"\S*"):
        if spelt := re.search(rf"\w://[^:/\s]*:({upto_at})@", dsn):
            found.add(spelt[1])
    return sorted(found, key=len, reverse=True)


def redact(text: str) -> str:
    """Hide what may be a password in a text that quotes a DSN."""
    # As far as the last @: one in the password may not be escaped.
    text = re.sub(r"(\w://[^:/\s\"]*):\S*@", r"\1:***@", text)
    return re.sub(r"(password\s*=\s*)('(?:[^'\\]|\\.)*'|\S+)", r"\1***", text, flags=re.IGNORECASE)


def without_detail(error: Error) -> Error:
    """Leave an error's first line: in the others the server may quote a whole row, a job's arguments too."""
    if error.args:
        error.args = (str(error.args[0]).partition("\n")[0],)
    return error


def unreachable(dsn: str, error: BaseException) -> DatabaseUnreachable:
    """Turn a failed connect into one line that names the database and the server's reason."""
    reason = redact(str(error)).strip().partition("\n")[0]
    reason = re.sub(r"^(connection failed|connection is bad): ", "", reason)
    where = describe(dsn)
    if socket := re.match(r'connection to server on socket "([^"]+)" failed', reason):
        where = re.sub(r"^local socket/?", f"local socket {socket[1]}, database ", where)
        where = where.removesuffix(", database ")
    # libpq names the address once more; we have said which database it is.
    reason = re.sub(r"^connection to server (?:at|on) .*? failed: (?:FATAL:\s+)?", "", reason)
    return DatabaseUnreachable(f"cannot connect to {where}: {reason or type(error).__name__}")


# Behind a proxy: the settings that go along with each statement, for connections of ours.
_pooled: MutableMapping[Connection[Any] | AsyncConnection[Any], bytes] = WeakKeyDictionary()

# What was found out about who answers, by DSN.
_answered_by_pooler: dict[str, bool] = {}
_WHO_ANSWERS = b"SELECT pg_backend_pid()"

# They would do nothing within one message.
_OF_SESSIONS = ("idle_session_timeout", "idle_in_transaction_session_timeout", "application_name")

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


def _pools(dsn: str) -> bool | None:
    told = os.environ.get("PGQUEUE_POOLER", "").lower()
    if told not in ("", "transaction", "session", "none"):
        raise ConfigurationError(
            f"PGQUEUE_POOLER is {told!r}; it should be transaction, session, none, or not set"
        )
    return told == "transaction" if told else _answered_by_pooler.get(dsn)


def _note_who_answers(
    dsn: str, connection: Connection[Any] | AsyncConnection[Any], row: tuple[Any, ...] | None
) -> bool:
    is_proxy = row is not None and row[0] != connection.info.backend_pid
    _answered_by_pooler[dsn] = is_proxy
    return is_proxy


def _carry_settings(
    connection: Connection[Any] | AsyncConnection[Any], settings: Mapping[str, str] | None
) -> None:
    """Have these go along with each statement: one message is one transaction, and they are local to it."""
    # What is prepared stays with a session that the next transaction does not get.
    connection.prepare_threshold = None
    commands = [
        f"SET LOCAL {name} TO '{value.replace(chr(39), chr(39) * 2)}'"
        for name, value in (settings or {}).items()
        if name not in _OF_SESSIONS
    ]
    _pooled[connection] = "; ".join(
        ["SET TRANSACTION ISOLATION LEVEL READ COMMITTED", *commands, ""]
    ).encode()


def _carried_settings(connection: Connection[Any] | AsyncConnection[Any]) -> bytes | None:
    """Give what has to go along with a statement; None in a transaction, which was begun as it should be."""
    if not _pooled or (settings := _pooled.get(connection)) is None:
        return None
    is_idle = connection.info.transaction_status == pq.TransactionStatus.IDLE
    return settings if is_idle and connection.autocommit else None


def _with_values(
    connection: Connection[Any] | AsyncConnection[Any], statement: Statement[Any], schema: str
) -> bytes:
    """Give the text with its parameters in it: the protocol takes them apart from it for one command only."""
    text = ClientCursor(cast("Connection[Any]", connection)).mogrify(
        statement.in_schema(schema), statement.params
    )
    return text.encode(connection.info.encoding)


# Where a server is, and which database there.
_PLACE = ("host", "hostaddr", "port", "dbname")


def _parameters(dsn: str, application_name: str, *, must_write: bool) -> dict[str, Any]:
    given = _read(dsn)
    asked = {"target_session_attrs": "read-write"} if must_write or _leaves_host_open(given) else {}
    return {**_NETWORK, "application_name": application_name, **given, **asked}


def _leaves_host_open(given: Mapping[str, Any]) -> bool:
    """Say whether there are several hosts, and nobody has said which of them is meant."""
    if given.get("target_session_attrs") or os.environ.get("PGTARGETSESSIONATTRS"):
        return False
    # What PG* variables and their service say counts unless the DSN says something else.
    unsaid = {one.keyword.decode(): (one.val or b"").decode() for one in pq.Conninfo.get_defaults()}
    if unsaid["target_session_attrs"] not in ("", "any"):
        return False
    return any("," in str(given.get(name) or unsaid[name]) for name in ("host", "hostaddr"))


def _read(dsn: str) -> dict[str, Any]:
    """Give what a DSN says.

    Raises:
        ConfigurationError: it cannot be read, or says what cannot be meant; quotes nothing of it.
    """
    dsn = normalise(dsn)
    url = re.match(r"postgres(?:ql)?://(.*)", dsn, re.DOTALL)
    # The first @ ends the name and the password, but for one behind a slash.
    has_stray_at = url is not None and "@" in re.sub(r"^[^@/]*@", "", url[1])
    try:
        given = conninfo.conninfo_to_dict(dsn)
    except psycopg.Error:
        # libpq quotes the DSN, password and all, in what it says about a malformed one.
        if has_stray_at:
            raise _misspelt() from None
        raise ConfigurationError(
            "the DSN cannot be read; it should look like postgresql://user@host:5432/dbname"
        ) from None
    is_torn = has_stray_at and any("@" in str(given.get(name, "")) for name in _PLACE)
    if url and (is_torn or not re.fullmatch(r"[\d,]*", str(given.get("port") or ""))):
        # What libpq takes for the host or the database is then a part of the password, and would be shown.
        raise _misspelt()
    return given


def _misspelt() -> ConfigurationError:
    return ConfigurationError(
        "the DSN cannot be read: percent-encode the password in it, and the user's name "
        "(@ is %40, : is %3A, / is %2F, ? is %3F, % is %25)"
    )
