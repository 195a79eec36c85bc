"""migrations/schema.sql is what the revisions make, and every function is as safe as it should be.

Make it anew with: python -m tests.shape.test_schema
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from pgqueue import embedded, migrate
from tests.support import ROOT, make_database

SCHEMA = ROOT / "migrations" / "schema.sql"
WRITTEN_BY = 18  # another pg_dump says the same things in other words


def dump_schema(dsn: str, schema: str = "pgqueue", *options: str) -> str:
    """Give a schema as pg_dump sees it, without what differs from day to day."""
    parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD"}
    text = subprocess.run(
        [
            pg_dump_for(dsn),
            "--schema-only",
            "--no-owner",
            f"--schema={schema}",
            f"--exclude-table={schema}.finished_jobs_2*",
            *options,
            parts["dbname"],
        ],
        # The bounds of run_at are written in the session's time zone.
        env={**os.environ, "PGTZ": "UTC", **{names[k]: value for k, value in parts.items() if k in names}},
        check=True,
        text=True,
        capture_output=True,
    ).stdout
    text = re.sub(r"^(--|SET |SELECT pg_catalog|\\(un)?restrict).*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def pg_dump_for(dsn: str) -> Path:
    with psycopg.connect(dsn) as connection:
        server = connection.info.server_version // 10000
    for install in embedded.installs():
        if install.major >= server and (install.bindir / "pg_dump").exists():
            return install.bindir / "pg_dump"
    pytest.skip(f"there is no pg_dump here that can read PostgreSQL {server}")


def generate(dsn: str) -> str:
    """Give what the revisions have made; what functions/*.sql has made is dropped, it is readable there."""
    with psycopg.connect(dsn) as connection:
        for (name,) in connection.execute(
            "SELECT object FROM pgqueue.definitions ORDER BY object DESC"
        ).fetchall():
            connection.execute(f"DROP {name}")
    return dump_schema(dsn, "pgqueue", "--no-privileges")


def load(text: str, dsn: str) -> str:
    with psycopg.connect(dsn) as connection:
        connection.execute(text)
    return dump_schema(dsn, "pgqueue", "--no-privileges")


def test_schema_sql_is_what_the_revisions_make(dsn, postgres):
    found, made = SCHEMA.read_text(encoding="utf-8"), generate(dsn)

    if not embedded.version_of(pg_dump_for(dsn)).startswith(f"{WRITTEN_BY}."):
        with make_database(postgres.dsn) as first, make_database(postgres.dsn) as second:
            found, made = load(found, first), load(made, second)

    assert found == made, "run: python -m tests.shape.test_schema"


def test_no_function_can_be_led_astray_by_a_search_path(fast_dsn, connect):
    functions = connect(fast_dsn).execute(
        """
        SELECT p.oid::regprocedure::text, p.proconfig, p.prosqlbody IS NOT NULL
        FROM pg_proc AS p
        WHERE p.pronamespace = 'pgqueue'::regnamespace
        """
    )

    # A body that was parsed when the function was made is bound to its names for good.
    astray = [
        name
        for name, settings, is_bound in functions.fetchall()
        if not is_bound and "search_path=pgqueue, pg_temp" not in (settings or [])
    ]

    assert astray == []


def test_nothing_is_open_to_everyone(fast_dsn, connect):
    everyone = connect(fast_dsn).execute(
        """
        SELECT p.oid::regprocedure::text
        FROM pg_proc AS p
        WHERE p.pronamespace = 'pgqueue'::regnamespace
          AND has_function_privilege('public', p.oid, 'EXECUTE')
        UNION ALL
        SELECT c.oid::regclass::text
        FROM pg_class AS c
        WHERE c.relnamespace = 'pgqueue'::regnamespace
          AND c.relkind IN ('r', 'p', 'v', 'S')
          AND EXISTS (SELECT FROM aclexplode(c.relacl) AS a WHERE a.grantee = 0)
        """
    )

    assert everyone.fetchall() == []


def test_every_constraint_has_a_name_that_says_what_it_keeps(fast_dsn, connect):
    unnamed = connect(fast_dsn).execute(
        """
        SELECT c.conname
        FROM pg_constraint AS c
        WHERE c.connamespace = 'pgqueue'::regnamespace
          AND c.contype = 'c'
          AND c.conname ~ '_check\\d*$'
        """
    )

    assert unnamed.fetchall() == []


def test_the_revisions_are_a_chain_that_the_worker_knows_without_alembic():
    from alembic.script import ScriptDirectory

    script = ScriptDirectory(str(migrate.location()))

    chain = [revision.revision for revision in reversed(list(script.walk_revisions()))]

    assert chain == migrate.revisions()


if __name__ == "__main__":
    with embedded.start(throwaway=True) as server, make_database(server.dsn("postgres")) as database:
        migrate.upgrade(database)
        SCHEMA.write_text(generate(database), encoding="utf-8")
        print(f"{SCHEMA} is made anew by PostgreSQL {server.version}")
