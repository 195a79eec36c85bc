"""The limit to compare with: batches of plain SQL on lean tables, one connection, no promises."""

from __future__ import annotations

import time
from typing import Any

import psycopg

TABLES = """
CREATE SCHEMA raw;
CREATE TABLE raw.jobs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue text NOT NULL DEFAULT 'default',
    priority smallint NOT NULL DEFAULT 0,
    run_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    state smallint NOT NULL DEFAULT 0,
    attempt smallint NOT NULL DEFAULT 0,
    task text NOT NULL,
    args jsonb NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX ON raw.jobs (queue, priority, run_at, id) WHERE state = 0;
CREATE TABLE raw.finished_jobs (
    id bigint PRIMARY KEY,
    finished_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    run_at timestamptz NOT NULL,
    queue text NOT NULL,
    task text NOT NULL,
    args jsonb NOT NULL
);
"""
INSERT = """
INSERT INTO raw.jobs (task, args)
SELECT 'nothing', jsonb_build_object('i', i) FROM generate_series(1, %s) AS i
"""
CLAIM = """
UPDATE raw.jobs SET state = 1, attempt = attempt + 1
WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM raw.jobs
    WHERE queue = 'default' AND state = 0 AND run_at <= now()
    ORDER BY priority, run_at, id
    LIMIT %s
    FOR UPDATE SKIP LOCKED
))
RETURNING id, task, args::text
"""
FINISH = {
    "deleting": "DELETE FROM raw.jobs WHERE id = ANY (%s::bigint[])",
    "with_history": """
WITH finished AS (
    DELETE FROM raw.jobs WHERE id = ANY (%s::bigint[]) RETURNING id, run_at, queue, task, args
)
INSERT INTO raw.finished_jobs (id, run_at, queue, task, args)
SELECT id, run_at, queue, task, args FROM finished
""",
}


def drain_rates(dsn: str, jobs: int, batch: int) -> dict[str, float]:
    """Give the jobs/s of a loop that claims and deletes, and of one that also keeps a history."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(TABLES)
        rates = {name: jobs / _drain(connection, jobs, batch, finish) for name, finish in FINISH.items()}
        connection.execute("DROP SCHEMA raw CASCADE")
        return rates


def _drain(connection: psycopg.Connection[Any], jobs: int, batch: int, finish: str) -> float:
    connection.execute(INSERT, [jobs])
    connection.execute("VACUUM ANALYZE raw.jobs")
    connection.execute("CHECKPOINT")
    began_at, done = time.monotonic(), 0
    while claimed := connection.execute(CLAIM, [batch], prepare=True).fetchall():
        connection.execute(finish.encode(), [[row[0] for row in claimed]], prepare=True)
        done += len(claimed)
    seconds = time.monotonic() - began_at
    if done != jobs:
        raise SystemExit(f"{jobs} raw jobs went in, {done} came out")
    return seconds
