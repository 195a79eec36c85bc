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
    pgqueue("queues", "pause", "mail", "--for", "1h")
    queue.connection.execute("UPDATE pgqueue.queues SET paused_until = clock_timestamp()")

    (mail,) = pgqueue("queues", "list", "--json").json

    assert (mail["is_paused"], mail["max_running"]) == (False, None)


def test_a_pause_can_have_an_end_with_a_time_zone(pgqueue, queue):
    done = pgqueue("queues", "pause", "mail", "--until", "2030-01-31T14:00:00+07:00")
    naive = pgqueue("queues", "pause", "mail", "--until", "2030-01-31T14:00:00")

    (mail,) = pgqueue("queues", "list", "--json").json
    assert (done.code, mail["paused_until"]) == (0, "2030-01-31T07:00:00Z")
    assert naive.code == 2
    assert "has no time zone" in naive.err


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


def test_a_ceiling_is_set_shown_and_lifted(pgqueue, queue):
    limited = pgqueue("queues", "limit", "reports", 3, "--reason", "small server")
    shown = pgqueue("queues", "list").rows
    lifted = pgqueue("queues", "limit", "reports", "none")

    assert limited.err == "reports: at most 3 jobs at a time\n"
    assert shown == ["reports 0 0 0 0/3 0 - 0 small server"]
    assert lifted.err == "reports has no limit\n"
    assert pgqueue("queues", "list").rows == ["reports 0 0 0 0 0 - 0"]


def test_what_makes_no_sense_is_wrong_usage(pgqueue):
    for arguments in (
        ["pause"],
        ["pause", "mail", "--all"],
        ["pause", "mail", "--for", "1h", "--until", "2030-01-31T14:00:00Z"],
        ["resume"],
        ["resume", "mail", "--slots", "-1"],
        ["limit", "mail"],
        ["limit", "mail", "few"],
        ["limit", "mail", "-1"],
        ["limit", "mail", "99999999999"],
    ):
        assert pgqueue("queues", *arguments).code == 2, arguments


def test_nothing_to_resume_is_said(pgqueue):
    ended = pgqueue("queues", "resume", "--all")

    assert (ended.code, ended.err) == (0, "no queues\n")
