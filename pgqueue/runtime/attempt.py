"""One attempt inside the process that runs it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from pgqueue.errors import Cancel, JobTimeout, LeaseLost, PgqueueError
from pgqueue.model.context import JobContext
from pgqueue.model.task import TaskDefinition


class Attempt:
    """One attempt inside the engine, from its arrival to its end."""

    # What most attempts never change stays on the class: making one is a good part of what a small job costs.
    started_at = 0.0
    # Its place on the board, once its handler has begun.
    place = -1
    task: asyncio.Task[None] | None = None
    context: JobContext | None = None
    is_timed_out = False
    is_cancel_requested = False
    is_lost = False
    is_takeover = False
    is_reconciling = False
    # Ends the statement that the handler's transaction waits for, if any. Safe from any thread.
    cancel_statement: Callable[[], None] | None = None

    def __init__(
        self,
        serial: int,
        sent: Sequence[Any],
        queue: str,
        token: str,
        definition: TaskDefinition,
        sent_at: float,
    ) -> None:
        self.serial = serial
        (
            self.job_id,
            self.attempt,
            self.task_name,
            self.args,
            self.seconds,
            self.max_attempts,
            self.crashes,
            self.idempotency_key,
            self.headers,
        ) = sent
        self.queue = queue
        self.token = token
        self.definition = definition
        # When the parent sent it: it may have waited long to be read.
        self.sent_at = sent_at

    @property
    def key(self) -> str:
        """The key of its effect, the same for every attempt of the job."""
        return self.idempotency_key or f"job:{self.job_id}"

    @property
    def deadline_at(self) -> float | None:
        return self.sent_at + self.seconds if self.seconds else None

    def remaining_seconds(self) -> float | None:
        return None if self.deadline_at is None else self.deadline_at - time.monotonic()

    def reason_to_stop(self) -> PgqueueError | None:
        """Say why this attempt should not go on, if so."""
        if self.is_lost:
            return LeaseLost(f"job {self.job_id}: the lease ran out, another attempt may be running")
        if self.is_cancel_requested:
            return Cancel("cancelled on request")
        if self.is_timed_out:
            return JobTimeout(self.seconds)
        return None
