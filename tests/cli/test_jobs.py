"""`pgqueue jobs`: what a person reads about a job, and what a script gets."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime

import pytest

from pgqueue import admin
from tests.support import PROGRAM

ESCAPE = "\x1b[31mred"


def test_the_list_shows_where_each_job_stands(pgqueue, queue):
    dead = queue.bury("no such user", queue="mail", args={"user_id": 1})
    ready = queue.enqueue("resize", {"path": "a.png"})

    ended = pgqueue("jobs", "list")

    assert ended.code == 0
    assert ended.rows == [
        f'{ready} ready 0 s ago default resize 0/5 {{"path": "a.png"}}',
        f'{dead} dead 0 s ago mail send 1/5 no such user {{"user_id": 1}}',
    ]


def test_columns_are_aligned_and_numbers_stand_at_the_right(pgqueue, queue):
    queue.connection.execute("ALTER SEQUENCE pgqueue.jobs_id_seq RESTART WITH 8")
    for _ in range(3):
        queue.enqueue(queue="a" * queue.enqueue(queue="b"))

    lines = pgqueue("jobs", "list").out.splitlines()

    assert len({line.index(" ready ") for line in lines[1:]}) == 1
    assert len({line.index(" send ") for line in lines[1:]} | {lines[0].index(" TASK ")}) == 1
    assert lines[-1].startswith(" 8")


def test_an_empty_list_says_so_on_stderr(pgqueue):
    ended = pgqueue("jobs", "list")

    assert (ended.code, ended.out, ended.err) == (0, "", "no jobs\n")


def test_states_can_be_combined_and_live_means_all_that_wait_or_run(pgqueue, queue):
    dead, done = queue.bury(), queue.succeed()
    waiting, scheduled = queue.enqueue(), queue.enqueue(delay_seconds=60)

    live = pgqueue("jobs", "list", "--state", "live")
    ended = pgqueue("jobs", "list", "--state", "dead", "--state", "succeeded")

    assert live.ids == [scheduled, waiting]
    assert ended.ids == [done, dead]


def test_an_unknown_state_is_a_usage_error_that_names_the_known_ones(pgqueue):
    ended = pgqueue("jobs", "list", "--state", "done")

    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert "'succeeded'" in ended.err


def test_a_full_page_says_how_to_go_on(pgqueue, queue):
    ids = [queue.enqueue() for _ in range(3)]

    first = pgqueue("jobs", "list", "--limit", 2)
    second = pgqueue("jobs", "list", "--limit", 2, "--after", ids[1])

    assert first.err == f"there are more: --after {ids[1]}\n"
    assert second.ids == [ids[0]]
    assert second.err == ""


def test_a_script_gets_one_document_with_whole_arguments_and_utc_times(pgqueue, queue):
    job_id = queue.enqueue(args={"text": "x" * 1000})

    document = pgqueue("jobs", "list", "--json").json

    [job] = document["jobs"]
    assert (job["id"], job["args"], document["after"]) == (job_id, {"text": "x" * 1000}, None)
    assert job["created_at"].endswith("Z")
    assert datetime.fromisoformat(job["created_at"]).tzinfo == UTC


def test_the_next_page_of_a_script_starts_at_after(pgqueue, queue):
    ids = [queue.enqueue() for _ in range(3)]

    document = pgqueue("jobs", "list", "--json", "--limit", 1).json

    assert document["after"] == ids[2]


def test_nothing_out_of_the_database_reaches_the_terminal_as_a_command(pgqueue, queue):
    job_id = queue.bury(ESCAPE, task=ESCAPE, args={"\x9b31m": ESCAPE})

    ended = [pgqueue("jobs", "list"), pgqueue("jobs", "show", job_id), pgqueue("jobs", "list", "--json")]

    for each in ended:
        assert all(character.isprintable() or character == "\n" for character in each.out)
    assert ended[2].json["jobs"][0]["task"] == ESCAPE


def test_wide_characters_do_not_shift_the_columns(pgqueue, queue):
    queue.enqueue("日本語")
    queue.enqueue("send")

    lines = pgqueue("jobs", "list").out.splitlines()

    # Each of the three takes two places.
    assert lines[2].index("0/5") + 3 == lines[1].index("0/5")


def test_a_dead_job_is_shown_with_its_errors_and_what_led_to_them(pgqueue, queue):
    traceback = 'Traceback (most recent call last):\n  File "mail.py", line 3\nValueError: no such user'
    job_id = queue.bury(traceback, args={"user_id": 7}, queue="mail", unique_key="user:7")

    out = pgqueue("jobs", "show", job_id).out

    assert out.startswith(f"job {job_id} died 0 s ago: ValueError: no such user\n")
    assert "attempts    1 of 5" in out
    assert "unique key  user:7" in out
    assert '"user_id": 7' in out
    assert '    File "mail.py", line 3\n    ValueError: no such user\n' in out


def test_a_running_job_is_shown_with_its_worker_and_its_lease(pgqueue, queue):
    queue.see_worker(["default"])
    job_id = queue.run()

    out = pgqueue("jobs", "show", job_id).out
    pgqueue("jobs", "cancel", job_id)
    asked = pgqueue("jobs", "show", job_id).out

    assert out.startswith(f"job {job_id} has been running for 0 s on web-1 (pid 42)\n")
    assert "lease ends" in out
    assert "on web-1 (pid 42) and was asked to stop 0 s ago\n" in asked


def test_a_waiting_job_says_what_it_waits_for(pgqueue, queue):
    queue.connection.execute("INSERT INTO pgqueue.queues (name, is_paused) VALUES ('paused', true)")
    holder, blocked = (queue.enqueue(concurrency_key="tenant:1") for _ in range(2))
    queue.claim()
    scheduled, paused = queue.enqueue(delay_seconds=300), queue.enqueue(queue="paused")
    limited = queue.enqueue(delay_seconds=300)
    queue.connection.execute(
        "UPDATE pgqueue.jobs SET rate_key = 'smtp', rate_parked_at = run_at WHERE id = %s", [limited]
    )

    first_lines = [
        pgqueue("jobs", "show", job_id).out.splitlines()[0]
        for job_id in (blocked, scheduled, paused, limited)
    ]

    assert first_lines == [
        f"job {blocked} is blocked: its concurrency key 'tenant:1' is held by {holder}",
        f"job {scheduled} is scheduled and runs in 5 min",
        f"job {paused} is ready, but the queue 'paused' is paused",
        f"job {limited} waits for its rate limit 'smtp'",
    ]


def test_a_job_says_how_long_its_queue_is_paused_and_why_or_that_nothing_may_start(pgqueue, queue):
    paused, stopped, limited = (queue.enqueue(queue=name) for name in ("paused", "stopped", "limited"))
    pgqueue("queues", "pause", "paused", "--for", "30m", "--reason", "deploy")
    pgqueue("queues", "limit", "stopped", 0, "--reason", "broken")
    pgqueue("queues", "limit", "limited", 3)

    shown = [pgqueue("jobs", "show", job_id).out for job_id in (paused, stopped, limited)]

    assert [out.splitlines()[0] for out in shown] == [
        f"job {paused} is ready, but the queue 'paused' is paused for another 30 min: deploy",
        f"job {stopped} is ready, but the queue 'stopped' may start nothing: broken",
        f"job {limited} is ready and has waited 0 s for a worker",
    ]
    assert "limited (at most 3 of its jobs run at a time)" in shown[2]


def test_a_succeeded_job_is_shown_with_its_result(pgqueue, queue):
    job_id = queue.succeed('{"sent": true}')

    ended = pgqueue("jobs", "show", job_id)

    assert ended.out.startswith(f"job {job_id} succeeded 0 s ago\n")
    assert 'result\n  {\n    "sent": true\n  }\n' in ended.out


def test_a_script_gets_all_of_a_job(pgqueue, queue):
    job_id = queue.fail("boom", args={"n": 1}, headers=json.dumps({"trace": "abc"}))

    job = pgqueue("jobs", "show", job_id, "--json").json

    assert (job["state"], job["args"], job["headers"]) == ("scheduled", {"n": 1}, {"trace": "abc"})
    assert [error["error"] for error in job["errors"]] == ["boom"]


def test_errors_that_somebody_else_wrote_are_shown_as_they_are(pgqueue, queue):
    job_id = queue.enqueue()
    queue.connection.execute("UPDATE pgqueue.jobs SET errors = '[\"odd\"]' WHERE id = %s", [job_id])

    ended = pgqueue("jobs", "show", job_id)

    assert ended.code == 0
    assert '"odd"' in ended.out


def test_a_number_that_python_refuses_to_read_is_shown(pgqueue, queue):
    digits = "1" * 5_000
    queue.connection.execute(
        "INSERT INTO pgqueue.jobs (task, args) VALUES ('send', %s::jsonb)", [f'{{"n": {digits}}}']
    )

    ended = [
        pgqueue("jobs", "show", 1),
        pgqueue("jobs", "show", 1, "--json"),
        pgqueue("jobs", "list", "--json"),
    ]

    assert all(each.code == 0 and digits in each.out for each in ended)


def test_a_job_that_is_nowhere_is_one_line_and_exit_1(pgqueue):
    ended = pgqueue("jobs", "show", 4711)

    assert ended.code == 1
    assert ended.err == "pgqueue: no job 4711: it never existed, or its history is no longer kept\n"


def test_what_is_no_job_id_is_refused(pgqueue):
    for argument in ("abc", "0", "99999999999999999999"):
        ended = pgqueue("jobs", "show", argument)

        assert ended.code == 2
        assert "is not a job id" in ended.err


def test_cancel_tells_each_job_and_fails_if_one_could_not_be(pgqueue, queue):
    waiting = queue.enqueue(delay_seconds=60)
    done = queue.succeed()

    good, mixed = pgqueue("jobs", "cancel", waiting), pgqueue("jobs", "cancel", waiting, done, 4711)

    assert (good.code, good.rows) == (0, [f"{waiting} cancelled"])
    assert mixed.code == 1
    assert mixed.rows == [
        f"{waiting} cancelled it was cancelled before",
        f"{done} refused it succeeded already",
        "4711 not_found it never existed, or its history is no longer kept",
    ]


def test_cancel_keeps_the_reason(pgqueue, queue):
    job_id = queue.enqueue()

    pgqueue("jobs", "cancel", job_id, "--reason", "wrong customer")

    assert pgqueue("jobs", "show", job_id).out.startswith(
        f"job {job_id} was cancelled 0 s ago: wrong customer\n"
    )


def test_retry_lets_jobs_run_and_refuses_the_others(pgqueue, queue):
    done, dead, running = queue.succeed(), queue.bury(), queue.run()
    scheduled = queue.enqueue(delay_seconds=60)

    ended = pgqueue("jobs", "retry", scheduled, dead, done, running, "--json")

    assert ended.code == 1
    assert {each["job_id"]: each["outcome"] for each in ended.json} == {
        scheduled: "ready",
        dead: "ready",
        done: "refused",
        running: "refused",
    }


# Cancelling by a filter.


@pytest.fixture
def runaway(queue):
    """Jobs of a task that went wild, in each state, and one of another task."""
    queue.run(task="wild", queue="a")
    queue.enqueue("wild", queue="a", delay_seconds=60)
    for _ in range(2):
        queue.enqueue("wild", queue="b")
    queue.enqueue("tame", queue="b")
    return queue


def states_of(queue, task):
    return dict(
        queue.connection.execute(
            "SELECT state, count(*) FROM pgqueue.jobs WHERE task = %s GROUP BY 1", [task]
        ).fetchall()
    )


def test_jobs_that_match_are_counted_and_then_cancelled(pgqueue, runaway):
    counted = pgqueue("jobs", "cancel", "--task", "wild", "--dry-run")
    ended = pgqueue("jobs", "cancel", "--task", "wild", "--yes", "--reason", "runaway")

    assert counted.out == "4 jobs (1 scheduled, 2 ready, 1 running) would be cancelled\n"
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == "cancelled 3 jobs\nasked 1 running job to stop\n"
    assert (states_of(runaway, "wild"), states_of(runaway, "tame")) == ({"running": 1}, {"ready": 1})
    assert runaway.one("SELECT DISTINCT reason FROM pgqueue.finished_jobs") == "runaway"


def test_every_filter_narrows_it_down(pgqueue, runaway):
    runaway.connection.execute(
        "UPDATE pgqueue.jobs SET created_at = clock_timestamp() - interval '2 h' WHERE id = 3"
    )

    def matching(*filters):
        return pgqueue("jobs", "cancel", *filters, "--dry-run", "--json").json

    assert matching("--queue", "b") == {"matching": 3, "states": {"ready": 3}}
    assert matching("--queue", "b", "--task", "wild")["matching"] == 2
    assert matching("--state", "running", "--state", "scheduled")["matching"] == 2
    assert matching("--state", "live")["matching"] == 5
    assert matching("--state", "ready", "--older-than", "1h")["matching"] == 1
    assert matching("--task", "nobody") == {"matching": 0, "states": {}}


def test_nobody_is_asked_where_nobody_can_answer(pgqueue, runaway):
    ended = pgqueue("jobs", "cancel", "--task", "wild", stdin="y\n")

    assert ended.code == 2
    assert (
        "4 jobs (1 scheduled, 2 ready, 1 running) match; to cancel them without being asked, add --yes"
        in ended.err
    )
    assert sum(states_of(runaway, "wild").values()) == 4


@pytest.mark.parametrize(("answer", "code", "left"), [("n\n", 1, 2), ("y\n", 0, 0)])
def test_a_person_is_asked_at_the_terminal(runaway, answer, code, left):
    """A real terminal: what it shows comes back with what is typed."""
    controller, terminal = os.openpty()
    command = [*PROGRAM, "jobs", "cancel", "--task", "wild", "--state", "ready"]
    with subprocess.Popen(
        command,
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PGQUEUE_DSN": runaway.dsn},
    ) as process:
        os.write(controller, answer.encode())
        _, err = process.communicate(timeout=120)
    os.close(controller)
    os.close(terminal)

    assert err.startswith("Cancel 2 jobs (2 ready)? [y/N]: ")
    assert process.returncode == code
    assert states_of(runaway, "wild").get("ready", 0) == left


def test_what_is_enqueued_during_the_run_is_left_alone(pgqueue, queue, monkeypatch):
    monkeypatch.setattr(admin, "BATCH", 2)
    for _ in range(5):
        queue.enqueue()
    counts, until = admin.count_live(queue.connection, admin.LiveFilter(states=["ready"]))
    later = queue.enqueue()

    batches = list(admin.cancel_matching(queue.connection, admin.LiveFilter(states=["ready"]), until))

    assert counts == {"ready": 5}
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert queue.one("SELECT array_agg(id) FROM pgqueue.jobs") == [later]


def test_ids_and_filters_exclude_each_other(pgqueue):
    for arguments in (["5", "--task", "wild"], ["5", "--dry-run"], ["--yes"]):
        assert pgqueue("jobs", "cancel", *arguments).code == 2, arguments


def test_jobs_to_act_on_must_be_named(pgqueue):
    retried, cancelled = pgqueue("jobs", "retry"), pgqueue("jobs", "cancel")

    assert (retried.code, cancelled.code) == (2, 2)
    assert retried.err.startswith("pgqueue: missing argument")
    assert cancelled.err.startswith("pgqueue: which jobs? give ids, or filters")


def test_a_job_that_waits_for_a_rate_limit_or_a_breaker_has_no_time(pgqueue, queue):
    queue.connection.execute("SELECT pgqueue.rate_set('task:send', 0.0003)")
    queue.enqueue()
    limited = queue.enqueue()
    queue.claim()
    queue.connection.execute("INSERT INTO pgqueue.breakers (name) VALUES ('bank')")
    queue.connection.execute("SELECT pgqueue.breaker_open('bank', 900)")
    held = queue.enqueue(task="charge")
    [(_, token)] = queue.claim()
    queue.connection.execute(
        "SELECT pgqueue.breaker_park(ARRAY[%s]::bigint[], ARRAY[%s]::uuid[], 'bank')", [held, token]
    )
    later = queue.enqueue(task="charge", delay_seconds=3600)

    listed, shown = pgqueue("jobs", "list", "--state", "scheduled"), pgqueue("jobs", "show", limited)
    document = pgqueue("jobs", "list", "--state", "scheduled", "--json").json

    assert listed.rows == [
        f"{later} scheduled in 1 h default charge 0/5 {{}}",
        f"{held} scheduled breaker default charge 0/5 {{}}",
        f"{limited} scheduled rate limit default send 0/5 {{}}",
    ]
    assert [job["waits_for"] for job in document["jobs"]] == [None, "breaker", "rate_limit"]
    assert "\ndue       rate limit\n" in shown.out
    assert "\ndue       breaker\n" in pgqueue("jobs", "show", held).out


def test_whoever_gives_ids_and_filters_is_told_to_leave_one_out(pgqueue, queue):
    job_id = queue.enqueue(queue="mail")

    ended = pgqueue("jobs", "cancel", job_id, "--queue", "mail")

    assert ended.code == 2
    assert ended.err.startswith("pgqueue: either ids or filters: ids name the jobs already")
    assert queue.one("SELECT count(*) FROM pgqueue.jobs") == 1
