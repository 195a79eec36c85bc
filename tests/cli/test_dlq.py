"""`pgqueue dlq`: dead jobs come back or go for good, and never more of them than was meant."""

from __future__ import annotations

import pytest


def states(queue, *job_ids):
    live = dict(queue.connection.execute("SELECT id, state FROM pgqueue.jobs").fetchall())
    dead = {job_id for (job_id,) in queue.connection.execute("SELECT id FROM pgqueue.dead_jobs")}
    return ["dead" if job_id in dead else live.get(job_id, "gone") for job_id in job_ids]


def test_the_list_shows_the_last_line_of_a_traceback(pgqueue, queue):
    job_id = queue.bury(
        "Traceback (most recent call last):\n  File 'a.py'\nValueError: no such user\n", queue="mail"
    )

    ended = pgqueue("dlq", "list")

    assert ended.rows == [f"{job_id} 0 s ago mail send 1/5 ValueError: no such user"]


def test_the_list_can_be_narrowed(pgqueue, queue):
    wanted = queue.bury("Connection refused", queue="mail", task="send")
    queue.bury("Connection refused", queue="mail", task="resize")
    queue.bury("no such user", queue="mail", task="send")

    ended = pgqueue("dlq", "list", "-q", "mail", "-t", "send", "--reason", "REFUSED", "--json")

    assert [job["id"] for job in ended.json] == [wanted]


def test_no_dead_jobs_is_good_news_on_stderr(pgqueue):
    ended = pgqueue("dlq", "list")

    assert (ended.code, ended.out, ended.err) == (0, "", "no dead jobs\n")


def test_show_refuses_a_job_that_is_not_dead(pgqueue, queue):
    dead, alive = queue.bury("boom"), queue.enqueue()

    shown, refused = pgqueue("dlq", "show", dead), pgqueue("dlq", "show", alive)

    assert shown.out.startswith(f"job {dead} died 0 s ago: boom\n")
    assert f"pgqueue dlq redrive {dead}" in shown.err
    assert (refused.code, refused.out) == (1, "")
    assert refused.err == f"pgqueue: job {alive} is not dead but ready; see: pgqueue jobs show {alive}\n"


@pytest.mark.parametrize("command", ["redrive", "purge"])
def test_nothing_happens_to_jobs_that_nobody_named(pgqueue, queue, command):
    job_id = queue.bury()

    ended = pgqueue("dlq", command)

    assert ended.code == 2
    assert "give ids, a filter, or --all" in ended.err
    assert states(queue, job_id) == ["dead"]


@pytest.mark.parametrize("command", ["redrive", "purge"])
def test_all_together_with_a_filter_is_refused(pgqueue, queue, command):
    job_id = queue.bury()

    ended = pgqueue("dlq", command, "--all", "--queue", "mail")

    assert ended.code == 2
    assert states(queue, job_id) == ["dead"]


@pytest.mark.parametrize("command", ["redrive", "purge"])
def test_a_dry_run_counts_and_changes_nothing(pgqueue, queue, command):
    ids = [queue.bury(queue="mail") for _ in range(2)] + [queue.bury()]

    told = pgqueue("dlq", command, "--queue", "mail", "--dry-run")
    counted = pgqueue("dlq", command, "--all", "--dry-run", "--json")

    assert told.out.startswith("2 dead jobs would be ")
    assert counted.json == {"matching": 3}
    assert states(queue, *ids) == ["dead"] * 3


def test_redrive_reports_each_id(pgqueue, queue):
    dead, taken = queue.bury(), queue.bury(unique_key="user:1")
    queue.enqueue(unique_key="user:1", queue="elsewhere")

    ended = pgqueue("dlq", "redrive", dead, taken, 4711)

    assert ended.code == 1
    assert ended.rows == [
        f"{dead} ready",
        f"{taken} unique_key_taken a live job holds its unique key; try again when that one has ended",
        "4711 not_found it is not among these dead jobs",
    ]
    assert ended.err == "put back 1 job; 1 unique key taken; 1 not found\n"
    assert states(queue, dead, taken) == ["ready", "dead"]


def test_a_redrive_by_filter_lists_only_what_stayed_dead(pgqueue, queue):
    for _ in range(3):
        queue.bury()
    taken = queue.bury(unique_key="user:1")
    queue.enqueue(unique_key="user:1", queue="elsewhere")

    ended = pgqueue("dlq", "redrive", "--all")

    assert ended.code == 1
    assert ended.ids == [taken]
    assert ended.err.startswith("put back 3 jobs; ")


def test_a_redrive_for_a_script_lists_every_job(pgqueue, queue):
    ids = [queue.bury() for _ in range(3)]

    ended = pgqueue("dlq", "redrive", "--all", "--json", "--rate", 1000)

    assert ended.code == 0
    assert [(each["job_id"], each["outcome"]) for each in ended.json] == [(job_id, "ready") for job_id in ids]


def test_a_redriven_job_gets_the_attempts_asked_for(pgqueue, queue):
    job_id = queue.bury()

    pgqueue("dlq", "redrive", job_id, "--attempts", 1)

    assert queue.one("SELECT max_attempts - attempt FROM pgqueue.jobs WHERE id = %s", job_id) == 1


def test_only_old_ones_are_purged_if_an_age_is_given(pgqueue, queue):
    old, new = queue.bury(), queue.bury()
    queue.connection.execute(
        "UPDATE pgqueue.dead_jobs SET died_at = died_at - interval '8 d' WHERE id = %s", [old]
    )

    ended = pgqueue("dlq", "purge", "--older-than", "7d", "--yes")

    assert (ended.code, ended.err) == (0, "deleted 1 dead job\n")
    assert states(queue, old, new) == ["gone", "dead"]


def test_an_age_that_is_none_is_refused(pgqueue):
    ended = pgqueue("dlq", "purge", "--older-than", "a week", "--yes")

    assert ended.code == 2
    assert "'a week' is not a length of time" in ended.err


@pytest.mark.parametrize(
    ("answer", "code", "state"), [("y\n", 0, "gone"), ("n\n", 1, "dead"), ("", 1, "dead")]
)
def test_purge_asks_before_it_deletes(pgqueue, queue, answer, code, state):
    job_id = queue.bury()

    ended = pgqueue("dlq", "purge", "--all", stdin=answer)

    assert ended.code == code
    assert "Delete 1 dead job for good?" in ended.err
    assert states(queue, job_id) == [state]


def test_purge_fails_if_a_named_job_was_not_there(pgqueue, queue):
    job_id = queue.bury()

    ended = pgqueue("dlq", "purge", job_id, 4711, "--yes", "--json")

    assert (ended.code, ended.json) == (1, {"deleted": 1, "missing": [4711]})


@pytest.mark.parametrize("rate", ["nan", "inf", "-inf", "0", "1e-300"])
def test_a_rate_that_is_none_is_refused(pgqueue, queue, rate):
    queue.bury()

    ended = pgqueue("dlq", "redrive", "--all", "--rate", rate)

    assert ended.code == 2
    assert "'--rate'" in ended.err
    assert queue.one("SELECT count(*) FROM pgqueue.dead_jobs") == 1
