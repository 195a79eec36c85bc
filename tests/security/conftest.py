"""Accounts that a module's tests share, with no rows left from the test before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.conftest import EMPTY_EVERYTHING
from tests.security.support import Accounts, make_accounts


@pytest.fixture(scope="module")
def _module_accounts(postgres: Any) -> Iterator[Accounts]:
    with make_accounts(postgres.dsn) as accounts:
        yield accounts


@pytest.fixture
def accounts(postgres: Any, _module_accounts: Accounts) -> Accounts:
    dbname = psycopg.conninfo.conninfo_to_dict(_module_accounts.owner)["dbname"]
    with psycopg.connect(make_conninfo(postgres.dsn, dbname=dbname), autocommit=True) as admin:
        admin.execute(EMPTY_EVERYTHING)
    return _module_accounts


@pytest.fixture
def login(accounts: Accounts, connect: Callable[..., Any]) -> Callable[[str], Any]:
    """Log in as one of the accounts."""
    return lambda name: connect(accounts.of(name))
