"""Fixtures of the process tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from psycopg.conninfo import conninfo_to_dict

from pgqueue.database import run
from pgqueue.sql import presence
from tests.faults.proxy import Proxy
from tests.process import jobs
from tests.process.support import Queue


@pytest.fixture
def queue(dsn: str) -> Iterator[Queue]:
    """A migrated database of this test's own, with a table for effects."""
    made = Queue(dsn)
    run(made.connection, presence.register_tasks(jobs.app.registry.registrations()))
    yield made
    made.close()


@pytest.fixture
def proxy(queue: Queue) -> Iterator[Proxy]:
    """A way to the test's server that can be cut."""
    server = conninfo_to_dict(queue.dsn)
    host, port = str(server["host"]), server.get("port", 5432)
    made = Proxy(lambda: f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, int(port)))
    yield made
    made.close()
