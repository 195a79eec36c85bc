"""A connection that comes back: a worker never dies of a database outage, and never goes deaf after one.

All links of a worker share one account of the outage, so that it is said once, not once a try.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from typing import Any, TypeVar

from pgqueue.database import AsyncConnection, Error, aconnect, arun, cut, is_busy, is_infrastructure, redact
from pgqueue.errors import DatabaseUnreachable
from pgqueue.runtime.log import Log
from pgqueue.sql import Statement

T = TypeVar("T")

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0

# Bounds for our own statements, on the server: a claim that hangs helps nobody, and a session that
# vanished mid-transaction must not hold rows.
PATIENCE_SECONDS = 15.0
SESSION_SETTINGS: Mapping[str, str] = {
    "statement_timeout": "10s",
    "lock_timeout": "5s",
    "idle_in_transaction_session_timeout": "10s",
}


class DatabaseLost(Exception):
    """The statement's connection broke or the server is in trouble; whether it ran is not known."""


class DatabaseBusy(DatabaseLost):
    """The server rolled the statement back for another's sake: a lock, a timeout. The connection is fine."""


class Outage:
    """Whether the database is away, as all links of a worker see it."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._down: set[str] = set()
        self._began_at = 0.0

    def begins(self, link: str, error: BaseException) -> None:
        if not self._down:
            self._began_at = time.monotonic()
            self._log.error(
                "database lost, reconnecting", error=redact(str(error)).strip().partition("\n")[0]
            )
        self._down.add(link)

    def ends(self, link: str) -> None:
        if link in self._down:
            self._down.discard(link)
            if not self._down:
                self._log.info("database is back", seconds=round(time.monotonic() - self._began_at, 3))

    @property
    def is_on(self) -> bool:
        return bool(self._down)


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
        self._pause_seconds = _FIRST_PAUSE_SECONDS
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
            return self.connection
        self.connection = None
        try:
            connection = await aconnect(
                self._dsn, application_name=f"pgqueue worker {self._name}", settings=self._settings
            )
            try:
                await self.prepare(connection)
            except BaseException:
                await connection.close()
                raise
        except (DatabaseUnreachable, Error, OSError) as error:
            await self._lose(error)
            raise DatabaseLost from error
        self.connection = connection
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
        except DatabaseBusy:
            # Only whoever asked waits: others may have better luck.
            await self._pause()
            raise
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        return answer

    async def _run(self, statement: Statement[T]) -> T:
        connection = await self.connect()
        # The server's own bounds say nothing of a server that is gone while its address still answers.
        watchdog = self._loop.call_later(self._patience_seconds, cut, connection)
        try:
            return await arun(connection, statement, self._schema)
        except Error as error:
            if is_busy(error):
                raise DatabaseBusy(redact(str(error)).partition("\n")[0]) from error
            if not is_infrastructure(error):
                raise
            await self._lose(error)
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

    async def _lose(self, error: BaseException) -> None:
        self._outage.begins(self._name, error)
        await self.close()
        await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(self._pause_seconds * random.uniform(0.5, 1.0))
        self._pause_seconds = min(self._pause_seconds * 2, _LONGEST_PAUSE_SECONDS)
