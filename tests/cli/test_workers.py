"""`pgqueue workers`: who is there, and who only was."""

from __future__ import annotations


def test_a_worker_is_listed_with_what_it_runs_and_when_it_was_seen(pgqueue, queue):
    queue.see_worker(["mail", "default"])
    queue.run()

    ended = pgqueue("workers")

    assert ended.rows == ["00000000 web-1 42 0.1.0 mail, default 1 10 3 h 0 s ago"]


def test_a_worker_that_was_not_seen_for_a_minute_is_silent(pgqueue, queue):
    queue.see_worker(["mail"], silent_seconds=120)

    told, listed = pgqueue("workers"), pgqueue("workers", "--json")

    assert told.rows[0].endswith("2 min ago silent")
    assert listed.json[0]["is_silent"] is True


def test_no_workers_is_said_on_stderr(pgqueue):
    ended = pgqueue("workers")

    assert (ended.code, ended.out, ended.err) == (0, "", "no workers\n")
