"""The program's streams: closed, full or unread, they do not make a failure of what was done."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psycopg
import pytest

from tests.support import PROGRAM, start_pgqueue, wait_until


def in_shell(redirection, *arguments, dsn):
    """Run the program with a redirection of the shell's, and give how it ended."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *PROGRAM, *arguments],
        env={**os.environ, "PGQUEUE_DSN": dsn},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def is_connected(dsn):
    with psycopg.connect(dsn) as connection:
        return connection.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'pgqueue cli'"
        ).fetchone()[0]


def jobs_of(dsn):
    with psycopg.connect(dsn) as connection:
        return connection.execute("SELECT count(*) FROM pgqueue.jobs").fetchone()[0]


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&-", "<&- >&- 2>&-", "<&- 2>&-", ">&- 2>&-"])
def test_a_stream_that_is_closed_changes_nothing(fast_dsn, redirection):
    for arguments in (
        ["enqueue", "send", "--force"],
        ["queues", "pause", "default"],
        ["queues", "list"],
        ["jobs", "list"],
    ):
        ended = in_shell(redirection, *arguments, dsn=fast_dsn)

        assert ended.returncode == 0, arguments
        assert "Traceback" not in ended.stderr
    assert jobs_of(fast_dsn) == 1


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_leads_nowhere_and_not_into_a_connection(fast_dsn, redirection):
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *PROGRAM]
    environment = {**os.environ, "PGQUEUE_DSN": fast_dsn}

    with subprocess.Popen(
        [*command, "top", "--count", "2", "--every", "60"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        wait_until(lambda: is_connected(fast_dsn), 60)
        streams = [str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in (0, 1, 2)]
        process.kill()

    assert [each for each in streams if each.startswith("socket:")] == []


def test_a_password_is_hidden_with_closed_streams_too(fast_dsn):
    dsn = f"{fast_dsn} password=secret"

    ended = in_shell("<&- >&- 2>&-", "enqueue", "send", "--force", "--dsn", dsn, dsn="host=127.0.0.1 port=1")

    assert (ended.returncode, jobs_of(fast_dsn)) == (0, 1)


def test_a_result_that_cannot_be_written_is_no_failure_of_what_was_done(fast_dsn):
    ended = in_shell(">/dev/full", "enqueue", "send", "--force", dsn=fast_dsn)

    assert ended.returncode == 74
    assert ended.stderr == (
        "pgqueue: the output could not be written: No space left on device; what was done stays done\n"
    )
    assert jobs_of(fast_dsn) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["queues", "list", "--json"],
        ["--help"],
        ["queues", "--help"],
        ["--version"],
        ["assets", "show", "prometheus-rules.yml"],
    ],
)
def test_whatever_is_shown_says_that_it_could_not_be_written(fast_dsn, arguments):
    ended = in_shell(">/dev/full", *arguments, dsn=fast_dsn)

    assert (ended.returncode, ended.stderr.count("\n")) == (74, 1)
    assert ended.stderr.startswith("pgqueue: the output could not be written: No space left on device")


def test_talk_that_cannot_be_written_is_no_failure(fast_dsn):
    in_shell("", "enqueue", "send", "--force", dsn=fast_dsn)

    paused = in_shell("2>/dev/full", "queues", "pause", "default", dsn=fast_dsn)
    refused = in_shell("2>/dev/full", "queues", "pause", "defualt", dsn=fast_dsn)

    assert (paused.returncode, refused.returncode) == (0, 1)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["queues", "--help"], ["--version"], ["queues", "list", "--json"]]
)
def test_a_reader_that_went_away_ends_every_command_alike(fast_dsn, arguments):
    reading, writing = os.pipe()
    os.close(reading)

    with start_pgqueue(*arguments, dsn=fast_dsn, stdout=writing) as process:
        os.close(writing)
        _, err = process.communicate(timeout=120)

    assert (process.returncode, err) == (141, "")
