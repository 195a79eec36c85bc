"""Keeping leases: a thread and a connection of its own, which no loop and no handler can hold up."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pgqueue.database import (
    Connection,
    connect,
    is_busy,
    is_infrastructure,
    is_of_connection,
    run,
    watched,
)
from pgqueue.runtime.ledger import Held, Ledger
from pgqueue.runtime.link import SESSION_SETTINGS
from pgqueue.sql import Statement, attempts

# Renewed at once: this many rows take a few milliseconds.
_CHUNK = 1000
_RETRY_SECONDS = 0.5
_IDLE_RETRY_SECONDS = 2.0
# Holding nothing, look only every so many beats whether the connection still stands.
_IDLE_BEATS = 3

Verdicts = list[tuple[Held, str]]
T = TypeVar("T")


class LeaseKeeper:
    """Renews the leases of everything held, and passes on what the database says about it.

    `on_verdicts` and `on_trouble` (an error, or None when it is over; and when the database was last
    heard from, on the connection that broke) are called on the loop.
    """

    def __init__(
        self,
        dsn: str,
        schema: str,
        ledger: Ledger,
        beat_seconds: float,
        *,
        on_verdicts: Callable[[Verdicts], None],
        on_trouble: Callable[[BaseException | None, float], None],
    ) -> None:
        self._dsn = dsn
        self._schema = schema
        self._ledger = ledger
        self.beat_seconds = beat_seconds
        self._on_verdicts = on_verdicts
        self._on_trouble = on_trouble
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()
        self._connection: Connection[Any] | None = None
        # Until the first answer nothing is known.
        self._is_in_trouble = True
        self._heard_at = math.inf
        # A lock on the table must not cost the connection: its patience ends before the watchdog's.
        self._settings = {**SESSION_SETTINGS, "lock_timeout": f"{beat_seconds * 500:.0f}ms"}
        self._thread = threading.Thread(target=self._run, name="pgqueue-lease", daemon=True)
        self._idle_beats = 0
        # When it last came round, whether or not the database answered.
        self.last_turn_at = time.monotonic()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        # The first one is only for the connection, which there may be none for later.
        pause = 0.0
        while not self._stopped.wait(pause):
            began_at = time.monotonic()
            is_done = self._beat()
            self.last_turn_at = time.monotonic()
            # The next beat is due a beat after this one began, and soon if something was left undone.
            pause = max(0.05, self.beat_seconds - (time.monotonic() - began_at))
            if not is_done:
                retry = _RETRY_SECONDS if self._ledger.held else _IDLE_RETRY_SECONDS
                pause = min(pause, retry * random.uniform(0.5, 1.0))
        self._close()

    def _beat(self, *, is_retry: bool = False) -> bool:
        """Renew once; False when some lease still waits for it."""
        try:
            is_done = self._renew()
        except Exception as error:  # noqa: BLE001  were this thread to end, every job held would run twice
            self._idle_beats = 0  # look again at once
            self._ledger.metrics.heartbeat_failures += 1
            if is_busy(error):
                return False
            self._is_in_trouble = True
            self._tell(self._on_trouble, error, self._heard_at)
            connection = self._connection
            if connection is not None and (
                connection.closed or is_of_connection(error) or not is_infrastructure(error)
            ):
                self._close()
                if not is_retry:
                    # No time to lose: perhaps only this connection is gone.
                    return self._beat(is_retry=True)
            # A server that is unable may let nobody in either: the connection we have we keep.
            self._ledger.can_renew = False
            return False
        self._ledger.can_renew = True
        if self._is_in_trouble:
            self._is_in_trouble = False
            self._tell(self._on_trouble, None, self._heard_at)
        return is_done

    def _renew(self) -> bool:
        now = time.monotonic()
        # The claim itself was the first heartbeat of what is younger than one.
        due = [
            held
            for held in self._ledger.snapshot()
            if not held.is_lost and now - held.claimed_at >= self.beat_seconds * 0.9
        ]
        if self._connection is None:
            # That none can be opened is news, whatever was heard before.
            self._heard_at = math.inf
            self._connection = connect(
                self._dsn,
                application_name="pgqueue worker lease",
                settings=self._settings,
                must_write=True,
            )
        is_done = True
        for start in range(0, len(due), _CHUNK):
            chunk = due[start : start + _CHUNK]
            statement = attempts.heartbeat(
                [held.row.job_id for held in chunk], [held.row.token for held in chunk]
            )
            answers = self._ask(self._connection, statement)
            verdicts = [(held, answers.get(held.row.job_id, "busy")) for held in chunk]
            is_done = is_done and all(verdict != "busy" for _, verdict in verdicts)
            if told := [pair for pair in verdicts if pair[1] != "renewed"]:
                self._tell(self._on_verdicts, told)
        must_look = not due and not self._idle_beats % _IDLE_BEATS
        if must_look:
            # Notice a dead connection before a lease depends on it.
            self._ask(self._connection, attempts.database_now())
        if due or must_look:
            self._heard_at = time.monotonic()
        self._idle_beats = 0 if due else self._idle_beats + 1
        return is_done

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, connection: Connection[Any], statement: Statement[T]) -> T:
        """Run a statement; no answer within a beat breaks the connection, while the leases still hold."""
        with watched(connection, self.beat_seconds):
            return run(connection, statement, self._schema)

    def _tell(self, callback: Callable[..., None], *what: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *what)
        except RuntimeError:  # the loop has ended; so will this thread
            self._stopped.set()
