"""Sessions that stand in the way: open transactions, held locks."""

from __future__ import annotations

from collections.abc import Iterator

from pgqueue.diagnosis.finding import Exam, Finding
from pgqueue.model.spoken import duration
from pgqueue.shell import sql_text, write_psql, write_termination
from pgqueue.sql import doctor as questions


def snapshots(exam: Exam) -> Iterator[Finding]:
    for holder in exam.ask(questions.snapshots(exam.at.snapshot_seconds)):
        if holder.kind == "slot":
            yield Finding(
                "slot_unused",
                "critical",
                f"nobody reads the replication slot {holder.name}: it keeps WAL, and perhaps dead rows, "
                "until the disk is full",
                [write_psql(f"SELECT pg_drop_replication_slot({sql_text(holder.name)})")],
            )
            continue
        since = duration(holder.seconds)
        if holder.kind == "prepared":
            yield Finding(
                "prepared_transaction",
                "critical",
                f"the prepared transaction {holder.name!r} of {holder.role} has been left open for "
                f"{since}: it keeps its locks and all dead rows, also over restarts",
                [write_psql(f"ROLLBACK PREPARED {sql_text(holder.name)}")],
            )
            continue
        is_idle = (holder.state or "").startswith("idle in transaction")
        where = f" at {holder.address}" if holder.address else ""
        begun = (
            "" if holder.query_seconds is None else f", its query began {duration(holder.query_seconds)} ago"
        )
        yield Finding(
            "idle_in_transaction" if is_idle else "old_snapshot",
            "warning",
            f"pid {holder.pid} ({holder.name or 'no name'} as {holder.role}{where}) has had a transaction "
            f"open for {since} and is {holder.state}{begun}: dead rows younger than that cannot be removed",
            [write_termination(holder.pid)],
        )


def waits(exam: Exam) -> Iterator[Finding]:
    for wait in exam.ask(questions.waits(exam.at.lock_wait_seconds, exam.schema)):
        yield Finding(
            "lock_wait",
            "critical",
            f"pid {wait.pid} ({wait.application or 'no name'}) has waited {duration(wait.seconds)} for a "
            f"lock that pid {wait.holder_pid} ({wait.holder_application or 'no name'}, "
            f"{wait.holder_state}) holds",
            [write_termination(wait.holder_pid)],
        )
