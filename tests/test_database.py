"""The door to the database: what a connection is, and what an error may say."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

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


# A password as it is, where a URL takes only an escaped one; each of its parts ends in -marker.
MISSPELT = [
    "postgresql://app:s3cr@t-marker@nowhere.invalid/shop",
    "postgresql://app:s3cr@@t-marker@nowhere.invalid:5432/shop",
    "postgresql://app:s-marker@@nowhere.invalid/shop",
    "postgresql://app:s-marker/t-marker@nowhere.invalid/shop",
    "postgresql://app:12/t-marker@nowhere.invalid/shop",
    "postgresql://app:a@b/t-marker@nowhere.invalid/shop",
    "postgresql://app:a@b:t-marker@nowhere.invalid/shop",
    "postgresql://app:a@b,t-marker@nowhere.invalid/shop",
    "postgresql://app:1/x?host=t-marker@nowhere.invalid/shop",
    "postgresql://app@corp:t-marker@nowhere.invalid/shop",
    "postgresql+psycopg://app:s3cr@t-marker@one.invalid,two.invalid/shop",
    "postgresql://app:a@b?c=t-marker@nowhere.invalid/shop",
]


@pytest.mark.parametrize("dsn", MISSPELT)
def test_a_password_that_is_not_escaped_is_refused_and_shown_nowhere(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psycopg, "connect", lambda **_: pytest.fail("connected"))
    with pytest.raises(ConfigurationError, match="percent-encode the password") as caught:
        database.connect(dsn)
    with pytest.raises(ConfigurationError, match="percent-encode the password"):
        asyncio.run(database.aconnect(dsn))

    told = [
        "".join(traceback.format_exception(caught.value)),
        str(database.unreachable(dsn, psycopg.OperationalError("no"))),
        database.describe(dsn),
        database.redact(f"cannot use {dsn}, really"),
    ]
    assert not any("marker" in text or "corp" in text for text in told[:3]), told
    assert "marker" not in told[3]
    assert database.describe(dsn) == "the database"
    # Behind every secret that a log hides there is nothing left of it.
    text = dsn
    for secret in database.passwords(dsn):
        text = text.replace(secret, "***")
    assert "marker" not in text


@pytest.mark.parametrize(
    ("dsn", "where"),
    [
        ("postgresql://app:s3cr%40t@h/shop", "h/shop"),
        ("postgresql://app%40corp:x@h:5433/shop", "h:5433/shop"),
        ("postgresql://h/my%40shop", "h/my@shop"),
        ("postgresql://app:x@h1:1,h2:2/shop?application_name=me@shop", "h1,h2:1,2/shop"),
        ("postgresql://app@[::1]:5433/shop", "::1:5433/shop"),
        ("postgresql:///shop?host=/tmp&port=5433", "/tmp:5433/shop"),
        ("host=h user=app password=a@b/c", "h/app"),
        ("host=@abstract dbname=shop", "@abstract/shop"),
    ],
)
def test_an_at_sign_that_is_where_it_may_be_is_let_through(dsn: str, where: str) -> None:
    database._parameters(dsn, "x", must_write=False)

    assert database.describe(dsn) == where


def test_redact_hides_passwords_however_they_are_spelt() -> None:
    for text in (
        f"postgresql://u:{PASSWORD}@h/db failed",
        f"host=h password={PASSWORD} dbname=d",
        f"host=h password = '{PASSWORD} with \\' quotes' dbname=d",
        f"host=h PASSWORD={PASSWORD}",
        f"postgresql://u:a@{PASSWORD}@h/db failed",
        f"postgresql://u:a/{PASSWORD}@h/db failed",
        f"postgresql://u@corp:{PASSWORD}@h/db failed",
    ):
        assert PASSWORD not in database.redact(text)
    assert database.redact("host=h dbname=d") == "host=h dbname=d"


def test_urls_of_other_libraries_are_understood() -> None:
    assert database.normalise("postgresql+psycopg://u@h/d") == "postgresql://u@h/d"
    assert database.normalise(" postgres://u@h/d ") == "postgres://u@h/d"
    assert database.normalise("host=h") == "host=h"


def test_an_interrupt_that_comes_before_the_wait_for_an_answer_rolls_back_without_a_word(
    fast_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted_after_sending(conn: database.Connection[Any]) -> Generator[Any, Any, None]:
        conn.pgconn.send_query(b"SELECT pg_sleep(60)")
        signal.raise_signal(signal.SIGINT)
        yield from ()

    caplog.set_level(logging.WARNING, "psycopg")

    with (
        pytest.raises(KeyboardInterrupt),
        database.connect(fast_dsn) as conn,
        conn.transaction(),
        conn.transaction(),
    ):
        conn.wait(interrupted_after_sending(conn))

    assert conn.closed
    assert caplog.messages == []


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


@pytest.mark.parametrize(
    ("dsn", "environ", "asked"),
    [
        ("host=a,b dbname=shop", {}, "read-write"),
        ("postgresql://a:1,b:2/shop", {}, "read-write"),
        ("hostaddr=10.0.0.1,10.0.0.2 dbname=shop", {}, "read-write"),
        ("dbname=shop", {"PGHOST": "a,b"}, "read-write"),
        ("", {"PGHOST": "a,b"}, "read-write"),
        ("", {"PGSERVICE": "shop"}, "read-write"),
        ("", {"PGSERVICE": "reports"}, None),
        ("", {"PGSERVICE": "nobody's"}, None),
        ("host=a dbname=shop", {"PGHOST": "a,b"}, None),
        ("host=a dbname=shop", {}, None),
        ("host=a,b target_session_attrs=prefer-standby", {}, "prefer-standby"),
        ("postgresql://a,b/shop?target_session_attrs=any", {}, "any"),
        ("host=a,b", {"PGTARGETSESSIONATTRS": "any"}, None),
    ],
)
def test_of_several_hosts_the_one_that_takes_writes_is_meant_unless_somebody_says_otherwise(
    dsn: str,
    environ: dict[str, str],
    asked: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    services = tmp_path / "services"
    services.write_text("[shop]\nhost=a,b\n[reports]\nhost=a,b\ntarget_session_attrs=standby\n")
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    parameters = database._parameters(dsn, "x", must_write=False)

    assert parameters.get("target_session_attrs") == asked


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


def test_a_socket_that_nobody_named_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGHOSTADDR", "PGPORT", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    failed = psycopg.OperationalError(
        'connection to server on socket "/run/nosuch/.s.PGSQL.5432" failed: No such file or directory'
    )

    told = str(database.unreachable("dbname=shop", failed))

    assert told == (
        "cannot connect to local socket /run/nosuch/.s.PGSQL.5432, database shop: No such file or directory"
    )
