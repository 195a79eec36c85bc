"""What a handler can ask about its own attempt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from pgqueue.errors import Cancel, JobTimeout, LeaseLost


class JobContext:
    """The attempt a handler runs in; injected where a parameter is annotated with this class.

    Each attribute is as of now: the lease is kept, lost or asked back while the handler runs.
    `idempotency_key` is the same for every attempt of the job: hand it to outside services that
    take one. `headers` travel with the job, such as a trace's context.
    """

    __slots__ = (
        "_cancel_requested",
        "_logger",
        "_lost",
        "_remaining",
        "_report",
        "attempt",
        "headers",
        "idempotency_key",
        "is_takeover",
        "job_id",
        "max_attempts",
        "queue",
        "task",
        "timeout_seconds",
    )

    def __init__(
        self,
        *,
        job_id: int,
        task: str,
        queue: str,
        attempt: int = 1,
        max_attempts: int = 1,
        timeout_seconds: float = 0.0,
        headers: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
        is_takeover: bool = False,
        remaining_seconds: Callable[[], float | None] = lambda: None,
        is_lost: Callable[[], bool] = lambda: False,
        is_cancel_requested: Callable[[], bool] = lambda: False,
        report: Callable[[dict[str, Any]], None] = lambda _progress: None,
    ) -> None:
        self.job_id = job_id
        self.task = task
        self.queue = queue
        self.attempt = attempt
        self.max_attempts = max_attempts
        self.timeout_seconds = timeout_seconds
        self.headers: Mapping[str, Any] = headers or {}
        self.idempotency_key = idempotency_key or f"job:{job_id}"
        self.is_takeover = is_takeover
        self._remaining = remaining_seconds
        self._lost = is_lost
        self._cancel_requested = is_cancel_requested
        self._report = report
        self._logger: logging.LoggerAdapter[logging.Logger] | None = None

    @property
    def remaining_seconds(self) -> float | None:
        """How long until the deadline, 0.0 past it; None without one."""
        remaining = self._remaining()
        return None if remaining is None else max(0.0, remaining)

    @property
    def is_lost(self) -> bool:
        """Whether the lease ran out, so that another attempt may be running."""
        return self._lost()

    @property
    def is_cancel_requested(self) -> bool:
        """Whether somebody asked for this job to be cancelled."""
        return self._cancel_requested()

    @property
    def is_last_attempt(self) -> bool:
        """Whether a failure of this attempt would be the last one."""
        return self.attempt >= self.max_attempts

    def check(self) -> None:
        """Return if there is a point in going on; call it between the steps of long work.

        Raises:
            LeaseLost: another attempt may be running.
            Cancel: somebody asked for it.
            JobTimeout: the deadline has passed.
        """
        if self.is_lost:
            raise LeaseLost(f"job {self.job_id}: the lease ran out, another attempt may be running")
        if self.is_cancel_requested:
            raise Cancel("cancelled on request")
        if self.remaining_seconds == 0.0:
            raise JobTimeout(self.timeout_seconds)

    def progress(self, done: float, total: float = 1.0, message: str = "") -> None:
        """Say how far the work is, for people who look; cheap, and dropped when said too often."""
        self._report({"done": done, "total": total, "message": message})

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose records carry job_id, task and attempt."""
        if self._logger is None:
            self._logger = logging.LoggerAdapter(
                logging.getLogger(f"pgqueue.task.{self.task}"),
                {"job_id": self.job_id, "task": self.task, "attempt": self.attempt},
            )
        return self._logger

    def __repr__(self) -> str:
        return f"<JobContext job {self.job_id} {self.task} attempt {self.attempt}/{self.max_attempts}>"
