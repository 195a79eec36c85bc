"""Databases that know the tasks of `jobs.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.languages.support import register
from tests.process.support import Queue


@pytest.fixture
def queue(dsn: str) -> Iterator[Queue]:
    """A database of this test's own, for a worker to work on."""
    made = Queue(dsn)
    register(made)
    yield made
    made.close()


@pytest.fixture
def door(fast_dsn: str) -> Iterator[Queue]:
    """A database to enqueue into, shared."""
    made = Queue(fast_dsn)
    register(made)
    yield made
    made.close()
