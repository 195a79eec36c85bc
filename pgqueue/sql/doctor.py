"""What an examination of the whole system asks, as statements; the answers are values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple, TypeVar

from pgqueue.sql import Row, Statement, column, first_value, load

_SQL = load("doctor")

T = TypeVar("T")


class Identity(NamedTuple):
    """The server's side of this connection."""

    backend_pid: int
    is_standby: bool
    now: datetime
    sees_all_sessions: bool
    role: str
    database: str


class Setting(NamedTuple):
    """The value of a setting and where it comes from: the server's files, the database, the role."""

    value: str
    source: str


class Trigger(NamedTuple):
    """A trigger that is there."""

    name: str
    table: str
    is_enabled: bool


class Table(NamedTuple):
    """A table: whether it survives a crash, its own settings, bytes, live and dead rows, last vacuum."""

    name: str
    is_unlogged: bool
    options: list[str]
    size_bytes: int
    live_rows: int
    dead_rows: int
    vacuumed_at: datetime | None


class Partitions(NamedTuple):
    """Days without a partition, partitions that are half detached, and such as take every day."""

    missing: list[str]
    half_detached: list[str]
    default: list[str]


class Snapshot(NamedTuple):
    """Who keeps dead rows from being removed: a session, a prepared transaction or a replication slot."""

    kind: str
    name: str
    pid: int | None
    role: str | None
    address: str | None
    state: str | None
    seconds: float
    query_seconds: float | None


class Wait(NamedTuple):
    """A session that waits for a lock, and who holds it."""

    pid: int
    application: str | None
    holder_pid: int
    holder_application: str | None
    holder_state: str | None
    seconds: float


class Connections(NamedTuple):
    """Open connections and how many there may be: of all, of the database, of the role; who has most."""

    used: int
    allowed: int
    of_database: int
    allowed_of_database: int
    of_role: int
    allowed_of_role: int
    most: list[str]


class Ages(NamedTuple):
    """How far the transaction counter and the queue of notifications are used up, from 0 to 1."""

    transactions: float
    notifications: float


class Work(NamedTuple):
    """What was not done: expired leases, due jobs (up to 1,000 each), schedules, tasks nobody knows."""

    expired: int
    due: int
    late_schedules: list[str]
    unknown_tasks: list[str]


class UnplannedSchedule(NamedTuple):
    """A schedule that no worker has given a tick."""

    name: str
    cron: str
    timezone: str
    task: str


class Forgotten(NamedTuple):
    """A queue or a breaker that was held back by hand, without an end."""

    kind: str
    name: str
    since: datetime


def identity() -> Statement[Identity]:
    return Statement(_SQL["identity"], {}, lambda rows: Identity(*rows[0]))


def settings() -> Statement[dict[str, Setting]]:
    return Statement(_SQL["settings"], {}, lambda rows: {row[0]: Setting(row[1], row[2]) for row in rows})


def definitions() -> Statement[list[str]]:
    """Name the functions, triggers and views that the schema was given, as a DROP names them."""
    return Statement(_SQL["definitions"], {}, column)


def relations(schema: str) -> Statement[list[str]]:
    return Statement(_SQL["relations"], {"schema": schema}, column)


def functions(schema: str) -> Statement[list[str]]:
    return Statement(_SQL["functions"], {"schema": schema}, column)


def triggers(schema: str) -> Statement[list[Trigger]]:
    return Statement(_SQL["triggers"], {"schema": schema}, _each(Trigger._make))


def indexes(schema: str) -> Statement[dict[str, bool]]:
    """Give each index, and whether it is used."""
    return Statement(_SQL["indexes"], {"schema": schema}, lambda rows: {row[0]: row[1] for row in rows})


def tables(schema: str) -> Statement[list[Table]]:
    return Statement(_SQL["tables"], {"schema": schema}, _each(Table._make))


def partitions(schema: str) -> Statement[Partitions]:
    return Statement(_SQL["partitions"], {"schema": schema}, lambda rows: Partitions(*rows[0]))


def snapshots(seconds: float) -> Statement[list[Snapshot]]:
    return Statement(_SQL["snapshots"], {"seconds": seconds}, _each(Snapshot._make))


def waits(seconds: float, schema: str) -> Statement[list[Wait]]:
    return Statement(_SQL["waits"], {"seconds": seconds, "schema": schema}, _each(Wait._make))


def connections() -> Statement[Connections]:
    return Statement(_SQL["connections"], {}, lambda rows: Connections(*rows[0]))


def roles() -> Statement[list[str]]:
    """Name the superusers that workers are logged in as."""
    return Statement(_SQL["roles"], {}, column)


def ages() -> Statement[Ages]:
    return Statement(_SQL["ages"], {}, lambda rows: Ages(*rows[0]))


def work(late_seconds: float) -> Statement[Work]:
    return Statement(_SQL["work"], {"late_seconds": late_seconds}, lambda rows: Work(*rows[0]))


def unplanned_schedules() -> Statement[list[UnplannedSchedule]]:
    return Statement(_SQL["unplanned_schedules"], {}, _each(UnplannedSchedule._make))


def forgotten(seconds: float) -> Statement[list[Forgotten]]:
    return Statement(_SQL["forgotten"], {"seconds": seconds}, _each(Forgotten._make))


def future() -> Statement[float | None]:
    """Give how many seconds ahead of the clock the latest sign of life is, negative if it is not."""
    return Statement(_SQL["future"], {}, first_value)


def _each(make: Callable[[Row], T]) -> Callable[[Sequence[Row]], list[T]]:
    return lambda rows: list(map(make, rows))
