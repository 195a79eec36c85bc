"""Fixtures of the process tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pgqueue.database import run
from pgqueue.sql import presence
from tests.process import jobs
from tests.process.support import Queue


@pytest.fixture
def queue(dsn: str) -> Iterator[Queue]:
    """A migrated database of this test's own, with a table for effects."""
    made = Queue(dsn)
    run(made.connection, presence.register_tasks(jobs.app.registry.registrations()))
    yield made
    made.close()
