"""Bring the schema up to date, print the script that would, and say whether it is.

Tables come from numbered revisions, each applied once; functions, triggers and views from
`functions/*.sql`, re-created whenever their text changed. Everything happens in one transaction
under one advisory lock, so that any number of processes may do it at once and a failure changes
nothing. Alembic and SQLAlchemy are imported only to migrate, never by a worker that checks.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from pgqueue import __version__
from pgqueue.database import Connection, connect, errors
from pgqueue.errors import (
    ConfigurationError,
    PgqueueError,
    SchemaMismatch,
    SchemaMissing,
    SchemaTooNew,
    SchemaTooOld,
)
from pgqueue.sql import SCHEMA_NAME

if TYPE_CHECKING:
    from alembic.config import Config

DEFAULT_SCHEMA = "pgqueue"
OLDEST_SERVER = 14

# Alembic keeps the context of a run in module globals.
_alembic = threading.Lock()

_OBJECT = re.compile(r"^(?:--.*\n)*CREATE OR REPLACE ", re.MULTILINE)
_FUNCTION = re.compile(
    r"CREATE OR REPLACE FUNCTION (?P<name>\S+?)\((?P<arguments>.*?)\)\s+RETURNS (?P<result>.*?)\s+LANGUAGE",
    re.DOTALL,
)
_TRIGGER = re.compile(r"CREATE OR REPLACE TRIGGER (?P<name>\w+) .*? ON (?P<table>\S+)\s", re.DOTALL)
_VIEW = re.compile(r"CREATE OR REPLACE VIEW (?P<name>\S+)\s")


@dataclass(frozen=True, slots=True)
class Definition:
    """One function, trigger or view of `functions/*.sql`."""

    file: str
    object: str  # as a DROP names it
    shape: str  # a digest of what CREATE OR REPLACE cannot change
    text: str

    @property
    def checksum(self) -> str:
        return _digest(self.text)


# What callers use.


def upgrade(dsn: str, schema: str = DEFAULT_SCHEMA) -> list[str]:
    """Bring the schema up to date and say what was applied: revisions, then files of functions.

    Safe to call from many processes and threads at once: one of them does it, the others wait and
    find nothing to do. One transaction: it is done completely or not at all. Functions that a newer
    pgqueue has written are left alone.

    Raises:
        DatabaseUnreachable: no server, or it refused us.
        ConfigurationError: the server is too old, or the schema's name is not plain.
        SchemaTooNew: a newer pgqueue has migrated the schema.
    """
    from alembic import command
    from sqlalchemy import create_engine
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.pool import NullPool

    _checked(schema)
    engine = create_engine(
        "postgresql+psycopg://",
        creator=lambda: connect(dsn, application_name="pgqueue migrate", autocommit=False),
        poolclass=NullPool,
    )
    applied: list[str] = []
    with _alembic, engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, Connection)  # noqa: S101  what our creator gave
        _refuse_what_cannot_work(driver, schema)
        config = _config(schema)
        config.attributes.update(connection=connection, applied=applied)
        try:
            command.upgrade(config, "head")
        except errors.LockNotAvailable as error:
            raise PgqueueError(
                f"schema {schema!r} was in use for a minute, nothing was changed; try again ({error})"
            ) from error
        except DBAPIError as error:
            # Alembic's own statements; ours raise what the driver raises.
            raise (error.orig or error) from None
    return applied


def render(schema: str = DEFAULT_SCHEMA, since: str | None = None) -> str:
    """Give the script that does what `upgrade` would, for no schema yet or for one at revision `since`.

    Raises:
        ConfigurationError: the schema's name is not plain, or there is no such revision.
    """
    from alembic import command

    _checked(schema)
    if since is not None and since not in revisions():
        raise ConfigurationError(f"no revision {since!r}; known: {', '.join(revisions())}")
    text = StringIO()
    with _alembic:
        command.upgrade(_config(schema, text), f"{since}:head" if since else "head", sql=True)
    return text.getvalue()


def roles_script(schema: str = DEFAULT_SCHEMA) -> str:
    """Give the script that makes the four roles, or puts what they may do right; it can be run again.

    Raises:
        ConfigurationError: the schema's name is not plain.
    """
    # The lock keeps it apart from a migration: both write the same rows of the catalogue.
    lock = "SELECT pg_advisory_xact_lock(hashtextextended('{{schema}}.migrate', 0));\n"
    parts = ("BEGIN;\n" + lock, _step("roles"), _step("grants"), "COMMIT;\n")
    return in_schema("\n".join(parts), schema)


def current(dsn: str, schema: str = DEFAULT_SCHEMA) -> str | None:
    """Give the revision the schema is at; None without a schema. Writes nothing, needs no Alembic."""
    _checked(schema)
    with connect(dsn, application_name="pgqueue migrate") as connection:
        return _revision(connection, schema)


def check(dsn: str, schema: str = DEFAULT_SCHEMA) -> None:
    """Say whether this pgqueue can work with the schema. Writes nothing, needs no Alembic.

    Functions written by a newer pgqueue are fine: a signature keeps its meaning for a release.

    Raises:
        SchemaMissing, SchemaTooOld, SchemaTooNew: it cannot; the message says what to run.
        DatabaseUnreachable: no server, or it refused us.
    """
    _checked(schema)
    # Settings of our own, so that none made for the role is in force.
    settings = {"statement_timeout": "10s", "lock_timeout": "10s"}
    with connect(dsn, application_name="pgqueue migrate", settings=settings) as connection:
        if (found := mismatch(connection, schema)) is not None:
            raise found


def mismatch(connection: Connection[Any], schema: str = DEFAULT_SCHEMA) -> SchemaMismatch | None:
    """Give what `check` would raise, over a connection that is there; None: the schema will do."""
    found, needed = _revision(connection, schema), revisions()[-1]
    if found is None:
        return SchemaMissing(schema)
    if found not in revisions():
        return SchemaTooNew(schema, found, needed)
    if found != needed:
        return SchemaTooOld(schema, found, needed)
    recorded, version = _recorded(connection, schema)
    wanted = {item.object: item.checksum for item in definitions(schema)}
    if recorded == wanted or _ordered(version) > _ordered(__version__):
        return None
    return SchemaTooOld(
        schema,
        f"{found} with functions {_fingerprint(recorded)}",
        f"{needed} with functions {_fingerprint(wanted)}",
    )


# What the files say.


def location() -> Path:
    """Give the folder of the migrations: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise PgqueueError("the migrations are missing from this installation of pgqueue; install it again")


@cache
def revisions() -> list[str]:
    """Give the revisions this pgqueue knows, oldest first."""
    return sorted(path.name.partition("_")[0] for path in (location() / "versions").glob("[0-9]*_*.py"))


@cache
def definitions(schema: str) -> list[Definition]:
    """Give the functions, triggers and views of the schema, in the order of their files."""
    return [
        definition
        for path in sorted((location() / "functions").glob("*.sql"))
        for definition in _parse(path.name, in_schema(path.read_text(encoding="utf-8"), schema))
    ]


def in_schema(text: str, schema: str) -> str:
    """Put the schema's name, and the numbers of its bell, into a text of ours."""
    bell, duty = _bell_locks(schema)
    return (
        text.replace("{{schema}}", _checked(schema))
        .replace("{{bell_lock}}", str(bell))
        .replace("{{duty_lock}}", str(duty))
    )


# What the Alembic environment and the revisions use.


def run(text: str, schema: str) -> None:
    """Run SQL of ours exactly as written, or print it.

    Not Alembic's op.execute(): printing, that doubles every `%`, and reads `:true` inside a JSON
    literal as a parameter, which becomes NULL without a word.
    """
    from alembic import context

    text = in_schema(text, schema).strip()
    if context.is_offline_mode():
        context.get_context().impl.static_output(text + "\n")
    else:
        _driver().execute(text.encode())


def prepare(schema: str) -> None:
    """Wait for our turn and make the schema; what follows is ours alone until the transaction ends."""
    run(_step("prepare"), schema)


def define(schema: str) -> list[str]:
    """Re-create what changed in `functions/*.sql`, drop what has gone from there, and say what was done."""
    from alembic import context

    changed = wanted = definitions(schema)
    gone: list[str] = []
    if not context.is_offline_mode():
        recorded, version = _recorded(_driver(), schema)
        if _ordered(version) > _ordered(__version__):
            changed = []
        else:
            changed = [item for item in wanted if recorded.get(item.object) != item.checksum]
            gone = sorted(recorded.keys() - {item.object for item in wanted})
    if changed or gone:
        kept = [f"('{item.object}', '{item.shape}')" for item in wanted]
        run(_step("drop_obsolete").replace("{{objects}}", ",\n                ".join(kept)), schema)
    for item in changed:
        run(item.text, schema)
        if item.object.startswith("FUNCTION "):
            run(f"REVOKE ALL ON {item.object} FROM PUBLIC;", schema)
    if changed:
        rows = [f"('{item.object}', '{item.shape}', '{item.checksum}', '{__version__}')" for item in changed]
        run(_step("record").replace("{{objects}}", ",\n    ".join(rows)), schema)
    run("SELECT {{schema}}.make_partitions(7);", schema)
    return [*sorted({f"functions/{item.file}" for item in changed}), *(f"DROP {name}" for name in gone)]


def renew_grants(schema: str) -> None:
    """Give the roles of `roles_script`, where somebody has made them, what this version grants them."""
    run(_step("renew_grants").replace("{{grants}}", _step("grants").strip()), schema)


# Inner parts.


def _checked(schema: str) -> str:
    if not SCHEMA_NAME.fullmatch(schema) or schema.startswith("pg_"):
        raise ConfigurationError(
            f"{schema!r} cannot name the schema: lower-case letters, digits and _, at most 48, not pg_…"
        )
    return schema


def _step(name: str) -> str:
    return (location() / "steps" / f"{name}.sql").read_text(encoding="utf-8")


def _bell_locks(schema: str) -> tuple[int, int]:
    if schema == DEFAULT_SCHEMA:
        return 1885827445, 1885827446
    bell, duty = (crc32(f"{schema}.{name}".encode()) & 0x7FFFFFFF for name in ("bell", "duty"))
    return bell, duty


def _parse(file: str, text: str) -> Iterator[Definition]:
    starts = [match.start() for match in _OBJECT.finditer(text)]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        chunk = text[start:end].strip() + "\n"
        if function := _FUNCTION.search(chunk):
            # A DROP names the arguments like a CREATE, except for their defaults.
            arguments = ", ".join(
                re.sub(r" DEFAULT .*", "", argument.strip(), flags=re.DOTALL)
                for argument in function["arguments"].split(",")
            )
            name = f"FUNCTION {function['name']}({arguments})"
            shape = function["arguments"] + function["result"]
        elif trigger := _TRIGGER.search(chunk):
            name, shape = f"TRIGGER {trigger['name']} ON {trigger['table']}", ""
        elif view := _VIEW.search(chunk):
            name, shape = f"VIEW {view['name']}", chunk
        else:
            raise PgqueueError(f"{file}: neither a function, a trigger nor a view: {chunk[:80]}")
        yield Definition(file, name, _digest(" ".join(shape.split())), chunk)


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:32]


def _fingerprint(checksums: dict[str, str]) -> str:
    return _digest(repr(sorted(checksums.items())))[:8]


def _ordered(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _config(schema: str, output: StringIO | None = None) -> Config:
    from alembic.config import Config

    config = Config(output_buffer=output) if output else Config()
    config.set_main_option("script_location", str(location()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["schema"] = schema
    return config


def _driver() -> Connection[Any]:
    from alembic import context

    connection = context.get_context().connection.connection.driver_connection  # type: ignore[union-attr]
    assert isinstance(connection, Connection)  # noqa: S101  what our creator gave
    return connection


def _refuse_what_cannot_work(connection: Connection[Any], schema: str) -> None:
    if connection.info.server_version // 10000 < OLDEST_SERVER:
        found = connection.info.parameter_status("server_version")
        raise ConfigurationError(f"PostgreSQL {OLDEST_SERVER} or newer is needed, this server is {found}")
    row = connection.execute("SELECT quote_ident(%s)", [schema]).fetchone()
    if row is None or row[0] != schema:
        raise ConfigurationError(f"{schema!r} cannot name the schema: it is a word of SQL")
    found = _revision(connection, schema)
    if found is not None and found not in revisions():
        raise SchemaTooNew(schema, found, revisions()[-1])
    connection.rollback()


def _revision(connection: Connection[Any], schema: str) -> str | None:
    table = connection.execute("SELECT to_regclass(%s)", [f"{schema}.alembic_version"]).fetchone()
    if table is None or table[0] is None:
        return None
    text = in_schema("SELECT version_num FROM {{schema}}.alembic_version", schema)
    row = connection.execute(text.encode()).fetchone()
    return row[0] if row else None


def _recorded(connection: Connection[Any], schema: str) -> tuple[dict[str, str], str]:
    """Give the checksums of what is in the schema, and the newest version that wrote any of it."""
    text = in_schema("SELECT object, checksum, version FROM {{schema}}.definitions", schema)
    rows = connection.execute(text.encode()).fetchall()
    newest = max((version for _, _, version in rows), key=_ordered, default="")
    return {name: checksum for name, checksum, _ in rows}, newest
