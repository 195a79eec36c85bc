"""Advisory locks for the application's own purposes: one at a time, in the whole cluster, by a name.

Without a connection the lock has a session of its own and lasts until it is released, or until that
session breaks: whoever must not go on without it asks `is_held`. On a connection of the caller's it
belongs to the transaction and ends with it.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from pgqueue.database import (
    AsyncConnection,
    Connection,
    Error,
    aconnect,
    arun,
    connect,
    errors,
    is_pooled,
    run,
)
from pgqueue.dsn import aresolve, of_sessions, resolve
from pgqueue.errors import ConfigurationError, LockBusy
from pgqueue.model.encoding import checked_text
from pgqueue.sql import Statement, locks

C = TypeVar("C", Connection[Any], AsyncConnection[Any])

MAX_NAME_BYTES = 200
# Seen by whoever looks at pg_stat_activity; the server cuts it at 63 bytes.
_APPLICATION_NAME = "pgqueue lock "


class _Lock(Generic[C]):
    """What both kinds have in common: C is the kind of connection."""

    def __init__(
        self, dsn: str | None, schema: str, name: str, wait_seconds: float | None, conn: C | None
    ) -> None:
        self.name = _checked_name(name)
        self._wait_seconds = _checked_wait(wait_seconds)
        self._dsn = dsn
        self._schema = schema
        self._in_transaction = conn is not None
        self._conn: C | None = conn
        self._is_taken = False

    @property
    def is_held(self) -> bool:
        """Whether it was taken and what holds it still stands, as far as can be seen from here.

        That is its session, or the caller's transaction; that the caller has begun another one since
        cannot be seen.
        """
        if not self._is_taken or self._conn is None or (self._in_transaction and _is_idle(self._conn)):
            return False
        return _stands(self._conn)

    def _settings(self) -> dict[str, str]:
        """Give the session's settings; its name by SET, because a DSN's own would override ours.

        Whatever may be set for a role that ends a wait or an idle session is set to what we promise.
        """
        return {
            "lock_timeout": _timeout(self._wait_seconds),
            "statement_timeout": "0",
            "idle_session_timeout": "0",
            "idle_in_transaction_session_timeout": "0",
            "application_name": _APPLICATION_NAME + self.name,
        }

    def _question(self) -> Statement[bool]:
        ask = locks.try_session if self._wait_seconds == 0 else locks.wait_session
        return ask(self.name)

    def _refuse_pooler(self, conn: C) -> None:
        if is_pooled(conn):
            raise ConfigurationError(
                f"lock {self.name!r} needs a session of its own; a proxy that pools transactions has none: "
                "set PGQUEUE_LISTEN_DSN to the server behind it, or lock within a transaction with conn="
            )

    def _refuse_without_transaction(self, conn: C) -> None:
        # The lock would end with the statement that takes it.
        if conn.autocommit and _is_idle(conn):
            raise ConfigurationError(
                f"lock {self.name!r}: the connection is in autocommit and in no transaction that could hold "
                "it: take the lock within `with conn.transaction():`, or leave conn out"
            )

    def _refuse_twice(self) -> None:
        if self._conn is not None:
            raise ConfigurationError(f"lock {self.name!r}: it is held already")


class Lock(_Lock[Connection[Any]]):
    """A named lock; made by `App.lock`. Use it as a context, or `acquire` and `release` it."""

    def acquire(self) -> bool:
        """Take the lock, waiting as long as it was told; False if somebody else had it all the time.

        Raises:
            DatabaseUnreachable: no session could be had.
            ConfigurationError: it is held by this object already, or the connection given for it is in no
                transaction.
        """
        if self._conn is not None and self._in_transaction:
            self._refuse_without_transaction(self._conn)
            self._is_taken = self._acquire_in_transaction(self._conn)
            return self._is_taken
        self._refuse_twice()
        found = resolve(self._dsn, os.environ, schema=self._schema)
        conn = connect(of_sessions(found.dsn, os.environ), settings=self._settings())
        try:
            self._refuse_pooler(conn)
            if run(conn, self._question(), self._schema):
                self._conn, self._is_taken = conn, True
                return True
        except errors.LockNotAvailable:
            pass
        except BaseException:
            conn.close()
            raise
        conn.close()
        return False

    def _acquire_in_transaction(self, conn: Connection[Any]) -> bool:
        schema = self._schema
        if self._wait_seconds == 0:
            return run(conn, locks.try_transaction(self.name), schema)
        before = run(conn, locks.lock_timeout(), schema)
        try:
            with conn.transaction():
                run(conn, locks.set_lock_timeout(_timeout(self._wait_seconds), is_local=True), schema)
                taken = run(conn, locks.wait_transaction(self.name), schema)
                run(conn, locks.set_lock_timeout(before, is_local=True), schema)
        except errors.LockNotAvailable:
            return False
        return taken

    def release(self) -> None:
        """Give the lock back; one of a transaction ends with that, and not before."""
        if not self._in_transaction and self._conn is not None:
            # The session's end is the lock's end, whatever state it is in; but the server takes a moment
            # to notice that, and whoever asks after this must find the lock free.
            conn, self._conn, self._is_taken = self._conn, None, False
            try:
                with suppress(Error):
                    run(conn, locks.unlock_session(self.name), self._schema)
            finally:
                conn.close()

    def __enter__(self) -> Self:
        if not self.acquire():
            raise LockBusy(self.name, self._wait_seconds or 0.0, self._schema)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class AsyncLock(_Lock[AsyncConnection[Any]]):
    """A named lock in an event loop; made by `App.alock`. See `Lock`."""

    async def acquire(self) -> bool:
        """Take the lock; see `Lock.acquire`."""
        if self._conn is not None and self._in_transaction:
            self._refuse_without_transaction(self._conn)
            self._is_taken = await self._acquire_in_transaction(self._conn)
            return self._is_taken
        self._refuse_twice()
        found = await aresolve(self._dsn, os.environ, schema=self._schema)
        conn = await aconnect(of_sessions(found.dsn, os.environ), settings=self._settings())
        try:
            self._refuse_pooler(conn)
            if await arun(conn, self._question(), self._schema):
                self._conn, self._is_taken = conn, True
                return True
        except errors.LockNotAvailable:
            pass
        except BaseException:
            await conn.close()
            raise
        await conn.close()
        return False

    async def _acquire_in_transaction(self, conn: AsyncConnection[Any]) -> bool:
        schema = self._schema
        if self._wait_seconds == 0:
            return await arun(conn, locks.try_transaction(self.name), schema)
        before = await arun(conn, locks.lock_timeout(), schema)
        try:
            async with conn.transaction():
                await arun(conn, locks.set_lock_timeout(_timeout(self._wait_seconds), is_local=True), schema)
                taken = await arun(conn, locks.wait_transaction(self.name), schema)
                await arun(conn, locks.set_lock_timeout(before, is_local=True), schema)
        except errors.LockNotAvailable:
            return False
        return taken

    async def release(self) -> None:
        """Give the lock back; see `Lock.release`."""
        if not self._in_transaction and self._conn is not None:
            conn, self._conn, self._is_taken = self._conn, None, False
            try:
                with suppress(Error):
                    await arun(conn, locks.unlock_session(self.name), self._schema)
            finally:
                await conn.close()

    async def __aenter__(self) -> Self:
        if not await self.acquire():
            raise LockBusy(self.name, self._wait_seconds or 0.0, self._schema)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


def _is_idle(conn: Connection[Any] | AsyncConnection[Any]) -> bool:
    return conn.info.transaction_status.name == "IDLE"


def _stands(conn: Connection[Any] | AsyncConnection[Any]) -> bool:
    """Say whether a session stands, without asking the server: what can be read from it is its end."""
    try:
        if conn.closed:
            return False
        poll = select.poll()
        poll.register(conn.fileno(), select.POLLIN)
        return not poll.poll(0)
    except (Error, OSError):
        return False


def _timeout(wait_seconds: float | None) -> str:
    """Write a wait as lock_timeout takes it; 0 there means for ever."""
    return "0" if wait_seconds is None else f"{max(1, round(wait_seconds * 1000))}ms"


def _checked_name(name: str) -> str:
    try:
        return checked_text("a lock's name", name, MAX_NAME_BYTES)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def _checked_wait(seconds: float | None) -> float | None:
    if seconds is not None and (
        isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= 86_400
    ):
        raise ConfigurationError(f"wait_seconds must be between 0 and a day, or None, not {seconds!r:.60}")
    return seconds
