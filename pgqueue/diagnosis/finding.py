"""What an examination gives, what it goes by, and what its checks ask with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pgqueue.database import Connection, run
from pgqueue.shell import write_command
from pgqueue.sql import Statement

T = TypeVar("T")
Severity = Literal["critical", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault, named by `code` for programs; `next` are command lines that lead on."""

    code: str
    severity: Severity
    sentence: str
    next: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found, the worst first, by so many checks of so many; `unanswered` says why not by all.

    It also says what a check could not see; such a check counts as made.
    """

    findings: Sequence[Finding]
    checks: int
    examined: int
    unanswered: Sequence[str]

    @property
    def is_critical(self) -> bool:
        return any(finding.severity == "critical" for finding in self.findings)

    @property
    def is_complete(self) -> bool:
        return self.examined == self.checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """From where on something counts as a fault."""

    snapshot_seconds: float = 300.0
    lock_wait_seconds: float = 5.0
    late_seconds: float = 30.0
    stalled_seconds: float = 300.0
    forgotten_seconds: float = 86_400.0
    clock_seconds: float = 5.0
    short_timeout_seconds: float = 5.0
    connections: float = 0.85
    transaction_age: float = 0.5
    notifications: float = 0.5
    dead_rows: int = 50_000
    bloat_bytes: int = 256 * 1024 * 1024
    bloat_bytes_a_row: int = 50_000


@dataclass(frozen=True, slots=True)
class Exam:
    """One examination under way; `notes` say what could not be seen."""

    connection: Connection[Any]
    at: Thresholds
    schema: str
    notes: list[str] = field(default_factory=list)

    def command(self, name: str, *words: object, **options: object) -> str:
        return write_command(name, *words, schema=self.schema, **options)

    def ask(self, statement: Statement[T]) -> T:
        return run(self.connection, statement, self.schema)
