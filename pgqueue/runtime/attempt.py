"""One attempt inside the process that runs it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from pgqueue.errors import Cancel, JobTimeout, LeaseLost, PgqueueError
from pgqueue.model.context import JobContext
from pgqueue.model.task import TaskDefinition


class Attempt:
    """One attempt inside the engine, from its arrival to its end."""

    __slots__ = (
        "args",
        "arrived_at",
        "attempt",
        "cancel_statement",
        "context",
        "crashes",
        "deadline_at",
        "definition",
        "headers",
        "idempotency_key",
        "is_cancel_requested",
        "is_lost",
        "is_reconciling",
        "is_takeover",
        "is_timed_out",
        "job_id",
        "max_attempts",
        "place",
        "queue",
        "seconds",
        "serial",
        "started_at",
        "task",
        "task_name",
        "token",
    )

    def __init__(self, message: list[Any], now: float) -> None:
        (
            self.serial,
            self.job_id,
            self.attempt,
            self.task_name,
            self.args,
            self.seconds,
            self.max_attempts,
            self.crashes,
            self.queue,
            self.idempotency_key,
            self.headers,
            self.token,
        ) = message
        self.arrived_at = now
        self.deadline_at: float | None = now + self.seconds if self.seconds is not None else None
        self.started_at = 0.0
        self.definition: TaskDefinition | None = None
        self.task: asyncio.Task[None] | None = None
        self.context: JobContext | None = None
        self.place = -1
        self.is_timed_out = False
        self.is_cancel_requested = False
        self.is_lost = False
        self.is_takeover = False
        self.is_reconciling = False
        # Ends the statement that the handler's transaction waits for, if any. Safe from any thread.
        self.cancel_statement: Callable[[], None] | None = None

    @property
    def key(self) -> str:
        """The key of its effect, the same for every attempt of the job."""
        return self.idempotency_key or f"job:{self.job_id}"

    def remaining_seconds(self) -> float | None:
        return None if self.deadline_at is None else self.deadline_at - time.monotonic()

    def reason_to_stop(self) -> PgqueueError | None:
        """Say why this attempt should not go on, if so."""
        if self.is_lost:
            return LeaseLost(f"job {self.job_id}: the lease ran out, another attempt may be running")
        if self.is_cancel_requested:
            return Cancel("cancelled on request")
        if self.is_timed_out:
            return JobTimeout(self.seconds or 0.0)
        return None
