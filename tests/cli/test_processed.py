from __future__ import annotations

import psycopg
import pytest


@pytest.fixture
def done(queue):
    queue.connection.execute(
        "INSERT INTO pgqueue.processed_jobs (idempotency_key, job_name, status, response_payload, job_id)"
        " VALUES ('charge:17', 'charge', 'COMPLETED', '{\"receipt\": 7}', 12),"
        " ('cut', 'mail', 'IN_PROGRESS', NULL, 13)"
    )
    return queue


def test_show_says_what_became_of_a_key(pgqueue, done):
    shown = pgqueue("processed", "show", "charge:17")

    assert shown.code == 0, shown.err
    assert shown.out.startswith("key 'charge:17' is done\n")
    assert "charge" in shown.out
    assert '"receipt": 7' in shown.out
    assert "what became of it is unknown" in pgqueue("processed", "show", "cut").out


def test_show_gives_json_to_programs(pgqueue, done):
    shown = pgqueue("processed", "show", "charge:17", "--json").json

    assert (shown["key"], shown["status"], shown["job_id"]) == ("charge:17", "COMPLETED", 12)


def test_forget_forgets_once(pgqueue, done):
    forgotten = [pgqueue("processed", "forget", "charge:17") for _ in range(2)]

    assert [one.code for one in forgotten] == [0, 1]
    assert forgotten[1].err == "pgqueue: nothing is remembered of the key 'charge:17'\n"


def test_forget_refuses_a_key_that_somebody_is_at(pgqueue, done):
    with psycopg.connect(done.dsn) as other:
        other.execute("SELECT pg_advisory_xact_lock(pgqueue.once_lock('charge:17'))")

        refused = pgqueue("processed", "forget", "charge:17")

    assert refused.code == 1
    assert "somebody is at work on the key 'charge:17'" in refused.err
