"""An examination of the whole system: what is wrong, how bad it is, and what to do about it.

Every question is answered by itself: one that the role may not ask, or that meets a lock, is
reported as not answered and keeps none of the others from being asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pgqueue.database import Connection, Error, errors
from pgqueue.diagnosis import schema, server, sessions, work
from pgqueue.diagnosis.finding import Exam, Examination, Finding, Thresholds

CHECKS: tuple[Callable[[Exam], Iterable[Finding]], ...] = (
    server.identity,
    server.settings,
    server.connections,
    server.roles,
    server.ages,
    server.driver,
    schema.definitions,
    schema.triggers,
    schema.indexes,
    schema.tables,
    schema.partitions,
    sessions.snapshots,
    sessions.waits,
    work.work,
    work.queues,
    work.workers,
    work.forgotten,
    work.clocks,
)


def examine(
    connection: Connection[Any], thresholds: Thresholds | None = None, schema: str = "pgqueue"
) -> Examination:
    """Examine the server, the schema, the sessions and the work; changes nothing, locks nothing.

    Raises:
        psycopg.Error: the connection is lost, or there is no such schema.
    """
    exam = Exam(connection, thresholds or Thresholds(), schema)
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check(exam)
        except (errors.UndefinedTable, errors.InvalidSchemaName, errors.UndefinedFunction):
            raise
        except Error as error:
            if connection.closed or connection.broken:
                raise
            reason = (error.diag.message_primary or str(error)).partition("\n")[0]
            exam.notes.append(f"{check.__name__}: {reason}")
    findings.sort(key=lambda finding: finding.severity != "critical")
    return Examination(findings, len(CHECKS), exam.notes)
