"""`pgqueue enqueue`: what is printed was added, and whatever is wrong is one line and nothing added."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

APPLICATION = """
import pgqueue

app = pgqueue.App()

@app.task(queue="mail", max_attempts=7, unique_key="user:{user_id}")
def send_welcome(user_id: int, text: str = "hello") -> None: ...
"""


@pytest.fixture
def application(tmp_path, monkeypatch):
    """A project's folder with an application, as its author stands in it."""
    (tmp_path / "shop_jobs.py").write_text(APPLICATION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "shop_jobs:app"


@pytest.fixture(autouse=True)
def _registered(queue):
    queue.connection.execute(
        "INSERT INTO pgqueue.tasks (name, queue) VALUES ('send', 'mail'), ('resize', NULL)"
    )


def count(queue):
    return queue.one("SELECT count(*) FROM pgqueue.jobs")


def job(queue, job_id, *columns):
    return queue.connection.execute(
        f"SELECT {', '.join(columns)} FROM pgqueue.jobs WHERE id = %s", [job_id]
    ).fetchone()


# One job.


def test_the_id_is_all_that_is_printed(pgqueue, queue):
    ended = pgqueue("enqueue", "send", '{"user_id": 7, "name": "Zoë"}')

    job_id = int(ended.out)
    assert (ended.code, ended.err) == (0, "")
    assert job(queue, job_id, "task", "queue", "args") == ("send", "mail", {"user_id": 7, "name": "Zoë"})


def test_arguments_can_be_left_out(pgqueue, queue):
    job_id = int(pgqueue("enqueue", "send").out)

    assert job(queue, job_id, "args") == ({},)


def test_arguments_can_come_from_stdin(pgqueue, queue):
    job_id = int(pgqueue("enqueue", "send", "-", stdin='{\n  "user_id": 7\n}\n').out)

    assert job(queue, job_id, "args") == ({"user_id": 7},)


def test_a_script_gets_the_id_and_what_happened(pgqueue):
    first = pgqueue("enqueue", "send", "--unique-key", "u", "--json").json
    second = pgqueue("enqueue", "send", "--unique-key", "u", "--json").json

    assert first == {"job_id": second["job_id"], "outcome": "inserted"}
    assert second["outcome"] == "skipped"


def test_every_option_arrives_at_the_job(pgqueue, queue):
    ended = pgqueue(
        *(
            "enqueue",
            "send",
            "--queue",
            "slow",
            "--priority",
            0,
            "--max-attempts",
            3,
            "--timeout-seconds",
            "2m",
        ),
        *("--unique-key", "u", "--concurrency-key", "c", "--idempotency-key", "i"),
        *("--header", "trace=abc=def", "--header", "from=cron", "--at", "2030-01-31T14:00:00+07:00"),
    )

    assert job(
        queue,
        int(ended.out),
        *("queue", "priority", "max_attempts", "timeout_seconds", "unique_key", "concurrency_key"),
        *("idempotency_key", "headers", "run_at", "state"),
    ) == (
        *("slow", 0, 3, 120.0, "u", "c", "i", {"trace": "abc=def", "from": "cron"}),
        *(datetime(2030, 1, 31, 7, tzinfo=UTC), "scheduled"),
    )


@pytest.mark.parametrize(
    ("given", "seconds"), [("90", 90), ("5m", 300), ("2h", 7200), ("1d", 86_400), ("0.5s", 0.5)]
)
def test_a_delay_counts_from_the_databases_now(pgqueue, queue, given, seconds):
    job_id = int(pgqueue("enqueue", "send", "--in", given).out)

    assert queue.one(
        "SELECT extract(epoch FROM run_at - created_at)::float FROM pgqueue.jobs WHERE id = %s", job_id
    ) == (pytest.approx(seconds, abs=0.001))


def test_a_second_job_with_a_unique_key_is_told_by_the_id_of_the_first(pgqueue, queue):
    first = pgqueue("enqueue", "send", "--unique-key", "u")
    second = pgqueue("enqueue", "send", "--unique-key", "u")
    replacing = pgqueue("enqueue", "send", '{"n": 2}', "--unique-key", "u", "--on-conflict", "replace")
    rejected = pgqueue("enqueue", "send", "--unique-key", "u", "--on-conflict", "reject")

    assert first.out == second.out == replacing.out
    assert "has this unique key already" in second.err
    assert "took these arguments" in replacing.err
    assert job(queue, int(first.out), "args") == ({"n": 2},)
    assert (rejected.code, rejected.out) == (1, "")
    assert rejected.err == "pgqueue: a live job already holds the unique key 'u'\n"


def test_a_debounced_job_is_put_off_as_long_as_is_said(pgqueue, queue):
    arguments = (
        "enqueue",
        "send",
        "--unique-key",
        "u",
        "--unique-until",
        "start",
        "--on-conflict",
        "debounce",
    )
    first = pgqueue(*arguments, "--in", "1m", "--max-delay", "90")
    queue.connection.execute("UPDATE pgqueue.jobs SET created_at = created_at - interval '80 s'")
    again = pgqueue(*arguments, "--in", "1m", "--max-delay", "90")
    now = pgqueue(*arguments)

    assert (first.out, "took these arguments" in again.err) == (again.out, True)
    assert queue.one("SELECT extract(epoch FROM run_at - created_at)::int FROM pgqueue.jobs") == 90
    assert queue.one("SELECT is_unique_until_start FROM pgqueue.jobs")
    assert (now.code, now.err) == (
        1,
        "pgqueue: task 'send': on_conflict 'debounce' puts a job off: say delay_seconds\n",
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--at", "2030-01-31T14:00:00"],
            "'2030-01-31T14:00:00' has no time zone; append Z or an offset such as +07:00",
        ),
        (["--at", "tomorrow"], "'tomorrow' is not a time such as 2026-01-31T14:00:00+07:00"),
        (["--in", "soon"], "'soon' is not a length of time; write 90, 30s, 5m, 2h or 1d"),
        (["--in", "999999999999d"], "'999999999999d' is longer than a hundred years"),
        (["--at", "2030-01-31T14:00:00Z", "--in", "5m"], "run_at and delay_seconds exclude each other"),
        (["--priority", "-1"], "priority must be a whole number between 0 and 32,767, not -1"),
        (["--header", "trace"], "'trace' is not NAME=VALUE"),
        (["--lines", "-"], "with --lines, each line names its task"),
    ],
)
def test_an_option_that_makes_no_sense_is_a_usage_error(pgqueue, queue, arguments, line):
    ended = pgqueue("enqueue", "send", *arguments)

    assert ended.code == 2
    assert line in ended.err
    assert ended.err.count("\n") == 1
    assert count(queue) == 0


def test_a_task_must_be_named(pgqueue):
    ended = pgqueue("enqueue")

    assert ended.code == 2
    assert "which task?" in ended.err


DEEP = "[" * 200 + "]" * 200
BAD_JSON = {
    "{user_id: 7}": "not JSON: Expecting property name enclosed in double quotes at column 2",
    '{"a": NaN}': "the arguments are not JSON, which has no NaN",
    '{"a": -Infinity}': "the arguments are not JSON, which has no -Infinity",
    '{"a": 1e999}': "args.a: inf is not JSON",
    '{"a": 1, "a": 2}': "the arguments are ambiguous: the name 'a' is there twice",
    '{"a": {"b": 1, "b": 2}}': "the arguments are ambiguous: the name 'b' is there twice",
    "[1, 2]": "the arguments are no JSON object but [1, 2]",
    "7": "the arguments are no JSON object but 7",
    "": "the arguments are not JSON: Expecting value at column 1",
    '{"a": "x\\u0000y"}': "args.a: contains a NUL character at position 1",
    '{"a": "\\ud800"}': "args.a: contains half of a surrogate pair",
    f'{{"a": {"9" * 5000}}}': "the arguments are not readable: an integer of 5,000 digits",
    f'{{"a": {DEEP}}}': "nested deeper than 100 levels",
    f'{{"a": {"[" * 100_000}': "the arguments are nested too deeply",
    json.dumps({"a": "x" * 1_100_000}): "the arguments are 1,100,009 bytes, a job carries at most 1,048,576",
}


@pytest.mark.parametrize("text", BAD_JSON, ids=lambda text: text[:20])
@pytest.mark.parametrize("source", ["argument", "stdin", "lines"])
def test_arguments_that_are_no_proper_json_are_refused_in_one_line(pgqueue, queue, text, source):
    if source == "lines":
        ended = pgqueue(
            "enqueue", "--lines", "-", stdin=f'{{"task": "send"}}\n{{"task": "send", "args": {text}}}\n'
        )
        assert ended.err.startswith("pgqueue: line 2: ")
    elif source == "stdin":
        ended = pgqueue("enqueue", "send", "-", stdin=text)
        assert BAD_JSON[text] in ended.err
    else:
        ended = pgqueue("enqueue", "send", text)
        assert BAD_JSON[text] in ended.err

    assert (ended.code, ended.out) == (1, "")
    assert ended.err.count("\n") == 1
    assert count(queue) == 0


def test_bytes_that_are_no_text_are_refused(pgqueue):
    ended = pgqueue("enqueue", "send", "-", stdin=b'{"a": "\xff"}')

    assert (ended.code, ended.err) == (1, "pgqueue: task 'send': the arguments are not UTF-8 at byte 8\n")


def test_stdin_is_not_read_without_end(pgqueue):
    ended = pgqueue("enqueue", "send", "-", stdin=b" " * 17_000_000)

    assert ended.code == 1
    assert "too large" in ended.err


# Which tasks there are.


def test_a_task_that_nobody_registered_is_refused_with_a_suggestion(pgqueue, queue):
    ended = pgqueue("enqueue", "sned")

    assert (ended.code, count(queue)) == (1, 0)
    assert ended.err == (
        "pgqueue: no task 'sned'; did you mean 'send'? (with --force it is enqueued all the same)\n"
    )


def test_force_enqueues_for_a_task_that_is_yet_to_come(pgqueue, queue):
    ended = pgqueue("enqueue", "new_task", "--force")

    assert job(queue, int(ended.out), "task", "queue") == ("new_task", "default")


def test_with_an_application_the_arguments_are_checked_against_the_signature(pgqueue, queue, application):
    wrong_name = pgqueue("enqueue", "send_welcome", '{"user": 7}', "--app", application)
    wrong_type = pgqueue("enqueue", "send_welcome", '{"user_id": "seven"}', "--app", application)
    missing = pgqueue("enqueue", "send_welcome", "--app", application)

    assert wrong_name.err == (
        "pgqueue: task 'send_welcome': takes no argument 'user' (it takes: user_id, text)\n"
    )
    assert "args.user_id: expected an int" in wrong_type.err
    assert "misses the argument 'user_id'" in missing.err
    assert {wrong_name.code, wrong_type.code, missing.code} == {1}
    assert count(queue) == 0


@pytest.mark.parametrize("where", ["option", "environment", "pyproject"])
def test_the_applications_definition_fills_in_the_job(
    pgqueue, queue, application, monkeypatch, tmp_path, where
):
    arguments = ["enqueue", "send_welcome", '{"user_id": 7}']
    if where == "option":
        arguments += ["--app", application]
    elif where == "environment":
        monkeypatch.setenv("PGQUEUE_APP", application)
    else:
        (tmp_path / "pyproject.toml").write_text(f'[tool.pgqueue]\napp = "{application}"\n')

    ended = pgqueue(*arguments)

    assert job(queue, int(ended.out), "queue", "max_attempts", "unique_key") == ("mail", 7, "user:7")


def test_a_task_that_the_application_lacks_is_refused_and_can_be_forced(pgqueue, queue, application):
    refused = pgqueue("enqueue", "send_welcom", "--app", application)
    forced = pgqueue("enqueue", "elsewhere", "--app", application, "--force")

    assert "did you mean 'send_welcome'?" in refused.err
    assert job(queue, int(forced.out), "task") == ("elsewhere",)


def test_an_application_that_is_not_there_is_a_usage_error(pgqueue, application):
    ended = pgqueue("enqueue", "send_welcome", "--app", "no_such_module:app")

    assert ended.code == 2
    assert "no module 'no_such_module'" in ended.err


# Many jobs.


def test_each_line_becomes_a_job_in_order(pgqueue, queue):
    lines = [
        {"task": "send", "args": {"n": 1}},
        {"task": "resize", "args": {"n": 2}, "queue": "slow", "priority": 3, "delay_seconds": 60},
        {"task": "send", "run_at": "2030-01-31T14:00:00Z", "headers": {"trace": "abc"}, "max_attempts": None},
    ]

    ended = pgqueue("enqueue", "--lines", "-", stdin="\n".join(map(json.dumps, lines)))

    ids = [int(line) for line in ended.out.split()]
    assert (ended.code, ended.err) == (0, "enqueued 3 jobs\n")
    assert [job(queue, job_id, "task", "args", "queue", "priority", "state") for job_id in ids] == [
        ("send", {"n": 1}, "mail", 0, "ready"),
        ("resize", {"n": 2}, "slow", 3, "scheduled"),
        ("send", {}, "mail", 0, "scheduled"),
    ]


def test_lines_can_come_from_a_file_and_empty_ones_do_not_count(pgqueue, queue, tmp_path):
    path = tmp_path / "jobs.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"task": "send"}\r\n\r\n{"task": "send"}\n\n')

    ended = pgqueue("enqueue", "--lines", path, "--json")

    assert ended.json["outcomes"] == {"inserted": 2}
    assert len(ended.json["job_ids"]) == count(queue) == 2


def test_a_file_that_is_not_there_is_a_usage_error(pgqueue, tmp_path):
    ended = pgqueue("enqueue", "--lines", tmp_path / "nothing.jsonl")

    assert ended.code == 2
    assert "No such file" in ended.err


def test_no_lines_are_no_jobs(pgqueue):
    ended = pgqueue("enqueue", "--lines", "-")

    assert (ended.code, ended.out, ended.err) == (0, "", "enqueued 0 jobs\n")


def test_options_are_what_a_line_leaves_out(pgqueue, queue):
    lines = '{"task": "send"}\n{"task": "send", "queue": "mine"}\n'

    ended = pgqueue("enqueue", "--lines", "-", "--queue", "theirs", "--priority", 5, stdin=lines)

    assert [job(queue, int(job_id), "queue", "priority") for job_id in ended.out.split()] == [
        ("theirs", 5),
        ("mine", 5),
    ]


def test_lines_that_a_live_job_stands_for_are_counted_apart(pgqueue):
    line = '{"task": "send", "unique_key": "u"}\n'

    ended = pgqueue("enqueue", "--lines", "-", stdin=line * 3)

    assert ended.err == "enqueued 1 job; 2 skipped\n"
    assert len(set(ended.out.split())) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"task": "send", "args": [1]}', "task 'send': the arguments must be an object, not [1]"),
        ('{"args": {}}', 'no "task"'),
        ('{"task": 7}', '"task" must be a text, not 7'),
        ('{"task": "send", "prio": 1}', "no member 'prio' is known; did you mean 'priority'?"),
        (
            '{"task": "send", "priority": "high"}',
            "priority must be a whole number between 0 and 32,767, not 'high'",
        ),
        ('{"task": "send", "run_at": "2030-01-31T14:00:00"}', "has no time zone"),
        ('{"task": "send", "run_at": "tomorrow"}', "run_at 'tomorrow' is not a time such as"),
        ('{"task": "send", "run_at": "2030-01-31T14:00:00Z", "delay_seconds": 1}', "exclude each other"),
        ('{"task": "sned"}', "no task 'sned'; did you mean 'send'?"),
        ('["send"]', 'no JSON object but ["send"]'),
        ("send", "not JSON: Expecting value at column 1"),
        ('{"task": "send", "args": {"a": 1}', "not JSON: Expecting ',' delimiter at column 34"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_enqueued(pgqueue, queue, line, reason):
    lines = ['{"task": "send"}'] * 2_500 + [line, '{"task": "send"}']

    ended = pgqueue("enqueue", "--lines", "-", stdin="\n".join(lines))

    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("pgqueue: line 2,501: ")
    assert reason in ended.err
    assert ended.err.endswith("(nothing was enqueued)\n")
    assert ended.err.count("\n") == 1
    assert count(queue) == 0


def test_what_only_the_database_can_refuse_takes_back_all_lines_too(pgqueue, queue):
    queue.connection.execute(
        "UPDATE pgqueue.tasks SET concurrency_key = 'user:{user_id}' WHERE name = 'send'"
    )
    lines = ['{"task": "resize"}'] * 1_500 + ['{"task": "send"}']

    ended = pgqueue("enqueue", "--lines", "-", stdin="\n".join(lines))

    assert ended.code == 1
    assert "in the first 1,501 lines: " in ended.err
    assert "user_id" in ended.err
    assert count(queue) == 0


def test_the_lines_of_an_application_are_checked_against_the_signature(pgqueue, queue, application):
    lines = "".join(f'{{"task": "send_welcome", "args": {{"user_id": {n}}}}}\n' for n in (1, "null"))

    ended = pgqueue("enqueue", "--lines", "-", "--app", application, stdin=lines)

    assert ended.code == 1
    assert "line 2: task 'send_welcome': args.user_id: expected an int" in ended.err
    assert count(queue) == 0


def test_a_hundred_thousand_lines_go_in_together(pgqueue, queue):
    lines = "".join(f'{{"task": "send", "args": {{"user_id": {n}}}}}\n' for n in range(100_000))

    ended = pgqueue("enqueue", "--lines", "-", stdin=lines)

    assert ended.err == "enqueued 100,000 jobs\n"
    assert count(queue) == 100_000
    # By a thousand or so; each would be a subtransaction of its own otherwise, and minutes.
    statements = queue.connection.execute("SELECT count(DISTINCT (xmin::text, cmin::text)) FROM pgqueue.jobs")
    assert statements.fetchone()[0] <= 100
