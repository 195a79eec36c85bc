"""Servers of the tests' own. The data is made once and copied: that takes a tenth of the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from pgqueue import embedded
from pgqueue.migrate import upgrade
from tests.outages.support import ROLE, SETTINGS, Crew, Node, copy_of, make_standby
from tests.support import open_folder

NewNode = Callable[..., Node]


@pytest.fixture(scope="session")
def seed() -> Iterator[Path]:
    """The data of a migrated server that never runs again."""
    with open_folder() as folder:
        with embedded.start(folder, settings=SETTINGS) as server:
            with psycopg.connect(server.dsn(), autocommit=True) as admin:
                admin.execute(f"CREATE ROLE {ROLE} LOGIN")
                admin.execute(f"ALTER DATABASE {embedded.cluster.DATABASE} OWNER TO {ROLE}")
            upgrade(f"{server.dsn()} user={ROLE}")
        yield folder


@pytest.fixture
def new_node(seed: Path) -> Iterator[NewNode]:
    """Start servers that end with the test."""
    with ExitStack() as stack:

        def start(
            settings: Mapping[str, str | int] | None = None,
            folder: Path | None = None,
            *,
            is_standby: bool = False,
        ) -> Node:
            data = copy_of(seed, folder or stack.enter_context(open_folder()))
            if is_standby:
                make_standby(data.parent)
            made = Node(data.parent, settings)
            stack.callback(made.close)
            return made

        yield start


@pytest.fixture
def node(new_node: NewNode) -> Node:
    return new_node()


@pytest.fixture
def crew(node: Node, tmp_path: Path) -> Crew:
    return Crew(node.app_dsn, tmp_path)
