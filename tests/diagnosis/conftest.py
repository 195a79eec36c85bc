"""A queue in which jobs come into any state, and servers of the tests' own."""

from __future__ import annotations

from tests.cli.conftest import pgqueue, queue
from tests.outages.conftest import new_node, seed

__all__ = ["new_node", "pgqueue", "queue", "seed"]
