"""A job queue that needs nothing but PostgreSQL, and heals itself."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgqueue import errors
    from pgqueue.app import App, BoundTask, JobHandle, Task
    from pgqueue.client import AsyncClient, Client
    from pgqueue.database import acting
    from pgqueue.errors import (
        ArgumentsTooLarge,
        Cancel,
        ConfigurationError,
        DatabaseUnreachable,
        DuplicateJob,
        InvalidArguments,
        InvalidJob,
        JobCancelled,
        JobDead,
        JobNotFound,
        JobTimeout,
        KeyBusy,
        LeaseLost,
        LockBusy,
        PgqueueError,
        ResultNotReady,
        ResultUnavailable,
        RetryAfter,
        SchemaMismatch,
        SchemaMissing,
        Snooze,
        UnknownTask,
        Unrecoverable,
    )
    from pgqueue.model.context import JobContext
    from pgqueue.model.job import JobState, NewJob
    from pgqueue.model.retry import Computed, Exponential, Fixed, RetryPolicy, Steps
    from pgqueue.model.task import NOT_DONE
    from pgqueue.processed import OnceClaim, aonce, once
    from pgqueue.sql.enqueue import Enqueued

__version__ = "0.1.0"

# A name is imported when it is asked for: `pgqueue --help` and a child that has not yet read its
# orders should not wait for the driver.
_HOMES = {
    "pgqueue.app": ("App", "BoundTask", "JobHandle", "Task"),
    "pgqueue.client": ("AsyncClient", "Client"),
    "pgqueue.database": ("acting",),
    "pgqueue.errors": (
        "ArgumentsTooLarge",
        "Cancel",
        "ConfigurationError",
        "DatabaseUnreachable",
        "DuplicateJob",
        "InvalidArguments",
        "InvalidJob",
        "JobCancelled",
        "JobDead",
        "JobNotFound",
        "JobTimeout",
        "KeyBusy",
        "LeaseLost",
        "LockBusy",
        "PgqueueError",
        "ResultNotReady",
        "ResultUnavailable",
        "RetryAfter",
        "SchemaMismatch",
        "SchemaMissing",
        "Snooze",
        "UnknownTask",
        "Unrecoverable",
    ),
    "pgqueue.model.context": ("JobContext",),
    "pgqueue.model.job": ("JobState", "NewJob"),
    "pgqueue.model.task": ("NOT_DONE",),
    "pgqueue.processed": ("OnceClaim", "aonce", "once"),
    "pgqueue.model.retry": ("Computed", "Exponential", "Fixed", "RetryPolicy", "Steps"),
    "pgqueue.sql.enqueue": ("Enqueued",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "NOT_DONE",
    "App",
    "ArgumentsTooLarge",
    "AsyncClient",
    "BoundTask",
    "Cancel",
    "Client",
    "Computed",
    "ConfigurationError",
    "DatabaseUnreachable",
    "DuplicateJob",
    "Enqueued",
    "Exponential",
    "Fixed",
    "InvalidArguments",
    "InvalidJob",
    "JobCancelled",
    "JobContext",
    "JobDead",
    "JobHandle",
    "JobNotFound",
    "JobState",
    "JobTimeout",
    "KeyBusy",
    "LeaseLost",
    "LockBusy",
    "NewJob",
    "OnceClaim",
    "PgqueueError",
    "ResultNotReady",
    "ResultUnavailable",
    "RetryAfter",
    "RetryPolicy",
    "SchemaMismatch",
    "SchemaMissing",
    "Snooze",
    "Steps",
    "Task",
    "UnknownTask",
    "Unrecoverable",
    "acting",
    "aonce",
    "errors",
    "once",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("pgqueue.errors")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pgqueue' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
