"""The door to the database: what a connection is, and what an error may say."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgqueue import database
from pgqueue.errors import ConfigurationError, DatabaseUnreachable
from pgqueue.sql import Statement, first_value

PASSWORD = "s3cret-marker"


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_connections_are_read_committed_whatever_the_roles_default(fast_dsn: str) -> None:
    stubborn = make_conninfo(fast_dsn, options="-c default_transaction_isolation=serializable")

    with database.connect(stubborn) as conn:
        level = conn.execute("SHOW transaction_isolation").fetchone()

    assert level == ("read committed",)


def test_session_settings_are_in_force(fast_dsn: str) -> None:
    async def lock_timeout() -> tuple[str, ...] | None:
        conn = await database.aconnect(fast_dsn, settings={"lock_timeout": "123ms"})
        try:
            return await (await conn.execute("SHOW lock_timeout")).fetchone()
        finally:
            await conn.close()

    with database.connect(fast_dsn, settings={"lock_timeout": "123ms"}) as conn:
        assert conn.execute("SHOW lock_timeout").fetchone() == ("123ms",)
    assert asyncio.run(lock_timeout()) == ("123ms",)


def test_an_unreachable_server_is_one_line_without_the_password(deaf_port: int) -> None:
    for dsn in (
        f"postgresql://u:{PASSWORD}@127.0.0.1:{deaf_port}/shop",
        f"host=127.0.0.1 port={deaf_port} user=u password={PASSWORD} dbname=shop",
        f"postgresql://u:{PASSWORD}@127.0.0.1,127.0.0.1:{deaf_port},{deaf_port}/shop",
    ):
        with pytest.raises(DatabaseUnreachable) as caught:
            database.connect(dsn)

        assert "\n" not in str(caught.value)
        assert "127.0.0.1" in str(caught.value)
        assert PASSWORD not in repr(caught.value)


def test_a_refused_login_says_why_in_one_line(fast_dsn: str) -> None:
    with pytest.raises(DatabaseUnreachable, match="does_not_exist") as caught:
        database.connect(make_conninfo(fast_dsn, dbname="does_not_exist", password=PASSWORD))

    assert "\n" not in str(caught.value)
    assert PASSWORD not in str(caught.value)


def test_a_malformed_dsn_is_not_quoted() -> None:
    for dsn in (f"postgresql:/u:{PASSWORD}@host/db", f"host=x passwort={PASSWORD}", f"nonsense {PASSWORD}"):
        with pytest.raises(ConfigurationError) as caught:
            database.connect(dsn)

        assert PASSWORD not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


def test_redact_hides_passwords_however_they_are_spelt() -> None:
    for text in (
        f"postgresql://u:{PASSWORD}@h/db failed",
        f"host=h password={PASSWORD} dbname=d",
        f"host=h password = '{PASSWORD} with \\' quotes' dbname=d",
        f"host=h PASSWORD={PASSWORD}",
    ):
        assert PASSWORD not in database.redact(text)
    assert database.redact("host=h dbname=d") == "host=h dbname=d"


def test_urls_of_other_libraries_are_understood() -> None:
    assert database.normalise("postgresql+psycopg://u@h/d") == "postgresql://u@h/d"
    assert database.normalise(" postgres://u@h/d ") == "postgres://u@h/d"
    assert database.normalise("host=h") == "host=h"


def test_a_statement_runs_the_same_on_every_kind_of_connection(fast_dsn: str) -> None:
    statement = Statement("SELECT %(number)s::int + 1", {"number": 41}, first_value)

    async def on_async() -> int:
        conn = await database.aconnect(fast_dsn)
        try:
            return await database.arun(conn, statement)
        finally:
            await conn.close()

    # A caller's connection may hand out rows as dicts: a statement reads tuples all the same.
    with psycopg.connect(fast_dsn, row_factory=psycopg.rows.dict_row) as conn:
        assert database.run(conn, statement) == 42
    assert asyncio.run(on_async()) == 42


def test_the_servers_trouble_is_told_from_the_statements() -> None:
    errors = psycopg.errors

    for trouble in (
        errors.AdminShutdown(),
        errors.ConnectionFailure(),
        errors.TooManyConnections(),
        errors.ReadOnlySqlTransaction(),
        errors.CannotConnectNow(),
    ):
        assert database.is_infrastructure(trouble)
    for mistake in (errors.UndefinedTable(), errors.CheckViolation(), errors.InvalidTextRepresentation()):
        assert not database.is_infrastructure(mistake)
    for busy in (errors.LockNotAvailable(), errors.QueryCanceled(), errors.DeadlockDetected()):
        assert database.is_busy(busy)
