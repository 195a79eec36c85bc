"""Passwords and payloads are seen by those who may read the database, and by nobody else."""

from __future__ import annotations

import json
import re
import traceback
import urllib.request
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

import pgqueue
from pgqueue import database
from pgqueue.cli import main
from pgqueue.runtime import log as worker_log
from tests.process.support import Queue, worker
from tests.support import run_pgqueue, wait_until

PASSWORD = "pw-marker-7f3a"
PAYLOAD = "payload-marker-4242"
TASKS = {
    "succeed": "succeeded",
    "quote_it": "dead",
    "look_it_up": "dead",
    "take_a_number": "dead",
    "cancel_it": "cancelled",
    "die_with_it": "dead",
    "return_what_is_no_json": "succeeded",
    "tell_a_secret": "succeeded",
    "nobody_knows_it": "dead",
}


@pytest.fixture
def queue(dsn):
    made = Queue(dsn)
    yield made
    made.close()


def run_everything(queue: Queue, folder: Path, dsn: str, *arguments: str, **env: str):
    """Run a job of each task with the marker in its arguments; gives log, what `ps` showed, and metrics."""
    with worker(
        dsn,
        folder,
        "--unknown-task-grace-seconds",
        "0",
        "--metrics-port",
        "0",
        *arguments,
        app="tests.security.quiet_jobs:app",
        env=env,
        is_up=False,
    ) as started:
        wait_until(lambda: "worker started" in started.text(), 60)
        seen = [
            Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in (started.pid, *started.children())
        ]
        jobs = {task: queue.insert(task, json.dumps({"card": PAYLOAD})) for task in TASKS}
        for task, state in TASKS.items():
            queue.wait_for_state(jobs[task], state)
        served = re.search(r"metrics served.*?port\W+(\d+)", started.text())
        assert served
        with urllib.request.urlopen(f"http://127.0.0.1:{served[1]}/metrics", timeout=60) as answer:
            metrics = answer.read().decode()
        started.stop()
    return started, seen, metrics


@pytest.mark.parametrize("log_format", ["json", "key-value"])
def test_no_log_line_no_process_list_and_no_metric_shows_a_password_or_a_payload(
    queue, dsn, tmp_path, log_format
):
    secret_dsn = make_conninfo(dsn, password=PASSWORD)

    started, seen, metrics = run_everything(
        queue, tmp_path, secret_dsn, "--log-format", log_format, PGPASSWORD=PASSWORD
    )

    text = started.text()
    assert "nobody_knows_it" in text
    assert "cannot connect with" in text
    assert PASSWORD not in text
    assert PAYLOAD not in text
    assert len(seen) == 2
    assert PASSWORD not in "".join(seen)
    assert re.search(r'pgqueue_jobs_processed_total\{.*outcome="dead".*\} 1', metrics)
    assert PASSWORD not in metrics
    assert PAYLOAD not in metrics
    # Those who may read the database find it all there.
    assert PAYLOAD in queue.one("SELECT reason FROM pgqueue.dead_jobs WHERE task = 'quote_it'")


def test_every_line_says_its_worker_and_a_handlers_line_its_job_too(queue, dsn, tmp_path):
    started, *_ = run_everything(queue, tmp_path, dsn)

    lines = started.lines()
    assert {line["worker"] for line in lines} == {lines[-1]["worker"]}
    charged = next(line for line in lines if line["event"] == "charged")
    job = queue.one("SELECT id FROM pgqueue.finished_jobs WHERE task = 'succeed'")
    assert (charged["job_id"], charged["attempt"], charged["task"]) == (job, 1, "succeed")
    assert charged["logger"] == "shop.mail"
    about_jobs = [line for line in lines if line["event"].startswith("job ")]
    assert len(about_jobs) >= len(TASKS)
    assert all({"job_id", "attempt", "task"} <= set(line) for line in about_jobs)


def test_every_line_goes_through_the_users_redaction_and_what_it_fails_on_is_held_back(queue, dsn, tmp_path):
    started, *_ = run_everything(
        queue, tmp_path, dsn, "--log-redact", "tests.security.quiet_jobs", SHOP_PASSWORD=PASSWORD
    )

    assert "charged" not in [line["event"] for line in started.lines()]
    redacted = started.lines("c*****d")[0]
    assert (redacted["by"], redacted["task"]) == ("redact", "succeed")
    held_back = started.lines("a line was held back: its redaction failed (ValueError)")[0]
    assert held_back["task"] == "tell_a_secret"
    assert PASSWORD not in started.text()


def test_a_redaction_that_cannot_be_loaded_stops_the_worker_before_it_writes_anything(dsn):
    ended = run_pgqueue(
        "worker", "--app", "tests.security.quiet_jobs:app", "--log-redact", "no.such:thing", dsn=dsn
    )

    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "no.such:thing" in ended.stderr


@pytest.mark.parametrize(
    ("text", "args", "shown"),
    [
        ("ValueError: card 4111 1111 refused", {"card": "4111 1111"}, "ValueError: card *** refused"),
        ("E: no user 123456, only 1234567", {"user_id": 123456}, "E: no user ***, only 1234567"),
        ("E: it is deep", {"a": [{"b": ["deep"]}]}, "E: it is ***"),
        ("E: yes and no", {"a": "yes", "b": "no", "c": True, "d": 12}, "E: yes and no"),
        ("E: " + "x" * 50, {"a": "x" * 5000}, "E: ***"),
        ("E: second line", {"a": "first\nsecond line"}, "E: ***"),
        ("E: whatever", {"a": "y" * 100_000}, "E: ***"),
        ("E: whatever", None, "E: ***"),
    ],
)
def test_an_error_in_the_log_does_not_quote_the_arguments(text, args, shown):
    assert worker_log.without_arguments(text, "{" if args is None else json.dumps(args)) == shown


def test_an_error_that_a_caller_sees_does_not_quote_other_arguments_than_the_wrong_one(dsn):
    app = pgqueue.App(dsn=dsn)

    @app.task(concurrency_key="{tenant}")
    def send(card: str, tenant: str) -> None: ...

    with pytest.raises(pgqueue.InvalidJob) as caught:
        # Only the database knows that a key holds 255 bytes at most.
        send.enqueue(card=PAYLOAD, tenant="t" * 300)

    assert PAYLOAD not in "".join(traceback.format_exception(caught.value))


def test_no_command_shows_a_password_whatever_goes_wrong(dsn, monkeypatch, capsys):
    closed = f"postgresql://someone:{PASSWORD}@127.0.0.1:1/jobs"
    for where in (
        closed,
        f"postgresql:/someone:{PASSWORD}@h/d",
        f"host=127.0.0.1 port=1 password={PASSWORD}",
        f"postgresql://someone:un@{PASSWORD}@127.0.0.1:1/jobs",
        f"postgresql://someone:un/{PASSWORD}@127.0.0.1:1/jobs",
        f"postgresql://someone@corp:{PASSWORD}@127.0.0.1:1/jobs",
    ):
        monkeypatch.setenv("PGQUEUE_DSN", where)
        for command in (
            ("jobs", "list"),
            ("workers", "--json"),
            ("migrate",),
            ("enqueue", "t", "{}"),
            ("roles",),
        ):
            assert main(list(command)) in (2, 75)
        said = capsys.readouterr()
        assert PASSWORD not in said.out + said.err
    worked = run_pgqueue(
        "worker", "--app", "tests.security.quiet_jobs:app", "--listen-dsn", closed, dsn=closed, seconds=120
    )
    assert worked.returncode == 75
    assert PASSWORD not in worked.stdout + worked.stderr
    unescaped = f"postgresql://someone:un@{PASSWORD}@127.0.0.1:1/jobs"
    for options in ((dsn, "--listen-dsn", unescaped), (unescaped,)):
        refused = run_pgqueue(
            "worker", "--app", "tests.security.quiet_jobs:app", *options[1:], dsn=options[0]
        )
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "percent-encode the password" in refused.stderr
        assert PASSWORD not in refused.stderr


def test_a_child_process_inherits_no_descriptor_but_its_socket_and_its_board(queue, dsn, tmp_path):
    with worker(dsn, tmp_path, app="tests.security.quiet_jobs:app") as started:
        (child,) = started.children()
        kinds = [str(link.readlink()) for link in sorted(Path(f"/proc/{child}/fd").iterdir())]
        parents = {str(link.readlink()) for link in Path(f"/proc/{started.pid}/fd").iterdir()}

    shared = [kind for kind in kinds if kind in parents and kind.startswith("socket:")]
    assert shared == []


def test_passwords_are_found_in_every_spelling_of_a_dsn():
    assert database.passwords("postgresql://u:p%40ss@h/d") == ["p%40ss", "p@ss"]
    assert "p@ss/word" in database.passwords("postgresql://u:p@ss/word@h/d")
    assert database.passwords("host=h password='p ss'") == ["p ss"]
    assert database.passwords("postgresql://u@h/d") == []
    assert database.passwords("nonsense") == []


def test_what_is_hidden_is_hidden_in_either_form(monkeypatch):
    monkeypatch.setattr(worker_log, "_secrets", [])
    worker_log.hide('quo"ted', None, "", "abc")

    for log_format in ("json", "key-value"):
        handler = worker_log.LineHandler(log_format)
        line = handler.line(
            "now", "info", 'is quo"ted', {"with": 'a quo"ted', "url": "postgresql://u:other@h/d"}
        )

        assert "ted" not in line
        assert "other" not in line
