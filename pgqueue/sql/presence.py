"""Workers, their tasks and their wake-ups, as statements."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pgqueue.sql import Statement, column, first_value, load, nothing

_TEXT = load("presence")
_PARTITION = re.compile(r"finished_jobs_\d{8}")


class ExpiredPartition(NamedTuple):
    name: str
    is_attached: bool
    is_half_detached: bool


def register_tasks(definitions: Sequence[Mapping[str, Any]]) -> Statement[None]:
    return Statement(_TEXT["register_tasks"], {"definitions": json.dumps(list(definitions))}, nothing)


def see_worker(
    worker_id: str, host: str, pid: int, version: str, queues: Sequence[str], slots: int
) -> Statement[tuple[int, float]]:
    """Say that a worker is there; gives how many serve its queues, and the database's time in seconds."""
    return Statement(
        _TEXT["see_worker"],
        {
            "worker_id": worker_id,
            "host": host,
            "pid": pid,
            "version": version,
            "queues": list(queues),
            "slots": slots,
        },
        lambda found: (found[0][0], found[0][1]),
    )


def unknown_queues(queues: Sequence[str], cap: int = 10_000) -> Statement[list[str]]:
    """Give those of these queues that neither a task, nor settings, nor a waiting job names."""
    return Statement(_TEXT["unknown_queues"], {"queues": list(queues), "cap": cap}, column)


def forget_worker(worker_id: str) -> Statement[None]:
    return Statement(_TEXT["forget_worker"], {"worker_id": worker_id}, nothing)


def bell_channels(queues: Sequence[str]) -> Statement[dict[str, str]]:
    return Statement(
        _TEXT["bell_channels"], {"queues": list(queues)}, lambda found: {row[0]: row[1] for row in found}
    )


def listen(channel: str) -> Statement[None]:
    """Listen to a channel; its name is an identifier, so it is quoted here and not passed as a value."""
    return Statement('LISTEN "' + channel.replace("%", "%%").replace('"', '""') + '"', {}, nothing)


def rest(queue: str, *, on_duty: bool, may_sleep: bool) -> Statement[str]:
    return Statement(_TEXT["rest"], {"queue": queue, "on_duty": on_duty, "may_sleep": may_sleep}, first_value)


def rise(queue: str, *, was_asleep: bool, leaves_duty: bool, rings: bool) -> Statement[None]:
    return Statement(
        _TEXT["rise"],
        {"queue": queue, "was_asleep": was_asleep, "leaves_duty": leaves_duty, "rings": rings},
        nothing,
    )


def ping() -> Statement[None]:
    return Statement(_TEXT["ping"], {}, nothing)


def take_maintenance(places: int, host: str, *, stands_by: bool) -> Statement[bool | None]:
    """Give whether it is a place; no, if it is the standby's, and None if there was none to be had."""
    wanted = {"places": places, "host": host, "stands_by": stands_by}
    return Statement(_TEXT["take_maintenance"], wanted, first_value)


def leave_standby(host: str) -> Statement[None]:
    return Statement(_TEXT["leave_standby"], {"host": host}, nothing)


def end_if_idle(seconds: float) -> Statement[None]:
    return Statement(_TEXT["end_if_idle"], {"seconds": round(seconds)}, nothing)


def expired_partitions(retention_seconds: float) -> Statement[list[ExpiredPartition]]:
    return Statement(
        _TEXT["expired_partitions"],
        {"retention_seconds": retention_seconds},
        lambda found: [ExpiredPartition._make(row) for row in found],
    )


def take_partition_duty() -> Statement[bool]:
    return Statement(_TEXT["take_partition_duty"], {}, first_value)


def drop_partition(partition: ExpiredPartition) -> list[Statement[None]]:
    """Detach and drop one partition; each statement by itself, outside a transaction.

    DETACH CONCURRENTLY never stops an insert; a plain DETACH or DROP would wait with the strongest lock.
    """
    if not _PARTITION.fullmatch(partition.name):
        raise ValueError(f"not a partition of the history: {partition.name!r}")
    table = f"{{{{schema}}}}.{partition.name}"
    statements: list[str] = []
    if partition.is_half_detached:
        statements.append(f"ALTER TABLE {{{{schema}}}}.finished_jobs DETACH PARTITION {table} FINALIZE")
    elif partition.is_attached:
        statements.append(f"ALTER TABLE {{{{schema}}}}.finished_jobs DETACH PARTITION {table} CONCURRENTLY")
    statements.append(f"DROP TABLE IF EXISTS {table}")
    return [Statement(text, {}, nothing) for text in statements]


def drop_expired_partition(name: str, retention_seconds: float) -> Statement[bool]:
    return Statement(
        _TEXT["drop_expired_partition"], {"name": name, "retention_seconds": retention_seconds}, first_value
    )
