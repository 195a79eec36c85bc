"""`pgqueue queues`: at a glance, what waits where and whether anybody works on it."""

from __future__ import annotations

import pytest


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


# Holding queues back.


def test_a_paused_queue_says_until_when_and_why(pgqueue, queue):
    queue.enqueue(queue="mail")
    queue.enqueue(queue="web")

    paused = pgqueue("queues", "pause", "mail", "web", "--for", "30m", "--reason", "provider is down")
    resumed = pgqueue("queues", "resume", "web")

    mail, web = pgqueue("queues", "list").rows
    assert (paused.code, paused.out, paused.err) == (0, "", "paused mail\npaused web\n")
    assert resumed.err == "resumed web\n"
    assert mail.endswith("paused for another 30 min: provider is down")
    assert web.endswith(" 0 no worker")
    assert queue.claim("mail") == []


def test_a_pause_that_is_over_is_none(pgqueue, queue):
    pgqueue("queues", "pause", "mail", "--for", "1h", "--force")
    queue.connection.execute("UPDATE pgqueue.queues SET paused_until = clock_timestamp()")

    (mail,) = pgqueue("queues", "list", "--json").json

    assert (mail["is_paused"], mail["max_running"]) == (False, None)


def test_a_pause_can_have_an_end_with_a_time_zone(pgqueue, queue):
    done = pgqueue("queues", "pause", "mail", "--force", "--until", "2030-01-31T14:00:00+07:00")
    naive = pgqueue("queues", "pause", "mail", "--until", "2030-01-31T14:00:00")

    (mail,) = pgqueue("queues", "list", "--json").json
    assert (done.code, mail["paused_until"]) == (0, "2030-01-31T07:00:00Z")
    assert naive.code == 2
    assert "has no time zone" in naive.err


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (["--for", "0"], "seconds must be above 0"),
        (["--until", "2020-01-01T00:00:00Z"], "a pause until 2020-01-01 00:00:00 UTC would be over already"),
    ],
)
@pytest.mark.parametrize("which", ["mail", "--all"])
def test_a_pause_that_would_be_over_already_is_refused(pgqueue, queue, which, end, said):
    queue.enqueue(queue="mail")

    ended = pgqueue("queues", "pause", which, *end)

    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"pgqueue: {said}")
    assert queue.one("SELECT count(*) FROM pgqueue.queues") == 0


def test_all_queues_are_paused_and_resumed_one_job_at_a_time(pgqueue, queue):
    queue.see_worker(["idle"])
    for _ in range(2):
        queue.enqueue(queue="mail")

    paused = pgqueue("queues", "pause", "--all", "--json")
    resumed = pgqueue("queues", "resume", "--all", "--slots", 1)
    claimed = [queue.claim("mail") for _ in range(2)]

    assert paused.json == {"queues": ["idle", "mail"]}
    assert resumed.err == "resumed idle\nresumed mail\n"
    assert [len(each) for each in claimed] == [1, 0]
    assert pgqueue("queues", "list").rows[1].startswith("mail 1 0 0 1/1 0 ")


def test_a_runaway_leaves_the_pauses_and_limits_of_others_as_they_were(pgqueue, queue):
    for name in ("mail", "reports", "web"):
        queue.enqueue(queue=name)
    pgqueue("queues", "pause", "mail", "--for", "8h", "--reason", "provider is down until tomorrow")
    pgqueue("queues", "limit", "reports", "3")

    paused = pgqueue("queues", "pause", "--all", "--reason", "runaway")
    refused = pgqueue("queues", "resume", "--all", "--slots", "1")
    resumed = pgqueue("queues", "resume", "--all", "--reason", "runaway", "--slots", "1")

    assert paused.err == (
        "paused reports\npaused web\nmail stays paused for another 8 h: provider is down until tomorrow\n"
    )
    assert (refused.code, refused.err) == (
        1,
        (
            "pgqueue: not all are paused for the same reason: mail (provider is down until tomorrow), "
            "reports and 1 more (runaway); say which with --reason, or all with --force\n"
        ),
    )
    assert resumed.err == (
        "resumed reports\nresumed web\nmail stays paused for another 8 h: provider is down until tomorrow\n"
    )
    mail, reports, web = pgqueue("queues", "list").rows
    assert mail.endswith("paused for another 8 h: provider is down until tomorrow")
    assert reports.startswith("reports 1 0 0 0/3 ")
    assert web.startswith("web 1 0 0 0/1 ")


def test_pauses_without_a_reason_can_be_told_from_the_others(pgqueue, queue):
    pgqueue("queues", "pause", "mail", "--reason", "provider is down", "--force")
    pgqueue("queues", "pause", "web", "--force")

    refused = pgqueue("queues", "resume", "--all")
    resumed = pgqueue("queues", "resume", "--all", "--reason", "")

    assert "mail (provider is down), web (no reason given); say which" in refused.err
    assert resumed.err == "resumed web\nmail stays paused: provider is down\n"


def test_everything_is_resumed_by_force_whatever_the_reasons(pgqueue, queue):
    pgqueue("queues", "pause", "mail", "--reason", "provider is down", "--force")
    pgqueue("queues", "pause", "web", "--force")

    resumed = pgqueue("queues", "resume", "--all", "--force")

    assert (resumed.code, resumed.err) == (0, "resumed mail\nresumed web\n")


def test_a_ceiling_is_set_shown_and_lifted(pgqueue, queue):
    limited = pgqueue("queues", "limit", "reports", 3, "--reason", "small server", "--force")
    shown = pgqueue("queues", "list").rows
    lifted = pgqueue("queues", "limit", "reports", "none")

    assert limited.err == "reports: at most 3 jobs at a time\n"
    assert shown == ["reports 0 0 0 0/3 0 - 0 small server"]
    assert lifted.err == "reports has no limit\n"
    assert pgqueue("queues", "list").rows == ["reports 0 0 0 0 0 - 0"]


MISSPELT = [
    (["pause", "mail", "mial", "--reason", "stop the mails"], "paused"),
    (["resume", "mial"], "resumed"),
    (["resume", "mial", "--slots", "1"], "resumed"),
    (["limit", "mial", "0"], "limited"),
]


@pytest.mark.parametrize(("arguments", "done"), MISSPELT)
def test_a_name_that_nobody_knows_is_refused_and_nothing_is_done(pgqueue, queue, arguments, done):
    queue.enqueue(queue="mail")

    ended = pgqueue("queues", *arguments)

    assert (ended.code, ended.out) == (1, "")
    assert ended.err == (
        f"pgqueue: no queue 'mial'; did you mean 'mail'? (with --force it is {done} all the same)\n"
    )
    assert queue.one("SELECT count(*) FROM pgqueue.queues") == 0


@pytest.mark.parametrize(("arguments", "done"), MISSPELT)
def test_a_name_that_nobody_knows_yet_is_taken_by_force(pgqueue, queue, arguments, done):
    ended = pgqueue("queues", *arguments, "--force")

    assert ended.code == 0
    assert queue.one("SELECT count(*) FROM pgqueue.queues WHERE name = 'mial'") == 1


def test_a_queue_is_known_by_a_job_a_task_settings_or_a_worker(pgqueue, queue):
    queue.enqueue(queue="with jobs")
    queue.connection.execute("INSERT INTO pgqueue.queues (name) VALUES ('with settings')")
    queue.connection.execute("INSERT INTO pgqueue.tasks (name, queue) VALUES ('t', 'of a task'), ('u', NULL)")
    queue.see_worker(["of a worker"])

    ended = pgqueue("queues", "pause", "default", "of a task", "of a worker", "with jobs", "with settings")

    assert ended.code == 0


def test_what_makes_no_sense_is_wrong_usage(pgqueue):
    for arguments in (
        ["pause"],
        ["pause", "mail", "--all"],
        ["pause", "mail", "--for", "1h", "--until", "2030-01-31T14:00:00Z"],
        ["resume"],
        ["resume", "mail", "--slots", "-1"],
        ["resume", "mail", "--reason", "runaway"],
        ["limit", "mail"],
        ["limit", "mail", "few"],
        ["limit", "mail", "-1"],
        ["limit", "mail", "99999999999"],
    ):
        assert pgqueue("queues", *arguments).code == 2, arguments


def test_nothing_to_resume_is_said(pgqueue):
    ended = pgqueue("queues", "resume", "--all")

    assert (ended.code, ended.err) == (0, "no queues\n")


@pytest.mark.parametrize("command", [("pause",), ("resume",), ("limit", "5")])
@pytest.mark.parametrize("name", ["", "x" * 101])
def test_a_name_that_no_queue_can_have_is_not_called_unknown(pgqueue, command, name):
    what, *more = command

    ended = pgqueue("queues", what, name, *more)

    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("pgqueue: queue ")
    assert "--force" not in ended.err
