"""`jobs why` names the cause that somebody planted, in one sentence, and the command that comes next."""

from __future__ import annotations

import sys

import pytest

from pgqueue import diagnosis
from tests.support import wait_until


@pytest.fixture
def served(queue):
    """A queue with a live worker that knows the task."""
    queue.see_worker(["default"])
    queue.connection.execute("INSERT INTO pgqueue.tasks (name) VALUES ('send')")
    return queue


@pytest.fixture
def causes(queue):
    """Give the codes of a job's causes, the decisive one first."""

    def ask(job_id):
        return [cause.code for cause in diagnosis.why(queue.connection, job_id).causes]

    return ask


@pytest.fixture
def said(pgqueue):
    """Give what the command says of a job, line by line."""

    def ask(job_id):
        ended = pgqueue("jobs", "why", job_id)
        assert (ended.code, ended.err) == (0, "")
        return ended.out.splitlines()

    return ask


# Waiting for a time.


def test_a_job_for_later_says_when_it_is_due(served, causes, said):
    job_id = served.enqueue(delay_seconds=7200)

    assert causes(job_id) == ["not_due"]
    first, command = said(job_id)
    assert first.startswith(f"job {job_id} (send) is scheduled: it is not due until 2")
    assert first.endswith(" UTC (in 2 h)")
    assert command == f"  pgqueue jobs retry {job_id}"


def test_a_job_that_failed_says_when_it_is_tried_again_and_why_it_failed(served, causes, said):
    job_id = served.fail("Traceback (most recent call last):\n  x\nOSError: connection refused")

    assert causes(job_id) == ["retry"]
    assert "attempt 1 of 5 failed, and the next one starts 2" in said(job_id)[0]
    assert said(job_id)[0].endswith(": OSError: connection refused")


def test_a_due_job_that_nobody_makes_ready_points_to_stuck_workers(served, causes):
    job_id = served.enqueue(delay_seconds=60)
    served.connection.execute("UPDATE pgqueue.jobs SET run_at = clock_timestamp() - interval '1 min'")

    assert causes(job_id) == ["not_promoted"]


# Held back on purpose.


def test_a_paused_queue_says_who_paused_it_when_until_when_and_why(
    served, causes, said, pgqueue, monkeypatch
):
    job_id = served.enqueue()
    monkeypatch.setenv("PGQUEUE_ACTOR", "ann@laptop")
    pgqueue("queues", "pause", "default", "--for", "30m", "--reason", "provider is down")

    assert causes(job_id) == ["queue_paused"]
    first, command = said(job_id)
    assert (
        f"job {job_id} (send) is ready: its queue 'default' was paused 0 s ago by ann@laptop until 2" in first
    )
    assert first.endswith("(in 30 min): provider is down")
    assert command == "  pgqueue queues resume default"


def test_a_queue_at_its_limit_says_so_and_who_set_it(served, causes, said, pgqueue, monkeypatch):
    monkeypatch.setenv("PGQUEUE_ACTOR", "ann@laptop")
    served.run()
    job_id = served.enqueue()
    pgqueue("queues", "limit", "default", 1)

    assert causes(job_id) == ["queue_full"]
    assert "its queue 'default' is at its limit of 1 running job, as set by ann@laptop" in said(job_id)[0]
    assert said(job_id)[-1] == "  pgqueue queues limit default none"


def test_a_queue_that_may_start_nothing_says_so(served, causes, said):
    job_id = served.enqueue()
    served.connection.execute("SELECT pgqueue.limit_queue('default', 0, 'moving house')")

    assert causes(job_id) == ["queue_full"]
    assert "may start nothing" in said(job_id)[0]
    assert said(job_id)[0].endswith(": moving house")


def test_a_rate_limit_says_how_many_wait_before_and_when_the_next_token_comes(served, causes, said):
    served.connection.execute("SELECT pgqueue.rate_set('task:send', 0.01)")
    served.enqueue(), served.enqueue()
    job_id = served.enqueue()
    served.claim()

    assert causes(job_id) == ["rate_limited"]
    first = said(job_id)[0]
    assert "it waits behind 1 job for its rate limit 'task:send' of 36/h" in first
    assert "whose next token comes 2" in first
    assert said(job_id)[-1] == "  pgqueue limits set task:send 72/h"


@pytest.mark.parametrize("rate", ["1/d", "1/min", "1/100d", "7/11d"])
def test_the_rate_that_it_suggests_can_be_set(served, said, pgqueue, rate):
    pgqueue("limits", "set", "task:send", rate)
    served.enqueue()
    job_id = served.enqueue()
    served.claim()

    command = said(job_id)[-1].split()

    assert command[:4] == ["pgqueue", "limits", "set", "task:send"]
    assert pgqueue(*command[1:]).code == 0


def test_the_rate_of_a_whole_queue_is_a_cause_too(served, causes, said):
    served.connection.execute("SELECT pgqueue.rate_set('queue:default', 0.01)")
    served.enqueue()
    job_id = served.enqueue()
    served.claim(), served.claim()

    assert causes(job_id) == ["queue_rate_limited"]
    assert "the queue 'default' starts 36/h at most, the next one 2" in said(job_id)[0]


@pytest.mark.parametrize(
    ("seconds", "until"),
    [
        (900, "until a probe may go 2"),
        (None, "until somebody closes it"),
        (0, "until a worker sends a probe"),
    ],
)
def test_an_open_breaker_says_until_when(served, causes, said, seconds, until):
    served.connection.execute("INSERT INTO pgqueue.breakers (name) VALUES ('bank')")
    served.connection.execute("UPDATE pgqueue.tasks SET breaker = 'bank'")
    served.connection.execute("SELECT pgqueue.breaker_open('bank', %s)", [seconds])
    parked, ready = served.enqueue(), served.enqueue()
    [(first, token), *_] = served.claim()
    served.connection.execute(
        "SELECT pgqueue.breaker_park(ARRAY[%s]::bigint[], ARRAY[%s]::uuid[], 'bank')", [first, token]
    )
    served.connection.execute(
        "SELECT pgqueue.release(ARRAY[%s]::bigint[], ARRAY[%s]::uuid[])", [ready, token]
    )

    assert (parked, causes(parked), causes(ready)) == (first, ["breaker_open"], ["breaker_open"])
    assert "its circuit breaker 'bank' has been open for 0 s, " + until in said(parked)[0]
    assert said(parked)[-1] == "  pgqueue breakers close bank"


# Held up by others.


def test_a_blocked_job_says_who_holds_its_key_and_since_when(served, causes, said):
    holder = served.run(concurrency_key="tenant:1")
    job_id = served.enqueue(concurrency_key="tenant:1")
    not_yet_parked = causes(job_id)
    served.claim()
    served.connection.execute("UPDATE pgqueue.jobs SET started_at = started_at - interval '5 min'")

    assert not_yet_parked == causes(job_id) == ["key_busy"]
    first, look, cancel = said(job_id)
    assert first == (
        f"job {job_id} (send) is blocked: its concurrency key 'tenant:1' is held by job {holder} (send), "
        "running for 5 min on web-1 (pid 42)"
    )
    assert (look, cancel) == (f"  pgqueue jobs why {holder}", f"  pgqueue jobs cancel {holder}")


def test_a_blocked_job_whose_key_is_free_says_that_it_will_be_found(served, causes):
    holder = served.run(concurrency_key="tenant:1")
    job_id = served.enqueue(concurrency_key="tenant:1")
    served.claim()
    served.connection.execute("DELETE FROM pgqueue.jobs WHERE id = %s", [holder])

    assert causes(job_id) == ["key_free"]


def test_a_locked_row_names_the_session_that_holds_it(served, causes, said, connect, fast_dsn, monkeypatch):
    job_id = served.enqueue()
    other = connect(fast_dsn, autocommit=False, application_name="batch report")
    other.execute("SELECT FROM pgqueue.jobs FOR NO KEY UPDATE")
    with monkeypatch.context() as patch:
        # However long it takes to ask.
        patch.setattr(sys.modules["pgqueue.diagnosis.why"], "PASSING_LOCK_SECONDS", 600)
        passing = causes(job_id)

    assert passing == ["next"]
    wait_until(lambda: causes(job_id) == ["row_locked"])
    first, command = said(job_id)
    assert f"by the transaction of pid {other.info.backend_pid} (batch report as " in first
    assert "idle in transaction" in first
    assert command == f"  psql \"$PGQUEUE_DSN\" -c 'SELECT pg_terminate_backend({other.info.backend_pid})'"


def test_another_job_at_work_on_the_same_effect_is_a_cause(served, causes, said):
    job_id = served.enqueue(idempotency_key="charge:7")
    served.connection.execute(
        "INSERT INTO pgqueue.processed_jobs (idempotency_key, job_name, status, job_id, claim_token) "
        "VALUES ('charge:7', 'send', 'IN_PROGRESS', 99, gen_random_uuid())"
    )

    assert causes(job_id) == ["effect_in_progress"]
    assert "job 99 has been at work on its idempotency key 'charge:7' for 0 s" in said(job_id)[0]


# Nobody to do it.


def test_no_worker_at_all_says_when_one_was_seen_last(queue, causes, said):
    queue.connection.execute("INSERT INTO pgqueue.tasks (name) VALUES ('send')")
    job_id = queue.enqueue()
    never = said(job_id)[0]
    queue.see_worker(["default"], silent_seconds=180)

    assert causes(job_id) == ["no_worker"]
    assert never.endswith("no live worker serves the queue 'default'; none has been seen for a day")
    assert said(job_id)[0].endswith("; the last one, on web-1, was seen 3 min ago")
    assert said(job_id)[1] == "  pgqueue worker --app MODULE:APP --queue default"


def test_workers_of_other_queues_do_not_count(served, causes, said):
    job_id = served.enqueue(queue="mail")

    assert causes(job_id) == ["no_worker"]
    assert "(live workers of other queues: 1)" in said(job_id)[0]


@pytest.mark.parametrize("last_seen", [None, "1 hour"])
def test_a_task_that_no_live_worker_knows_says_so(served, causes, said, last_seen):
    served.connection.execute(
        "UPDATE pgqueue.tasks SET seen_at = seen_at - %s::interval", [last_seen or "0 s"]
    )
    if last_seen is None:
        served.connection.execute("DELETE FROM pgqueue.tasks")
    job_id = served.enqueue()

    assert causes(job_id) == ["unknown_task"]
    assert ("one did 1 h ago" if last_seen else "none ever did") in said(job_id)[0]


def test_busy_workers_say_how_many_slots_and_how_many_jobs_are_before(served, causes, said):
    for _ in range(10):
        served.run()
    ahead, job_id = served.enqueue(), served.enqueue()

    assert causes(ahead) == causes(job_id) == ["workers_busy"]
    assert "all 10 slots of the 1 worker that serve the queue 'default' are taken" in said(job_id)[0]
    assert said(ahead)[0].endswith(" and is next")
    assert said(job_id)[0].endswith(", behind 1 job")


def test_a_job_whose_turn_has_not_come_says_how_many_come_first(served, causes, said):
    served.enqueue(), served.enqueue()
    job_id = served.enqueue()

    assert causes(job_id) == ["in_line"]
    assert "behind 2 jobs of the queue 'default'" in said(job_id)[0]


def test_a_job_that_nothing_keeps_says_so(served, causes):
    assert causes(served.enqueue()) == ["next"]


def test_a_read_only_database_comes_first(served, causes, fast_dsn, connect):
    job_id = served.enqueue()
    mine = connect(fast_dsn)
    mine.execute("SET default_transaction_read_only = on")

    codes = [cause.code for cause in diagnosis.why(mine, job_id).causes]

    assert codes[0] == "read_only"


# At work, and ended.


def test_a_running_job_says_where_and_until_when(served, causes, said):
    job_id = served.run()

    assert causes(job_id) == ["running"]
    assert (
        "(send) has been running for 0 s on web-1 (pid 42), last heartbeat 0 s ago; its deadline is in 5 min"
        in (said(job_id)[0])
    )


def test_an_expired_lease_says_that_nobody_took_the_job_back(served, causes):
    job_id = served.run()
    served.connection.execute("UPDATE pgqueue.jobs SET heartbeat_at = heartbeat_at - interval '1 min'")

    assert causes(job_id) == ["lease_expired"]


def test_a_job_past_its_deadline_says_so(served, causes):
    job_id = served.run()
    served.connection.execute("UPDATE pgqueue.jobs SET deadline_at = clock_timestamp() - interval '1 s'")

    assert causes(job_id) == ["overdue"]


def test_a_job_that_was_asked_to_stop_says_by_whom(served, causes, said, pgqueue, monkeypatch):
    monkeypatch.setenv("PGQUEUE_ACTOR", "ann@laptop")
    job_id = served.run()
    pgqueue("jobs", "cancel", job_id)

    assert causes(job_id) == ["cancel_requested"]
    assert "asked to stop 0 s ago by ann@laptop" in said(job_id)[0]


def test_a_dead_job_says_of_what_it_died_and_how_to_put_it_back(served, causes, said):
    job_id = served.bury("Traceback (most recent call last):\n  x\nValueError: no such user")

    assert causes(job_id) == ["dead"]
    assert said(job_id) == [
        f"job {job_id} (send) died 0 s ago at attempt 1 of 5: ValueError: no such user",
        f"  pgqueue dlq show {job_id}",
        f"  pgqueue dlq redrive {job_id}",
    ]


def test_a_cancelled_job_says_by_whom_and_why(served, causes, said, pgqueue, monkeypatch):
    monkeypatch.setenv("PGQUEUE_ACTOR", "ann@laptop")
    job_id = served.enqueue()
    pgqueue("jobs", "cancel", job_id, "--reason", "wrong customer")

    assert causes(job_id) == ["cancelled"]
    assert said(job_id)[0].endswith("(send) was cancelled 0 s ago by ann@laptop: wrong customer")


def test_a_job_that_succeeded_says_so(served, causes):
    assert causes(served.succeed()) == ["succeeded"]


# Several at once, and for programs.


def test_what_would_hold_it_up_next_follows(queue, causes, said):
    job_id = queue.enqueue(delay_seconds=60)
    queue.connection.execute("SELECT pgqueue.pause_queues(ARRAY['default'])")

    assert causes(job_id) == ["not_due", "queue_paused", "no_worker"]
    assert [line.startswith("also: ") for line in said(job_id) if line and not line.startswith(" ")] == [
        False,
        True,
        True,
    ]


def test_a_script_gets_codes_and_command_lines(served, pgqueue):
    job_id = served.enqueue(delay_seconds=60)

    document = pgqueue("jobs", "why", job_id, "--json").json

    assert (document["job_id"], document["state"]) == (job_id, "scheduled")
    assert document["causes"][0]["code"] == "not_due"
    assert document["causes"][0]["next"] == [f"pgqueue jobs retry {job_id}"]


def test_a_job_that_is_nowhere_is_an_error_of_one_line(pgqueue):
    ended = pgqueue("jobs", "why", 99)

    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "pgqueue: no job 99: it never existed, or its history is no longer kept\n"


def test_names_are_quoted_for_the_shell_and_harmless_for_the_terminal(queue, said):
    name = "a b\x1b[31m"
    job_id = queue.enqueue(queue=name, task="\x1b[31m")

    lines = said(job_id)

    assert all(line.isprintable() for line in lines)
    assert lines[1].endswith(r" --queue $'a b\x1b[31m'")


def test_a_queue_that_looks_like_an_option_is_not_taken_for_one(served, said):
    job_id = served.enqueue(queue="-x")
    served.connection.execute("SELECT pgqueue.pause_queues(ARRAY['-x'])")

    lines = said(job_id)

    assert lines[1] == "  pgqueue queues resume -- -x"
    assert "  pgqueue worker --app MODULE:APP --queue=-x" in lines
