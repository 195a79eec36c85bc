"""What an operator asks and does: every job named gets an answer, and no other is touched."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from pgqueue import admin
from pgqueue.admin import DeadFilter, Outcome
from pgqueue.database import Connection, connect
from pgqueue.errors import ConfigurationError, JobNotFound
from pgqueue.model.job import JobState

WORKER = "00000000-0000-4000-8000-000000000001"


@pytest.fixture
def connection(fast_dsn) -> Iterator[Connection]:
    with connect(fast_dsn) as opened:
        yield opened


def enqueue(connection, task="send", args=None, **parameters) -> int:
    names = "".join(f", {name} => %({name})s" for name in parameters)
    return connection.execute(
        f"SELECT pgqueue.enqueue(%(task)s, %(args)s::jsonb{names})",
        {"task": task, "args": json.dumps(args or {}), **parameters},
    ).fetchone()[0]


def claim(connection, queue="default", max_jobs=100):
    return connection.execute(
        "SELECT job_id, token FROM pgqueue.claim(%s, %s, %s)", [queue, WORKER, max_jobs]
    ).fetchall()


def succeed(connection, **parameters) -> int:
    job_id = enqueue(connection, **parameters)
    for claimed_id, token in claim(connection, parameters.get("queue", "default")):
        connection.execute(
            "SELECT pgqueue.complete(ARRAY[%s]::bigint[], ARRAY[%s]::uuid[])", [claimed_id, token]
        )
    return job_id


def bury(connection, reason="boom", **parameters) -> int:
    job_id = enqueue(connection, **parameters)
    kill(connection, reason, parameters.get("queue", "default"))
    return job_id


def kill(connection, reason="boom", queue="default") -> None:
    for job_id, token in claim(connection, queue):
        connection.execute("SELECT pgqueue.fail(%s, %s, %s, is_dead => true)", [job_id, token, reason])


def states(connection, *job_ids) -> list[str]:
    return [admin.show_job(connection, job_id).state for job_id in job_ids]


def redrive(connection, which, **parameters) -> list[Outcome]:
    _, until = admin.count_dead(connection, which)
    batches = admin.redrive(connection, which, until, **parameters)
    return [outcome for batch in batches for outcome in batch]


# Looking.


def test_jobs_are_listed_the_newest_first_wherever_they_are(connection):
    succeeded = succeed(connection)
    dead = bury(connection)
    ready = enqueue(connection)

    jobs = admin.list_jobs(connection)

    assert [(job.id, job.state) for job in jobs] == [
        (ready, "ready"),
        (dead, "dead"),
        (succeeded, "succeeded"),
    ]


def test_pages_show_each_job_once(connection):
    ids = [bury(connection) if n % 3 else enqueue(connection, queue="slow") for n in range(10)]

    pages, below_id = [], None
    while page := admin.list_jobs(connection, below_id=below_id, limit=3):
        pages.append([job.id for job in page])
        below_id = page[-1].id

    assert [job_id for page in pages for job_id in page] == sorted(ids, reverse=True)
    assert [len(page) for page in pages] == [3, 3, 3, 1]


def test_filters_narrow_the_list_together(connection):
    wanted = enqueue(connection, task="send", queue="mail")
    enqueue(connection, task="send", queue="other")
    enqueue(connection, task="resize", queue="mail")
    bury(connection, task="send", queue="mail2")

    jobs = admin.list_jobs(connection, states=[JobState.READY], queue="mail", task="send")

    assert [job.id for job in jobs] == [wanted]


def test_a_list_can_cut_long_arguments(connection):
    enqueue(connection, args={"text": "x" * 10_000})

    [job] = admin.list_jobs(connection, max_chars=20)

    assert job.args == '{"text": "xxxxxxxxxx'


def test_a_job_is_shown_wherever_it_is(connection):
    succeeded, dead, waiting = succeed(connection), bury(connection, "no such user"), enqueue(connection)

    shown = [admin.show_job(connection, job_id) for job_id in (succeeded, dead, waiting)]

    assert [job.state for job in shown] == ["succeeded", "dead", "ready"]
    assert [job.ended_at is None for job in shown] == [False, False, True]
    assert shown[1].reason == "no such user"
    assert json.loads(shown[1].errors)[0]["error"] == "no such user"


def test_a_job_that_is_nowhere_is_not_found(connection):
    with pytest.raises(JobNotFound) as caught:
        admin.show_job(connection, 4711)

    assert caught.value.job_id == 4711


def test_a_blocked_job_names_the_jobs_that_hold_its_key(connection):
    holder, waiting = (enqueue(connection, concurrency_key="tenant:1") for _ in range(2))
    claim(connection)

    shown = admin.show_job(connection, waiting)

    assert (shown.state, shown.concurrency_holders) == ("blocked", [holder])


def test_a_number_that_python_refuses_to_read_is_shown_as_it_is(connection):
    digits = "1" * 5_000
    connection.execute(
        "INSERT INTO pgqueue.jobs (task, args) VALUES ('send', %s::jsonb)", [f'{{"n": {digits}}}']
    )

    [job] = admin.list_jobs(connection)

    assert job.args == f'{{"n": {digits}}}'


def test_queues_are_counted_by_state(connection):
    enqueue(connection, queue="mail", delay_seconds=3600)
    for _ in range(2):
        enqueue(connection, queue="mail", concurrency_key="k")
    claim(connection, "mail")
    for _ in range(3):
        enqueue(connection, queue="mail")
    bury(connection, queue="other")

    mail, other = admin.list_queues(connection)

    assert (mail.queue, mail.ready, mail.scheduled, mail.blocked, mail.running, mail.dead) == (
        "mail",
        3,
        1,
        1,
        1,
        0,
    )
    assert (other.queue, other.ready, other.dead, other.oldest_ready_seconds) == ("other", 0, 1, None)
    assert not mail.lower_bounds


def test_counting_a_queue_stops_at_the_cap_and_says_so(connection):
    connection.execute(
        "INSERT INTO pgqueue.jobs (task, queue, run_at) SELECT 'send', q, clock_timestamp() + wait "
        "FROM generate_series(1, 25), (VALUES ('mail', '0'::interval), ('later', '1 day')) AS v (q, wait)"
    )

    later, mail = admin.list_queues(connection, count_cap=2)

    assert (mail.ready, later.scheduled) == (2, 2)
    assert "ready" in mail.lower_bounds
    assert "scheduled" in later.lower_bounds


def test_the_oldest_ready_job_is_found_behind_more_urgent_ones(connection):
    for priority, age in ((0, 10), (5, 3600), (9, 60)):
        connection.execute(
            "INSERT INTO pgqueue.jobs (task, priority, run_at) "
            "VALUES ('send', %s, clock_timestamp() - %s * interval '1 s')",
            [priority, age],
        )

    [queue] = admin.list_queues(connection)

    assert 3600 <= queue.oldest_ready_seconds < 3900


def test_a_queue_without_jobs_is_listed_if_somebody_named_it(connection):
    connection.execute("INSERT INTO pgqueue.queues (name, is_paused) VALUES ('paused', true)")
    connection.execute("INSERT INTO pgqueue.tasks (name, queue) VALUES ('send', 'mail')")
    see_worker(connection, queues=["served"])

    queues = {queue.queue: queue for queue in admin.list_queues(connection)}

    assert list(queues) == ["mail", "paused", "served"]
    assert queues["paused"].is_paused
    assert queues["served"].workers == 1


def test_a_worker_that_went_silent_serves_no_queue(connection):
    see_worker(connection, queues=["mail"], silent_seconds=3600)

    [worker] = admin.list_workers(connection)

    assert worker.is_silent
    assert admin.list_queues(connection) == []


def test_workers_are_listed_with_the_jobs_they_run(connection):
    see_worker(connection, queues=["default"])
    for _ in range(3):
        enqueue(connection)
    claim(connection, max_jobs=2)

    [worker] = admin.list_workers(connection)

    assert (str(worker.id), worker.running, worker.slots, worker.is_silent) == (WORKER, 2, 10, False)


def see_worker(connection, queues, silent_seconds=0) -> None:
    connection.execute(
        "INSERT INTO pgqueue.workers (id, host, pid, version, queues, slots, seen_at) "
        "VALUES (%s, 'web-1', 42, '0.1.0', %s, 10, clock_timestamp() - %s * interval '1 s')",
        [WORKER, queues, silent_seconds],
    )


# Cancelling.


def test_cancelling_says_what_became_of_each_job(connection):
    succeeded, dead = succeed(connection), bury(connection)
    running = enqueue(connection)
    claim(connection)
    scheduled = enqueue(connection, delay_seconds=3600)

    outcomes = admin.cancel(connection, [scheduled, running, succeeded, dead, 4711], "wrong customer")

    assert [(each.outcome, each.is_done) for each in outcomes] == [
        ("cancelled", True),
        ("requested", True),
        ("refused", False),
        ("refused", False),
        ("not_found", False),
    ]
    assert admin.show_job(connection, scheduled).reason == "wrong customer"
    assert admin.show_job(connection, running).cancel_requested_at is not None


def test_cancelling_twice_is_no_failure(connection):
    job_id = enqueue(connection)
    admin.cancel(connection, [job_id])

    [outcome] = admin.cancel(connection, [job_id])

    assert (outcome.outcome, outcome.is_done) == ("cancelled", True)


# Retrying.


def test_retrying_a_scheduled_job_lets_it_run_now(connection):
    job_id = enqueue(connection, delay_seconds=3600)

    [outcome] = admin.retry(connection, [job_id])

    assert outcome == Outcome(job_id, "ready", is_done=True)
    assert [claimed for claimed, _ in claim(connection)] == [job_id]


def test_retrying_wakes_a_worker_that_sleeps(connection, fast_dsn):
    job_id = enqueue(connection, queue="mail", delay_seconds=3600)
    with connect(fast_dsn) as worker:
        [channel] = worker.execute("SELECT pgqueue.bell_channel('mail')").fetchone()
        worker.execute(f'LISTEN "{channel}"')
        assert worker.execute("SELECT pgqueue.rest('mail', false)").fetchone() == ("asleep",)

        admin.retry(connection, [job_id])

        assert [note.channel for note in worker.notifies(timeout=10, stop_after=1)] == [channel]


def test_retrying_a_dead_job_keeps_its_history_and_gives_it_more_attempts(connection):
    job_id = bury(connection, "no such user")
    attempt = admin.show_job(connection, job_id).attempt

    [outcome] = admin.retry(connection, [job_id], extra_attempts=3)

    shown = admin.show_job(connection, job_id)
    assert (outcome.outcome, shown.state) == ("ready", "ready")
    assert shown.max_attempts == attempt + 3
    assert json.loads(shown.errors)[0]["error"] == "no such user"


def test_jobs_that_must_not_run_again_are_refused_with_the_reason(connection):
    succeeded, cancelled = succeed(connection), enqueue(connection)
    admin.cancel(connection, [cancelled])
    running, blocked = (enqueue(connection, concurrency_key="k") for _ in range(2))
    claim(connection)

    outcomes = admin.retry(connection, [succeeded, cancelled, running, blocked, 4711])

    assert [each.outcome for each in outcomes] == ["refused"] * 4 + ["not_found"]
    for each, word in zip(
        outcomes, ["succeeded", "cancelled", "running", "concurrency key", "history"], strict=True
    ):
        assert word in each.reason
    assert states(connection, succeeded, cancelled, running, blocked) == [
        "succeeded",
        "cancelled",
        "running",
        "blocked",
    ]


def test_a_job_in_the_line_of_its_rate_limit_does_not_jump_it(connection):
    job_id = enqueue(connection, delay_seconds=3600)
    connection.execute(
        "UPDATE pgqueue.jobs SET rate_key = 'smtp', rate_parked_at = clock_timestamp() WHERE id = %s",
        [job_id],
    )

    [outcome] = admin.retry(connection, [job_id])

    assert (outcome.outcome, states(connection, job_id)) == ("refused", ["scheduled"])
    assert "rate limit" in outcome.reason


# Dead jobs.


def test_only_what_matches_every_filter_is_redriven(connection):
    wanted = bury(connection, "ConnectionRefused: smtp", queue="mail")
    others = [bury(connection, "ConnectionRefused: smtp"), bury(connection, "no such user", queue="mail")]

    outcomes = redrive(connection, DeadFilter(queue="mail", reason="connectionrefused"))

    assert outcomes == [Outcome(wanted, "ready", is_done=True)]
    assert states(connection, wanted, *others) == ["ready", "dead", "dead"]


def test_the_age_filter_leaves_what_died_lately(connection):
    old, new = bury(connection), bury(connection)
    connection.execute("UPDATE pgqueue.dead_jobs SET died_at = died_at - interval '2 h' WHERE id = %s", [old])

    redrive(connection, DeadFilter(older_than_seconds=3600))

    assert states(connection, old, new) == ["ready", "dead"]


def test_a_percent_sign_in_the_reason_is_only_a_percent_sign(connection):
    wanted, other = bury(connection, "disk 100% full"), bury(connection, "disk 100 times full")

    redrive(connection, DeadFilter(reason="100% full"))

    assert states(connection, wanted, other) == ["ready", "dead"]


def test_a_taken_unique_key_is_the_outcome_of_its_row_alone(connection):
    taken = bury(connection, unique_key="user:1")
    enqueue(connection, unique_key="user:1", queue="elsewhere")
    free = bury(connection, unique_key="user:2")

    outcomes = redrive(connection, DeadFilter())

    assert [(each.job_id, each.outcome) for each in outcomes] == [
        (taken, "unique_key_taken"),
        (free, "ready"),
    ]
    assert states(connection, taken, free) == ["dead", "ready"]


def test_ids_that_are_not_dead_are_reported(connection):
    dead, alive = bury(connection), enqueue(connection, queue="elsewhere")

    outcomes = redrive(connection, DeadFilter(job_ids=[alive, dead, 4711]))

    assert {each.job_id: each.outcome for each in outcomes} == {
        dead: "ready",
        alive: "not_found",
        4711: "not_found",
    }


def test_a_job_that_dies_again_during_the_run_is_not_tried_twice(connection):
    ids = [bury(connection) for _ in range(6)]
    which = DeadFilter()
    _, until = admin.count_dead(connection, which)

    tried = []
    for batch in admin.redrive(connection, which, until, per_second=1000):
        tried += [each.job_id for each in batch]
        kill(connection, "boom again")

    assert tried == ids
    assert states(connection, *ids) == ["dead"] * 6


def test_two_redrives_at_once_put_each_job_back_once(connection, fast_dsn):
    ids = [bury(connection) for _ in range(40)]
    outcomes, start = [], threading.Barrier(2)

    def one() -> None:
        with connect(fast_dsn) as mine:
            start.wait()
            outcomes.extend(redrive(mine, DeadFilter(job_ids=ids)))

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(each.job_id for each in outcomes if each.outcome == "ready") == ids
    assert len(outcomes) == 80
    assert connection.execute("SELECT count(*) FROM pgqueue.jobs").fetchone() == (40,)


def test_a_rate_spreads_the_work_over_time(connection):
    for _ in range(5):
        bury(connection)
    started_at = time.monotonic()

    outcomes = redrive(connection, DeadFilter(), per_second=10)

    # Batches of two at 0, 0.2 and 0.4 s.
    assert len(outcomes) == 5
    assert time.monotonic() - started_at >= 0.4


def test_a_rate_below_one_a_second_goes_one_by_one(connection):
    ids = [bury(connection) for _ in range(3)]
    which = DeadFilter()
    _, until = admin.count_dead(connection, which)

    first = next(admin.redrive(connection, which, until, per_second=0.5))

    assert [each.job_id for each in first] == ids[:1]
    assert states(connection, *ids) == ["ready", "dead", "dead"]


def test_purging_deletes_what_matches_and_had_died_when_it_was_counted(connection):
    wanted, other = bury(connection, queue="mail"), bury(connection)
    count, until = admin.count_dead(connection, DeadFilter(queue="mail"))
    later = bury(connection, queue="mail")

    deleted = [
        job_id for batch in admin.purge_dead(connection, DeadFilter(queue="mail"), until) for job_id in batch
    ]

    assert (count, deleted) == (1, [wanted])
    assert states(connection, other, later) == ["dead", "dead"]
    with pytest.raises(JobNotFound):
        admin.show_job(connection, wanted)


def test_purging_leaves_a_job_that_somebody_is_putting_back(connection, fast_dsn):
    job_id = bury(connection)
    _, until = admin.count_dead(connection, DeadFilter())
    with connect(fast_dsn, autocommit=False) as other:
        other.execute("SELECT pgqueue.redrive(ARRAY[%s]::bigint[])", [job_id])

        deleted = list(admin.purge_dead(connection, DeadFilter(), until))

        other.commit()
    assert deleted == [[]]
    assert states(connection, job_id) == ["ready"]


def test_dead_jobs_are_listed_the_latest_first(connection):
    for _ in range(4):
        bury(connection)

    dead = admin.list_dead(connection)

    assert len(dead) == 4
    assert all(later.died_at >= earlier.died_at for later, earlier in pairwise(dead))


# What is given.


@pytest.mark.parametrize("job_ids", ["1", b"1", 1])
def test_one_text_or_number_is_not_taken_for_a_list_of_ids(connection, job_ids):
    job_id = enqueue(connection)
    refused = rf"job_ids must be a list of ids, not {job_ids!r}"

    for call in (admin.cancel, admin.retry):
        with pytest.raises(ConfigurationError, match=refused):
            call(connection, job_ids)
    with pytest.raises(ConfigurationError, match=refused):
        DeadFilter(job_ids=job_ids)

    assert admin.show_job(connection, job_id).state == JobState.READY


def test_ids_that_come_one_by_one_are_all_heard(connection):
    job_id = enqueue(connection)

    outcomes = admin.cancel(connection, iter([job_id]))

    assert [one.job_id for one in outcomes] == [job_id]


def test_one_state_is_not_taken_for_the_list_of_its_letters(connection):
    with pytest.raises(ConfigurationError, match="states must be a list of states, not 'ready'"):
        admin.list_jobs(connection, states="ready")
    with pytest.raises(ConfigurationError, match="states must be a list of states, not 'ready'"):
        admin.LiveFilter(states="ready")
