"""What is suggested for a shell means in a shell what it says."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from pgqueue.shell import sql_name, sql_text, write_command, write_psql

HOSTILE = (
    "mail:$(touch pwned)",
    "it's $(touch pwned)",
    "`touch pwned`; touch pwned",
    '"$HOME" \\ * ~ !1 #',
    "",
    "two\nlines",
    "a b\x1b[31m'\\",
    "-x",
    "--all",
    "größe ✓",
)


def words(line, folder):
    """Give the words that bash makes of a command line, run nowhere else than in this folder."""
    script = f'set --; pgqueue() {{ printf \'%s\\0\' "$@"; }}; psql() {{ pgqueue "$@"; }}; {line}'
    ended = subprocess.run(
        [str(shutil.which("bash")), "-c", script],
        cwd=folder,
        env={"PGQUEUE_DSN": "dbname=mine", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        check=True,
    )
    assert list(folder.iterdir()) == []
    return ended.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_shell_takes_every_name_as_it_is_and_executes_none(tmp_path, name):
    line = write_command("processed forget", name, schema="pgqueue")
    filtered = write_command("jobs list", 7, schema="staging", state="running", queue=name)
    statement = write_psql(f"ROLLBACK PREPARED {sql_text(name)}")

    assert line.isprintable()
    dashes = ["--"] if name.startswith("-") else []
    assert words(line, tmp_path) == ["processed", "forget", *dashes, name]
    option = [f"--queue={name}"] if dashes else ["--queue", name]
    assert words(filtered, tmp_path) == [
        *("jobs", "list", "--state", "running", *option, "--schema", "staging", "7")
    ]
    assert words(statement, tmp_path) == [
        *("dbname=mine", "-c", "ROLLBACK PREPARED '" + name.replace("'", "''") + "'")
    ]


def test_what_needs_no_quoting_is_plain():
    assert write_command("queues resume", "mail", schema="pgqueue") == "pgqueue queues resume mail"
    assert write_command("roles", schema="other", sql=True) == "pgqueue roles --sql --schema other"


@pytest.mark.parametrize(
    ("name", "written"), [("jobs_1", "jobs_1"), ("Jobs", '"Jobs"'), ('a"; b', '"a""; b"'), ("1a", '"1a"')]
)
def test_names_are_quoted_for_sql_where_they_have_to_be(name, written):
    assert sql_name(name, "pgqueue") == f"pgqueue.{written}"
    assert sql_name("user") == '"user"'
