from __future__ import annotations

from pgqueue import App


def test_locks_says_who_holds_what_and_how_to_free_it(pgqueue, queue):
    job = queue.enqueue(concurrency_key="user:1")
    queue.claim()
    with App(queue.dsn).lock("nightly report"):
        listed = pgqueue("locks")

    assert listed.code == 0, listed.err
    concurrency, lock = listed.rows
    assert concurrency.startswith("concurrency key user:1 ")
    assert f"job {job} (send), worker 00000000" in concurrency
    assert concurrency.endswith(f"pgqueue jobs cancel {job}")
    assert lock.startswith("lock nightly report ")
    assert "pg_terminate_backend(" in lock


def test_locks_says_so_when_nobody_holds_anything(pgqueue, queue):
    listed = pgqueue("locks")

    assert (listed.code, listed.out, listed.err) == (0, "", "nobody holds anything\n")


def test_locks_gives_json_to_programs(pgqueue, queue):
    queue.enqueue(concurrency_key="user:1")
    queue.claim()

    [holder] = pgqueue("locks", "--json").json

    assert (holder["kind"], holder["name"], holder["task"]) == ("concurrency key", "user:1", "send")


def test_locks_says_what_to_do_about_an_effect_whose_owner_is_gone(pgqueue, queue):
    queue.connection.execute(
        "INSERT INTO pgqueue.processed_jobs (idempotency_key, job_name, status, job_id)"
        " VALUES ('mail:1', 'mail', 'IN_PROGRESS', 12)"
    )

    assert pgqueue("locks").rows[0].endswith("job 12 (mail) pgqueue processed forget mail:1")


def test_locks_writes_a_customers_key_so_that_no_shell_executes_it(pgqueue, queue):
    queue.connection.execute(
        "INSERT INTO pgqueue.processed_jobs (idempotency_key, job_name, status, job_id) VALUES "
        "('mail:$(touch x)', 'mail', 'IN_PROGRESS', 12), ('-x', 'mail', 'IN_PROGRESS', 13)"
    )

    rows = pgqueue("locks").rows

    assert rows[0].endswith(" pgqueue processed forget 'mail:$(touch x)'")
    assert rows[1].endswith(" pgqueue processed forget -- -x")
