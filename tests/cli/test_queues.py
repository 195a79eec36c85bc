"""`pgqueue queues`: at a glance, what waits where and whether anybody works on it."""

from __future__ import annotations


def test_the_list_counts_by_state_and_says_how_long_the_oldest_waits(pgqueue, queue):
    queue.see_worker(["mail"])
    queue.run(queue="mail")
    queue.enqueue(queue="mail", delay_seconds=60)
    queue.connection.execute(
        "INSERT INTO pgqueue.jobs (task, queue, run_at) "
        "VALUES ('send', 'mail', clock_timestamp() - interval '12 min')"
    )
    queue.bury()

    ended = pgqueue("queues", "list")

    assert " ".join(ended.out.split()[:9]) == "QUEUE READY SCHEDULED BLOCKED RUNNING DEAD OLDEST WORKERS NOTE"
    assert ended.rows == ["default 0 0 0 0 1 - 0", "mail 1 1 0 1 0 12 min 1"]


def test_a_queue_that_nobody_works_on_is_noted_only_if_jobs_wait(pgqueue, queue):
    queue.connection.execute(
        "INSERT INTO pgqueue.queues (name, is_paused) VALUES ('calm', false), ('off', true)"
    )
    queue.enqueue(queue="busy")
    queue.enqueue(queue="off")

    ended = pgqueue("queues", "list")

    busy, calm, off = ended.rows
    assert busy.endswith("no worker")
    assert calm == "calm 0 0 0 0 0 - 0"
    assert off.endswith("paused")


def test_numbers_beyond_ten_thousand_are_not_counted_out(pgqueue, queue):
    queue.connection.execute("INSERT INTO pgqueue.jobs (task) SELECT 'send' FROM generate_series(1, 10001)")

    told, counted = pgqueue("queues", "list"), pgqueue("queues", "list", "--json")

    assert told.rows[0].startswith("default 10,000+ ")
    assert (counted.json[0]["ready"], counted.json[0]["lower_bounds"]) == (10_000, ["ready"])


def test_no_queues_is_said_on_stderr(pgqueue):
    ended = pgqueue("queues", "list")

    assert (ended.code, ended.out, ended.err) == (0, "", "no queues\n")
