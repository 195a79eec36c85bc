"""`pgqueue top`: the whole picture at a glance, on a terminal and elsewhere."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator

import psycopg
import pytest

from pgqueue.cli import top
from tests.support import PROGRAM, wait_until


def test_one_look_shows_queues_workers_and_what_runs_the_longest_first(pgqueue, queue):
    queue.see_worker(["default", "mail"])
    first = queue.run(queue="mail")
    second = queue.run()
    queue.connection.execute(
        "UPDATE pgqueue.jobs SET started_at = started_at - interval '5 min', "
        "deadline_at = deadline_at + interval '1 h' WHERE id = %s",
        [second],
    )
    queue.enqueue()
    queue.bury(queue="reports")

    ended = pgqueue("top")

    assert ended.code == 0
    blocks = [[" ".join(line.split()) for line in block.splitlines()] for block in ended.out.split("\n\n")]
    head, queues, workers, running = blocks
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC 1 worker, 2 of 10 slots taken", head[0])
    assert queues[0].startswith("QUEUE READY SCHEDULED")
    assert queues[1].startswith("default 1 0 0 1 0 0 s 1")
    assert workers[1].endswith("web-1 42 0.1.0 default, mail 2 10 3 h 0 s ago")
    assert running[1:] == [
        f"{second} 5 min in 1 h default send 1/5 web-1 (42)",
        f"{first} 0 s in 5 min mail send 1/5 web-1 (42)",
    ]
    assert "\x1b" not in ended.out


def test_each_of_several_looks_is_a_document_on_a_line_of_its_own(pgqueue, queue):
    queue.enqueue(queue="two\nlines\u2028")

    ended = pgqueue("top", "--json", "--count", 2, "--every", "0.1s")

    first, second = (json.loads(line) for line in ended.out.splitlines())
    assert first["queues"][0]["queue"] == second["queues"][0]["queue"] == "two\nlines\u2028"
    assert first["flow"]["at"] < second["flow"]["at"]


def test_an_empty_queue_is_said_to_be_empty(pgqueue):
    assert pgqueue("top").out.split("\n\n")[1:] == ["no queues", "no workers", "nothing runs\n"]


def test_what_is_wrong_stands_beside_it(pgqueue, queue):
    queue.see_worker(["default"], silent_seconds=90)
    for clause in (
        "heartbeat_at = heartbeat_at - interval '11 min'",
        "cancel_requested_at = clock_timestamp()",
        "deadline_at = clock_timestamp() - interval '1 s'",
    ):
        queue.connection.execute(f"UPDATE pgqueue.jobs SET {clause} WHERE id = %s", [queue.run()])
    queue.connection.execute("INSERT INTO pgqueue.breakers (name, state) VALUES ('bank', 'open')")
    queue.connection.execute("SELECT pgqueue.pause_queues(ARRAY['default'], 'provider is down')")

    out = pgqueue("top").out

    for note in ("lease ended 11 min ago", "asked to stop", "overdue", "breakers: bank open", "silent"):
        assert note in out
    assert "paused: provider is down" in out


def test_several_looks_tell_how_many_came_and_went(pgqueue, queue):
    ended = pgqueue("top", "--count", 2, "--every", "0.1")

    assert ended.out.count(" UTC ") == 2
    assert ended.out.count("   in 0/s, out 0/s") == 1


def test_a_script_gets_one_document(pgqueue, queue):
    queue.see_worker(["default"])
    job_id = queue.run()

    document = pgqueue("top", "--json").json

    assert [job["id"] for job in document["running"]] == [job_id]
    assert [each["queue"] for each in document["queues"]] == ["default"]
    assert len(document["workers"]) == 1


@pytest.mark.parametrize(
    ("lengths", "room", "shares"),
    [
        ([3, 2, 4], None, [3, 2, 4]),
        ([3, 2, 4], 20, [3, 2, 4]),
        ([30, 2, 40], 20, [9, 2, 9]),
        ([0, 0, 9], 5, [1, 1, 3]),
    ],
)
def test_the_screen_is_shared_out_fairly(lengths, room, shares):
    assert top._shares(lengths, room) == shares


class Terminal:
    """A terminal of 100 columns and 20 lines with the program on it."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self.master = master
        self.text = ""

    def shows(self, wanted: str) -> bool:
        with contextlib.suppress(BlockingIOError, OSError):
            self.text += os.read(self.master, 65536).decode(errors="replace")
        return wanted in self.text

    def press(self, key: str) -> None:
        os.write(self.master, key.encode())


@pytest.fixture
def terminal(fast_dsn: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 100, 0, 0))
    os.set_blocking(master, False)
    before = termios.tcgetattr(slave)
    with subprocess.Popen(
        [*PROGRAM, "top", "--every", "0.2"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "PGQUEUE_DSN": fast_dsn, "TERM": "xterm"},
        start_new_session=True,
    ) as process:
        try:
            shown = Terminal(process, master)
            wait_until(lambda: shown.shows("nothing runs"), 60)
            yield shown
            assert termios.tcgetattr(slave) == before
        finally:
            process.kill()
            os.close(slave)
            os.close(master)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda shown: shown.press("q"), 0),
        (lambda shown: shown.process.send_signal(signal.SIGINT), 0),
        (lambda shown: shown.process.send_signal(signal.SIGTERM), 128 + signal.SIGTERM),
    ],
    ids=["q", "Ctrl-C", "TERM"],
)
def test_a_terminal_gets_a_live_view_and_its_own_screen_back(terminal, queue, end, code):
    assert terminal.text.startswith("\x1b[?1049h\x1b[?25l")
    for _ in range(60):
        queue.enqueue(queue=f"q{_}")
    wait_until(lambda: terminal.shows("q0 "), message="a later look shows what came since")
    wait_until(lambda: terminal.shows(" more"), message="what has no place is counted")

    end(terminal)

    wait_until(lambda: terminal.shows("\x1b[?25h\x1b[?1049l"))
    assert terminal.process.wait(60) == code
    frames = terminal.text.split("\x1b[H")
    assert all(frame.count("\n") < 20 for frame in frames)


def test_a_live_view_outlives_an_outage(terminal, queue, fast_dsn):
    name = psycopg.conninfo.conninfo_to_dict(fast_dsn)["dbname"]
    with psycopg.connect(fast_dsn, dbname="postgres", autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        try:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = %s AND application_name = 'pgqueue cli'",
                [name],
            )
            wait_until(lambda: terminal.shows("the database has been away for"))
            wait_until(
                lambda: (
                    terminal.shows("has been away for ")
                    and re.search(r"away for [1-9]\d* s, trying again: cannot connect", terminal.text)
                )
            )
        finally:
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    queue.enqueue(queue="after-the-outage")

    wait_until(lambda: terminal.shows("after-the-outage"))
    terminal.press("q")
    assert terminal.process.wait(60) == 0
