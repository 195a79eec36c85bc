"""Running commands in this process, and a queue to run them on."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from pgqueue.cli import main

WORKER = "00000000-0000-4000-8000-000000000001"


@dataclass
class Ended:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def rows(self) -> list[str]:
        """The lines of a table without its head, their columns one space apart."""
        return [" ".join(line.split()) for line in self.out.splitlines()[1:]]

    @property
    def ids(self) -> list[int]:
        """The first column of a table."""
        return [int(row.split()[0]) for row in self.rows]


class Queue:
    """A queue in which jobs come into any state at once."""

    def __init__(self, dsn: str, connection: psycopg.Connection) -> None:
        self.dsn = dsn
        self.connection = connection

    def one(self, text: str, *parameters: Any) -> Any:
        row = self.connection.execute(text, parameters).fetchone()
        return row and row[0]

    def enqueue(self, task: str = "send", args: Any = None, **parameters: Any) -> int:
        names = "".join(f", {name} => %({name})s" for name in parameters)
        return self.connection.execute(
            f"SELECT pgqueue.enqueue(%(task)s, %(args)s::jsonb{names})",
            {"task": task, "args": json.dumps(args or {}), **parameters},
        ).fetchone()[0]

    def claim(self, queue: str = "default") -> list[tuple[int, Any]]:
        return self.connection.execute(
            "SELECT job_id, token FROM pgqueue.claim(%s, %s, 100)", [queue, WORKER]
        ).fetchall()

    def run(self, **parameters: Any) -> int:
        job_id = self.enqueue(**parameters)
        self.claim(parameters.get("queue", "default"))
        return job_id

    def succeed(self, result: str | None = None, **parameters: Any) -> int:
        job_id = self.enqueue(**parameters)
        for claimed, token in self.claim(parameters.get("queue", "default")):
            self.connection.execute(
                "SELECT pgqueue.complete(ARRAY[%s]::bigint[], ARRAY[%s]::uuid[], ARRAY[%s]::jsonb[])",
                [claimed, token, result],
            )
        return job_id

    def fail(self, error: str = "boom", *, is_dead: bool = False, **parameters: Any) -> int:
        job_id = self.enqueue(**parameters)
        for claimed, token in self.claim(parameters.get("queue", "default")):
            self.connection.execute(
                "SELECT pgqueue.fail(%s, %s, %s, 3600, %s)", [claimed, token, error, is_dead]
            )
        return job_id

    def bury(self, reason: str = "boom", **parameters: Any) -> int:
        return self.fail(reason, is_dead=True, **parameters)

    def see_worker(self, queues: list[str], silent_seconds: float = 0) -> None:
        self.connection.execute(
            "INSERT INTO pgqueue.workers (id, host, pid, version, queues, slots, started_at, seen_at) "
            "VALUES (%s, 'web-1', 42, '0.1.0', %s, 10, clock_timestamp() - interval '3 h', "
            "clock_timestamp() - %s * interval '1 s')",
            [WORKER, queues, silent_seconds],
        )


@pytest.fixture
def queue(fast_dsn: str) -> Iterator[Queue]:
    with psycopg.connect(fast_dsn, autocommit=True) as connection:
        yield Queue(fast_dsn, connection)


@pytest.fixture
def pgqueue(
    fast_dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """Run a command on the test's database: pgqueue("jobs", "list", stdin="...")."""
    monkeypatch.setenv("PGQUEUE_DSN", fast_dsn)

    def run(*arguments: Any, stdin: str | bytes = "") -> Ended:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        # A few seconds are a moment: machines may be slow.
        return Ended(code, re.sub(r"(?<![\d.,:])[1-9] s\b", "0 s", captured.out), captured.err)

    return run
