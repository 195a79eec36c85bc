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
from pgqueue.diagnosis.schema import MISSING

# What a question meets where the schema is not whole, and the findings that say more of it.
_LACKS = (
    errors.UndefinedTable,
    errors.UndefinedColumn,
    errors.UndefinedFunction,
    errors.UndefinedObject,
    errors.InvalidSchemaName,
)
_EXPLAINS = (
    *("schema_new", "schema_old", "functions_differ"),
    *("function_missing", "view_missing", "table_missing"),
)

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
        psycopg.Error: the connection is lost.
    """
    exam = Exam(connection, thresholds or Thresholds(), schema)
    findings: list[Finding] = []
    examined = 0
    lacks: list[str] = []
    for check in CHECKS:
        try:
            findings += check(exam)
            examined += 1
        except Error as error:
            if connection.closed or connection.broken:
                raise
            reason = (error.diag.message_primary or str(error)).partition("\n")[0]
            exam.notes.append(f"{check.__name__}: {reason}")
            if isinstance(error, _LACKS):
                lacks.append(reason)
        if any(finding.code == MISSING for finding in findings):
            exam.notes.append("the schema, sessions, work: there is no schema")
            break
    if lacks and not any(finding.code in _EXPLAINS for finding in findings):
        findings.append(
            Finding(
                "schema_damaged",
                "critical",
                f"the schema lacks what pgqueue made in it: {lacks[0]}",
                [exam.command("migrate", check=True)],
            )
        )
    findings.sort(key=lambda finding: finding.severity != "critical")
    return Examination(findings, len(CHECKS), examined, exam.notes)
