"""What commands print: aligned for people, exact for programs, harmless for the terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import struct
import subprocess
import termios
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import psycopg
import pytest

from pgqueue.cli import output
from pgqueue.cli.output import Column
from pgqueue.sql.inspect import JsonText
from tests.support import PROGRAM

NOW = datetime(2026, 1, 31, 14, 5, 9, tzinfo=UTC)


def on_terminal(*arguments, dsn, columns):
    """Run the program as a person does, and give what is on the screen."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "PGQUEUE_DSN": dsn, "TERM": "xterm"}
    with subprocess.Popen(
        [*PROGRAM, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown = io.BytesIO()
        # A terminal whose last writer is gone answers with an error instead of an end.
        while data := _read(ours):
            shown.write(data)
        os.close(ours)
    assert process.returncode == 0
    return shown.getvalue().decode()


def _read(terminal):
    try:
        return os.read(terminal, 65_536)
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (299.9, "5 min"),
        (3599, "1 h"),
        (47 * 3600, "47 h"),
        (48 * 3600, "2 d"),
        (86_400 * 400, "400 d"),
    ],
)
def test_a_length_of_time_is_told_in_one_unit(seconds, text):
    assert output.duration(seconds) == text


def test_an_instant_is_told_in_utc_and_from_now():
    jakarta = timezone(timedelta(hours=7))

    assert output.instant(NOW.astimezone(jakarta), NOW + timedelta(minutes=12)) == (
        "2026-01-31 14:05:09 UTC (12 min ago)"
    )
    assert output.instant(NOW, NOW - timedelta(hours=5)) == "2026-01-31 14:05:09 UTC (in 5 h)"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Zoë 日本語", "Zoë 日本語"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x9b31m", "\\x9b31m"),
        ("left\u202eright", "left\\u202eright"),
        (None, "-"),
        (7, "7"),
    ],
)
def test_a_cell_is_one_harmless_line(text, shown):
    assert output.plain(text) == shown


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("日本語", 6, "日本語"),
        ("日本語", 5, "日本…"),
        ("日本語", 4, "日…"),
    ],
)
def test_a_text_is_cut_to_places_on_the_screen(text, width, short):
    assert output.shorten(text, width) == short
    assert output.display_width(output.shorten(text, width)) <= width


def test_piped_tables_are_never_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")

    output.table([Column("id", is_number=True), Column("text", may_shrink=True)], [[1, "x" * 300]], empty="")

    assert capsys.readouterr().out == f"ID  TEXT\n 1  {'x' * 300}\n"


def test_a_table_on_a_terminal_fits_and_is_cut_from_the_right(fast_dsn):
    with psycopg.connect(fast_dsn, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO pgqueue.jobs (task, args) VALUES ('send_the_welcome', %s::jsonb)",
            [json.dumps({"text": "x" * 150})],
        )

    lines = on_terminal("jobs", "list", dsn=fast_dsn, columns=80).splitlines()

    assert max(map(len, lines)) == 80
    assert "send_the_welcome" in lines[1]
    assert lines[1].endswith("…")


def test_a_long_run_shows_how_far_it_is_on_a_terminal(fast_dsn):
    with psycopg.connect(fast_dsn, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO pgqueue.dead_jobs (id, run_at, created_at, attempt, max_attempts, timeout_seconds, "
            "priority, crashes, concurrency_limit, queue, task, reason, args) "
            "SELECT n, now(), now(), 5, 5, 0, 0, 0, 1, 'mail', 'send', 'boom', '{}' "
            "FROM generate_series(1, 3) AS n"
        )

    screen = on_terminal("dlq", "redrive", "--all", dsn=fast_dsn, columns=80)

    assert "putting back  [" in screen
    assert "3/3" in screen
    assert "put back 3 jobs" in screen


def test_elsewhere_a_long_run_tells_now_and_then_in_a_line(capsys):
    with output.progress("deleting", 2000, every_seconds=0) as advance:
        advance(1500)

    assert capsys.readouterr() == ("", "deleting: 1,500 of 2,000\n")


@dataclass
class Point:
    at: datetime
    id: UUID
    args: JsonText | None


def test_a_document_holds_iso_times_in_utc_and_json_as_it_was(capsys):
    point = Point(
        NOW.astimezone(timezone(timedelta(hours=7))), UUID(int=1), JsonText('{"n": 1e400, "m": 0.10}')
    )

    output.document([point, {"none": None, "empty": [], "text": 'a "b"\n'}])

    assert capsys.readouterr().out == (
        '[\n  {\n    "at": "2026-01-31T14:05:09Z",\n    "id": "00000000-0000-0000-0000-000000000001",\n'
        '    "args": {"n": 1e400, "m": 0.10}\n  },\n'
        '  {\n    "none": null,\n    "empty": [],\n    "text": "a \\"b\\"\\n"\n  }\n]\n'
    )


def test_a_document_keeps_what_a_terminal_would_obey_as_an_escape(capsys):
    output.document({"raw": JsonText('"\x9b31m 𝄞"'), "text": "\x1b[31m"})

    out = capsys.readouterr().out
    assert json.loads(out) == {"raw": "\x9b31m 𝄞", "text": "\x1b[31m"}
    assert all(character.isprintable() or character == "\n" for character in out)


def test_pretty_json_keeps_every_digit():
    assert output.pretty('{"a": [1.10, 123456789012345678901234567890]}') == (
        '{\n  "a": [\n    1.10,\n    123456789012345678901234567890\n  ]\n}'
    )


def test_json_too_deep_to_be_made_pretty_is_shown_as_it_is():
    text = "[" * 5_000 + "]" * 5_000

    assert output.pretty(text) == text
