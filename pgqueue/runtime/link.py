"""A connection that comes back: a worker never dies of a database outage, and never goes deaf after one.

All links of a worker share one account of the outage, so that it is said once, not once a try.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Mapping
from typing import Any, TypeVar

from pgqueue.database import (
    AsyncConnection,
    Error,
    aconnect,
    arun,
    cut,
    is_busy,
    is_infrastructure,
    is_of_connection,
    redact,
    watched,
)
from pgqueue.errors import DatabaseUnreachable
from pgqueue.runtime.log import Log
from pgqueue.sql import Statement

T = TypeVar("T")

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
# Who waited for a lock has waited already, on the server.
_LONGEST_BUSY_PAUSE_SECONDS = 0.5
# A statement that was refused and not tried again within this time says nothing of the server any more.
_FORGET_SECONDS = 30.0

# A connection that breaks after so long without a word was broken before.
_SILENT_SECONDS = 3.0

# Bounds for our own statements, on the server: a claim that hangs helps nobody, and a session that
# vanished mid-transaction must not hold rows. All of them, so that none set for our role is in force.
PATIENCE_SECONDS = 15.0
SESSION_SETTINGS: Mapping[str, str] = {
    "statement_timeout": "10s",
    "lock_timeout": "5s",
    "idle_in_transaction_session_timeout": "10s",
    "idle_session_timeout": "0",
}


class DatabaseLost(Exception):
    """The statement's connection broke or the server is in trouble; whether it ran is not known."""


class DatabaseBusy(DatabaseLost):
    """The server rolled the statement back for another's sake: a lock, a timeout. The connection is fine."""


class DatabaseUnable(DatabaseLost):
    """The server lacks what the statement needs, room on a disk say: rolled back. The connection is fine."""


class Outage:
    """Whether the database is away, as all links of a worker see it; said once at its begin and its end.

    `what` it is that they all lead to, for the log.
    """

    def __init__(self, log: Log, what: str = "database") -> None:
        self._log = log
        self._what = what
        # Links without a connection, and statements that the server is unable to do.
        self._down: set[str] = set()
        self._began_at = 0.0
        self._ended_at = -math.inf
        self._alarms: dict[str, asyncio.TimerHandle] = {}
        self._news = asyncio.Event()
        # Connections lost and statements the server was unable to do, since the start.
        self.errors = 0
        # Since when a connection was silent that then broke: one not heard from since will hardly be better.
        self.silent_since = -math.inf

    def begins(self, link: str, error: BaseException, heard_at: float = math.inf) -> None:
        """Take note that a link has lost its connection, which it last heard from at that monotonic time.

        If that was before the last outage ended, it only learns now of what is over.
        """
        self.errors += 1
        if self._down or heard_at >= self._ended_at:
            self._add(link, f"{self._what} lost, reconnecting", error)

    def hampers(self, statement: str, error: BaseException) -> None:
        """Take note that the server is unable to do a statement, until it does it."""
        self.errors += 1
        self._add(statement, f"{self._what} in trouble, trying again", error)
        self._forget(statement)
        self._alarms[statement] = asyncio.get_running_loop().call_later(_FORGET_SECONDS, self.ends, statement)

    def _add(self, source: str, event: str, error: BaseException) -> None:
        if not self._down:
            self._began_at = time.monotonic()
            self._log.error(event, error=redact(str(error)).strip().partition("\n")[0])
        self._down.add(source)

    def _forget(self, source: str) -> None:
        if (alarm := self._alarms.pop(source, None)) is not None:
            alarm.cancel()

    def ends(self, source: str) -> None:
        if source in self._down:
            self._forget(source)
            self._down.discard(source)
            # Wakes those who wait just now, and nobody later.
            self._news.set()
            self._news.clear()
            if not self._down:
                self._ended_at = time.monotonic()
                self._log.info(f"{self._what} is back", seconds=round(self._ended_at - self._began_at, 3))

    @property
    def is_on(self) -> bool:
        return bool(self._down)

    async def wait(self, seconds: float) -> None:
        """Wait so long, or until somebody else has got through."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()


class Link:
    """One connection with a purpose, reconnecting for ever with jitter."""

    def __init__(
        self,
        dsn: str,
        schema: str,
        name: str,
        outage: Outage,
        settings: Mapping[str, str] | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._dsn = dsn
        self._schema = schema
        self._name = name
        self._outage = outage
        self._settings = {**SESSION_SETTINGS, **(settings or {})}
        # How long to wait before trying again: to connect (""), or a statement that was refused.
        self._pauses: dict[str, float] = {}
        self._heard_at = math.inf
        self._patience_seconds = patience_seconds
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self.connection: AsyncConnection[Any] | None = None

    async def connect(self) -> AsyncConnection[Any]:
        """Give the connection, opening it if need be.

        Raises:
            DatabaseLost: not now; a pause has been made, so the caller may just try again.
        """
        if self.connection is not None and not self.connection.closed:
            if self._heard_at >= self._outage.silent_since:
                return self.connection
            # To find out would take our patience once more.
            await self.close()
        self.connection = None
        try:
            connection = await aconnect(
                self._dsn,
                application_name=f"pgqueue worker {self._name}",
                settings=self._settings,
                must_write=True,
            )
            try:
                with watched(connection, self._patience_seconds):
                    await self.prepare(connection)
            except BaseException:
                await connection.close()
                raise
        except (DatabaseUnreachable, Error, OSError) as error:
            await self._lose(error)
            raise DatabaseLost from error
        self.connection = connection
        self._heard_at = time.monotonic()
        self._outage.ends(self._name)
        return connection

    async def prepare(self, connection: AsyncConnection[Any]) -> None:
        """Make a new connection fit for its purpose."""

    async def run(self, statement: Statement[T]) -> T:
        """Run a statement.

        Raises:
            DatabaseLost: the connection or the server failed; whether it ran is not known.
            Error: the statement itself was refused; the connection is fine.
        """
        try:
            async with self._turn:
                answer = await self._run(statement)
        except (DatabaseBusy, DatabaseUnable) as error:
            # Only whoever asked waits: others may have better luck.
            is_busy = isinstance(error, DatabaseBusy)
            longest = _LONGEST_BUSY_PAUSE_SECONDS if is_busy else _LONGEST_PAUSE_SECONDS
            await self._pause(statement.text, longest)
            raise
        self._heard_at = time.monotonic()
        self._outage.ends(self._named(statement))
        for trouble in ("", statement.text):
            self._pauses.pop(trouble, None)
        return answer

    async def _run(self, statement: Statement[T]) -> T:
        connection = await self.connect()
        # The server's own bounds say nothing of a server that is gone while its address still answers.
        watchdog = self._loop.call_later(self._patience_seconds, cut, connection)
        asked_at = time.monotonic()
        try:
            return await arun(connection, statement, self._schema)
        except Error as error:
            if is_busy(error):
                raise DatabaseBusy(redact(str(error)).partition("\n")[0]) from error
            if not is_infrastructure(error):
                raise
            if not connection.closed and not is_of_connection(error):
                self._outage.hampers(self._named(statement), error)
                raise DatabaseUnable from error
            if time.monotonic() - asked_at > _SILENT_SECONDS:
                self._outage.silent_since = asked_at
            await self._lose(error, self._heard_at)
            raise DatabaseLost from error
        except asyncio.CancelledError:
            # The statement may still be under way: nobody else may use this connection.
            await self.close()
            raise
        finally:
            watchdog.cancel()

    async def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            await connection.close()

    def _named(self, statement: Statement[Any]) -> str:
        return f"{self._name}: {statement.text}"

    async def _lose(self, error: BaseException, heard_at: float = math.inf) -> None:
        self._outage.begins(self._name, error, heard_at)
        await self.close()
        await self._pause("", _LONGEST_PAUSE_SECONDS)

    async def _pause(self, trouble: str, longest: float) -> None:
        seconds = min(self._pauses.get(trouble, _FIRST_PAUSE_SECONDS), longest)
        self._pauses[trouble] = seconds * 2
        await self._outage.wait(seconds * random.uniform(0.5, 1.0))
