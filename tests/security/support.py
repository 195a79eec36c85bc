"""A database with the four roles, and an account for each."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgqueue import migrate
from tests.support import make_database

ROLES = ("producer", "worker", "viewer", "operator")
# How a job of each task in jobs.py ends, but of the one that takes its process along.
ENDS = {
    "plain": "succeeded",
    "slow_with_progress": "succeeded",
    "transact": "succeeded",
    "call_once": "succeeded",
    "fail_once": "succeeded",
    "die": "dead",
    "cancel_itself": "cancelled",
    "limited": "succeeded",
    "behind_a_breaker": "succeeded",
    "enqueue_another": "succeeded",
}


@dataclass(frozen=True)
class Accounts:
    """The DSN of each account: of the schema's owner, of one with each role, and of one with none."""

    owner: str
    producer: str
    worker: str
    viewer: str
    operator: str
    stranger: str

    def of(self, name: str) -> str:
        return getattr(self, name)


@contextlib.contextmanager
def make_accounts(server_dsn: str) -> Iterator[Accounts]:
    """Make a database whose schema belongs to an ordinary account, with accounts of one role each."""
    mark = uuid.uuid4().hex[:6]
    names = {name: f"test_{name}_{mark}" for name in (*ROLES, "stranger", "owner")}
    try:
        with make_database(server_dsn) as dsn:
            with psycopg.connect(dsn, autocommit=True) as admin:
                for name in names.values():
                    admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
                admin.execute(
                    sql.SQL("ALTER DATABASE {} OWNER TO {}").format(
                        sql.Identifier(admin.info.dbname), sql.Identifier(names["owner"])
                    )
                )
                # What a careful administrator does; and what each account here may have of its own.
                admin.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
            of = {name: make_conninfo(dsn, user=account) for name, account in names.items()}
            migrate.upgrade(of["owner"])
            with psycopg.connect(dsn, autocommit=True) as admin:
                admin.execute(migrate.roles_script())
                for role in ROLES:
                    admin.execute(f"GRANT pgqueue_{role} TO {names[role]}")
            yield Accounts(**of)
    finally:
        with psycopg.connect(server_dsn, autocommit=True) as admin:
            for name in names.values():
                admin.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(name)))
            for role in ROLES:
                # Another run on this server may still use it.
                with contextlib.suppress(psycopg.errors.DependentObjectsStillExist):
                    admin.execute(f"DROP ROLE IF EXISTS pgqueue_{role}")
