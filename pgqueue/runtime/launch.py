"""How to start a worker, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pgqueue.model.settings import WorkerSettings
from pgqueue.runtime.log import LogFormat


@dataclass(frozen=True, slots=True)
class Launch:
    """A worker's application, database, log, and settings. `dsn` None leaves it to the environment.

    `listen_dsn` leads past a proxy that pools transactions, for what needs a session.
    """

    app: str
    dsn: str | None
    schema: str
    settings: WorkerSettings
    environment: Mapping[str, str]
    log_format: LogFormat = "key-value"
    log_level: str = "info"
    listen_dsn: str | None = None
    worker_id: str = ""
