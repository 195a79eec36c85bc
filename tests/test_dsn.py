"""Which database is meant when several things name one."""

from __future__ import annotations

import pytest

from pgqueue import dsn, embedded
from pgqueue.errors import ConfigurationError


@pytest.mark.parametrize(
    ("explicit", "environ", "expected", "origin"),
    [
        ("host=a", {"PGQUEUE_DSN": "host=b", "DATABASE_URL": "host=c", "PGHOST": "d"}, "host=a", "--dsn"),
        (None, {"PGQUEUE_DSN": "host=b", "DATABASE_URL": "host=c", "PGHOST": "d"}, "host=b", "PGQUEUE_DSN"),
        (
            None,
            {"PGQUEUE_DSN": "", "DATABASE_URL": "postgresql+asyncpg://c/d"},
            "postgresql://c/d",
            "DATABASE_URL",
        ),
        ("", {"PGSERVICE": "shop"}, "", "the PG* variables"),
    ],
)
def test_the_nearest_setting_wins_and_an_empty_one_is_none(
    explicit: str | None, environ: dict[str, str], expected: str, origin: str
) -> None:
    found = dsn.configured(explicit, environ)

    assert found == dsn.ResolvedDsn(expected, origin)


def test_with_nothing_configured_nothing_is_started_unasked() -> None:
    assert dsn.configured(None, {"PATH": "/bin"}) is None


def test_without_any_postgresql_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "installs", list)

    with pytest.raises(ConfigurationError, match=r"pgqueue-jobs\[embedded\]"):
        dsn.resolve(None, {})
