"""A worker's settings: what they mean, their units, and which values make sense."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pgqueue.errors import ConfigurationError
from pgqueue.model.job import DEFAULT_QUEUE

DEFAULT_CONCURRENCY = 10
DEFAULT_LEASE_SECONDS = 10.0
DEFAULT_GRACE_SECONDS = 30.0
DEFAULT_KILL_GRACE_SECONDS = 5.0
DEFAULT_POLL_SECONDS = 1.0
DEFAULT_RETENTION_SECONDS = 7 * 86_400.0
DEFAULT_KEY_RETENTION_SECONDS = 7 * 86_400.0
DEFAULT_UNKNOWN_TASK_GRACE_SECONDS = 600.0
# Nobody else's business unless somebody says so.
DEFAULT_METRICS_HOST = "127.0.0.1"

# Three tries to renew fit into a lease, with room for a slow answer.
HEARTBEATS_PER_LEASE = 10 / 3


@dataclass(frozen=True, slots=True)
class QueueSlots:
    """A queue to work on; `slots` None means that it shares the worker's common slots."""

    name: str
    slots: int | None = None

    @classmethod
    def parse(cls, text: str) -> QueueSlots:
        """Read `mail` or `mail:5`. A name may have colons: `mail:x` is one, `mail:x:5` has slots.

        Raises:
            ConfigurationError: no name, a name too long, or a number that is none.
        """
        found = re.fullmatch(r"(?P<name>.+?)(?::(?P<slots>\d+))?", text, re.DOTALL)
        if not found or "\x00" in text or len(found["name"].encode()) > 100:
            raise ConfigurationError(
                f"{text!r} is not a queue: give NAME or NAME:SLOTS, a name of at most 100 bytes"
            )
        slots = int(found["slots"]) if found["slots"] else None
        if slots is not None and not 1 <= slots <= 10_000:
            raise ConfigurationError(
                f"queue {found['name']!r}: slots must be between 1 and 10000, not {slots}"
            )
        return cls(found["name"], slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Everything a worker is told at its start.

    Queues with slots of their own use only those; the others share `concurrency`. The lease is
    written on each job at its claim, so workers with different leases cannot rob each other.
    """

    queues: tuple[QueueSlots, ...] = ()
    concurrency: int = DEFAULT_CONCURRENCY
    processes: int = 1
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    heartbeat_seconds: float | None = None
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    kill_grace_seconds: float = DEFAULT_KILL_GRACE_SECONDS
    poll_seconds: float = DEFAULT_POLL_SECONDS
    retention_seconds: float = DEFAULT_RETENTION_SECONDS
    key_retention_seconds: float = DEFAULT_KEY_RETENTION_SECONDS
    unknown_task_grace_seconds: float = DEFAULT_UNKNOWN_TASK_GRACE_SECONDS
    until_empty: bool = False
    # False: only poll, for a database behind a proxy that pools transactions.
    listens: bool = True
    max_jobs_per_child: int | None = None
    max_memory_mb: int | None = None
    # None: no port is opened. 0: any that is free.
    metrics_port: int | None = None
    metrics_host: str = DEFAULT_METRICS_HOST

    def __post_init__(self) -> None:
        _between("concurrency", self.concurrency, 1, 10_000)
        _between("processes", self.processes, 0, 256)
        _between("lease-seconds", self.lease_seconds, 1, 3600)
        _between("grace-seconds", self.grace_seconds, 0, 86_400)
        _between("kill-grace-seconds", self.kill_grace_seconds, 0, 3600)
        _between("poll-seconds", self.poll_seconds, 0.05, 60)
        _between("retention-seconds", self.retention_seconds, 0, 3.2e9)
        _between("key-retention-seconds", self.key_retention_seconds, 0, 3.2e9)
        _between("unknown-task-grace-seconds", self.unknown_task_grace_seconds, 0, 3.2e7)
        if self.metrics_port is not None:
            _between("metrics-port", self.metrics_port, 0, 65_535)
        if self.heartbeat_seconds is not None and not 0 < self.heartbeat_seconds <= self.lease_seconds / 3:
            raise ConfigurationError(
                f"heartbeat-seconds must be at most a third of the lease ({self.lease_seconds / 3:g} s), "
                f"not {self.heartbeat_seconds:g}: one slow answer would cost running jobs their lease"
            )
        for name, limit in (
            ("max-jobs-per-child", self.max_jobs_per_child),
            ("max-memory-mb", self.max_memory_mb),
        ):
            if limit is None:
                continue
            _between(name, limit, 1, 1_000_000_000)
            if not self.processes:
                raise ConfigurationError(f"{name} needs child processes, and processes is 0")
        names = [queue.name for queue in self.queues]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigurationError(f"queue {twice[0]!r} is given twice")

    @property
    def beat_seconds(self) -> float:
        return self.heartbeat_seconds or self.lease_seconds / HEARTBEATS_PER_LEASE

    def pools(self, default_queues: tuple[str, ...] = (DEFAULT_QUEUE,)) -> list[tuple[int, list[str]]]:
        """Give (slots, queue names) of each pool of slots; without queues, the application's share one."""
        queues = self.queues or tuple(QueueSlots(name) for name in default_queues)
        shared = [queue.name for queue in queues if queue.slots is None]
        pools = [(self.concurrency, shared)] if shared else []
        pools += [(queue.slots, [queue.name]) for queue in queues if queue.slots is not None]
        return pools


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        # A whole number may be larger than any float.
        told = f"{value:,}" if isinstance(value, int) else f"{value:,.15g}"
        raise ConfigurationError(f"{name} must be between {low:,.15g} and {high:,.15g}, not {told}")
