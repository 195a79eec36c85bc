"""A few connections of our own for a client: opened when wanted, kept for the next one who wants one.

No thread or task works behind the scenes, so there is nothing to stop, nothing that a fork tears
apart, and nothing that keeps an event loop from ending. A kept connection is looked at before each
use, which costs no round trip: a statement that was sent is never repeated, because an enqueue
whose answer got lost may have happened, so a dead connection has to be found before.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from pgqueue import database
from pgqueue.database import AsyncConnection, Connection
from pgqueue.dsn import aresolve, resolve
from pgqueue.errors import DatabaseUnreachable

_Kept = deque[tuple[float, Any]]


class Connections:
    """Autocommit connections for threads, at most `max_connections` at a time.

    Who comes later waits for `wait_seconds`. One that nobody wanted for `keep_seconds` is closed
    when another one comes back. With `must_write` a server that takes no writes counts as away.
    """

    def __init__(
        self,
        dsn: str | None,
        schema: str,
        max_connections: int,
        *,
        wait_seconds: float = 30.0,
        keep_seconds: float = 300.0,
        must_write: bool = False,
    ) -> None:
        self._explicit = dsn
        self._schema = schema
        self._max = max_connections
        self._wait_seconds = wait_seconds
        self._keep_seconds = keep_seconds
        self._must_write = must_write
        self._dsn: str | None = None
        self._start_empty()
        _all.add(self)

    @contextmanager
    def lend(self) -> Iterator[Connection[Any]]:
        """Lend a connection that can be used.

        Raises:
            DatabaseUnreachable: none could be opened, or all stayed in use.
        """
        room = self._room
        if not room.acquire(timeout=self._wait_seconds):
            raise _all_in_use(self._max, self._wait_seconds)
        try:
            conn = _kept_alive(self._kept) or database.connect(self._locate(), must_write=self._must_write)
            try:
                yield conn
            except database.Error as error:
                _close_unfit(conn, error)
                raise
            finally:
                _take_back(self._kept, conn, self._keep_seconds)
        finally:
            room.release()

    def close(self) -> None:
        """Close those that nobody uses."""
        _close_all(self._kept)

    def _locate(self) -> str:
        if self._dsn is None:
            self._dsn = resolve(self._explicit, os.environ, schema=self._schema).dsn
        return self._dsn

    def _start_empty(self) -> None:
        self._room = threading.BoundedSemaphore(self._max)
        self._kept: _Kept = deque()
        self._closing = weakref.finalize(self, _close_all, self._kept)

    def leave_to_parent(self) -> None:
        """After a fork: start without connections, and without closing those that are the parent's."""
        self._closing.detach()
        _of_parent.append(self._kept)
        self._start_empty()


class AsyncConnections:
    """The async twin; each event loop has connections of its own."""

    def __init__(
        self,
        dsn: str | None,
        schema: str,
        max_connections: int,
        *,
        wait_seconds: float = 30.0,
        keep_seconds: float = 300.0,
        must_write: bool = False,
    ) -> None:
        self._explicit = dsn
        self._schema = schema
        self._max = max_connections
        self._wait_seconds = wait_seconds
        self._keep_seconds = keep_seconds
        self._must_write = must_write
        self._dsn: str | None = None
        self._start_empty()
        _all.add(self)

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[AsyncConnection[Any]]:
        """Lend a connection that can be used in the running loop; see `Connections.lend`."""
        room, kept = self._of_loop(asyncio.get_running_loop())
        try:
            async with asyncio.timeout(self._wait_seconds):
                await room.acquire()
        except TimeoutError:
            raise _all_in_use(self._max, self._wait_seconds) from None
        try:
            conn = _kept_alive(kept) or await database.aconnect(
                await self._locate(), must_write=self._must_write
            )
            try:
                yield conn
            except database.Error as error:
                _close_unfit(conn, error)
                raise
            finally:
                _take_back(kept, conn, self._keep_seconds)
        finally:
            room.release()

    def close(self) -> None:
        """Close those of the running loop that nobody uses."""
        _close_all(self._of_loop(asyncio.get_running_loop())[1])

    def _of_loop(self, loop: asyncio.AbstractEventLoop) -> tuple[asyncio.Semaphore, _Kept]:
        found = self._loops.get(loop)
        if found is None:
            with self._lock:
                for ended in [known for known in self._loops if known.is_closed()]:
                    _close_all(self._loops.pop(ended)[1])
                found = self._loops[loop] = (asyncio.Semaphore(self._max), deque())
        return found

    async def _locate(self) -> str:
        if self._dsn is None:
            self._dsn = (await aresolve(self._explicit, os.environ, schema=self._schema)).dsn
        return self._dsn

    def _start_empty(self) -> None:
        self._lock = threading.Lock()
        self._loops: dict[asyncio.AbstractEventLoop, tuple[asyncio.Semaphore, _Kept]] = {}
        self._closing = weakref.finalize(self, _close_all_loops, self._loops)

    def leave_to_parent(self) -> None:
        """After a fork; see `Connections.leave_to_parent`."""
        self._closing.detach()
        _of_parent.append(self._loops)
        self._start_empty()


def _kept_alive(kept: _Kept) -> Any:
    """Give the connection used last that is still good, or None."""
    while True:
        try:
            _, conn = kept.pop()
        except IndexError:
            return None
        if _is_alive(conn):
            return conn
        _close(conn)


def _take_back(kept: _Kept, conn: Connection[Any] | AsyncConnection[Any], keep_seconds: float) -> None:
    if conn.closed or conn.info.transaction_status.name != "IDLE":
        _close(conn)
        return
    now = time.monotonic()
    kept.append((now, conn))
    with suppress(IndexError):  # other threads take and bring back meanwhile
        while kept[0][0] < now - keep_seconds:
            _close(kept.popleft()[1])


def _is_alive(conn: Connection[Any] | AsyncConnection[Any]) -> bool:
    """Say whether an idle connection can be used, without asking the server.

    Nothing is due on it: what can be read is the server's goodbye, or the end.
    """
    if conn.closed:
        return False
    poll = select.poll()
    poll.register(conn.fileno(), select.POLLIN)
    return not poll.poll(0)


def _close_unfit(conn: Connection[Any] | AsyncConnection[Any], error: database.Error) -> None:
    """Keep no connection whose server has refused the statement for its own sake."""
    if database.is_of_connection(error):
        _close(conn)


def _all_in_use(max_connections: int, wait_seconds: float) -> DatabaseUnreachable:
    return DatabaseUnreachable(
        f"no connection was free for {wait_seconds:g} s: all {max_connections} of this client were in use"
    )


def _close(conn: Connection[Any] | AsyncConnection[Any]) -> None:
    # The driver's own close of an async connection could be awaited only in its loop, which may be
    # gone; this is all that it does.
    conn.pgconn.finish()


def _close_all(kept: _Kept) -> None:
    with suppress(IndexError):
        while True:
            _close(kept.popleft()[1])


def _close_all_loops(loops: dict[Any, tuple[Any, _Kept]]) -> None:
    for _, kept in loops.values():
        _close_all(kept)


# Connections survive no fork: both sides would write on them. The child keeps the parent's from being
# collected, which would say goodbye to the server in the parent's name.
_all: weakref.WeakSet[Connections | AsyncConnections] = weakref.WeakSet()
_of_parent: list[Any] = []


def _after_fork() -> None:
    for connections in list(_all):
        connections.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
