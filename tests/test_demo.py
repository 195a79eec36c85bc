"""`pgqueue demo`: what it reports is so, what is wrong it finds, and however it ends, nothing stays."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgqueue.database import run
from pgqueue.demo.check import find_differences
from pgqueue.demo.course import BROKEN, find_library_files
from pgqueue.demo.processes import kill_at_work
from pgqueue.demo.reading import read
from pgqueue.demo.tasks import app
from pgqueue.sql import demo as statements
from pgqueue.sql.presence import register_tasks
from tests.support import (
    is_alive,
    make_database,
    processes_with,
    run_pgqueue,
    start_pgqueue,
    wait_until,
)

# The half of them must take so long that a slow machine, too, catches a child at work meanwhile.
FILES = 300
SAID_WHEN_IDLE = "Measuring"


@contextmanager
def demo(dsn: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a short demo whose folder is here, and whose processes carry that folder's name."""
    arguments = ("demo", "--files", str(FILES))
    with start_pgqueue(*arguments, dsn=dsn, env={"TMPDIR": str(folder)}) as process:
        yield process


def wait_for_line(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stderr is not None
    told = []
    for line in process.stderr:
        told.append(line)
        if line.startswith(beginning):
            return
    raise AssertionError(f"never said {beginning!r}:\n{''.join(told)}")


# The whole of it.


@pytest.fixture(scope="module")
def ran(postgres: Any, postgresql_noproc: Any, tmp_path_factory: Any) -> Iterator[dict[str, Any]]:
    """A demo that ran to its end, in a database with somebody else's job and an aborted demo's leavings."""
    folder = tmp_path_factory.mktemp("demo")
    with (
        make_database(postgres.dsn, postgresql_noproc.template_dbname) as dsn,
        psycopg.connect(dsn, autocommit=True) as conn,
    ):
        conn.execute("INSERT INTO pgqueue.jobs (task) VALUES ('other')")
        conn.execute(
            "INSERT INTO pgqueue.jobs (task, queue, args) "
            "VALUES ('demo.catalogue', 'demo', '{\"path\": \"/gone\"}')"
        )
        ended = run_pgqueue(
            *("demo", "--files", str(FILES), "--json"), dsn=dsn, env={"TMPDIR": str(folder)}, seconds=240
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        yield {
            "report": json.loads(ended.stdout),
            "told": ended.stderr,
            "folder": folder,
            "conn": conn,
        }


def test_the_demo_catalogues_every_file_and_says_so(ran: dict[str, Any]) -> None:
    report = ran["report"]

    kept = ran["conn"].execute(
        "SELECT count(*), sum(bytes), sum(lines), sum(cardinality(definitions)) FROM pgqueue_demo.files"
    )

    assert report["differences"] == []
    assert report["files"] + len(report["dead"]) == report["jobs"] == FILES + len(BROKEN)
    assert kept.fetchone() == tuple(report[name] for name in ("files", "bytes", "lines", "definitions"))
    assert report["bytes"] == sum(
        Path(path).stat().st_size
        for path in find_library_files()[:FILES]
        if path not in {dead["path"] for dead in report["dead"]}
    )


def test_a_third_of_the_jobs_comes_in_each_way(ran: dict[str, Any]) -> None:
    ways = ran["report"]["ways"]

    assert ways.keys() == {"sql", "enqueue_many", "cli"}
    assert max(ways.values()) - min(ways.values()) <= 1


def test_the_jobs_of_the_killed_child_ran_again(ran: dict[str, Any]) -> None:
    report = ran["report"]

    crashed = {
        path
        for (path,) in ran["conn"].execute(
            "SELECT args ->> 'path' FROM pgqueue.finished_jobs WHERE crashes > 0 AND attempt > 1"
        )
    }

    assert report["killed_while_reading"]
    assert crashed >= set(report["killed_while_reading"])
    assert not is_alive(report["killed_pid"])


def test_what_is_no_python_is_dead_with_a_reason_for_a_person(ran: dict[str, Any]) -> None:
    dead = {Path(file["path"]).name: file["reason"] for file in ran["report"]["dead"]}

    assert dead.keys() >= BROKEN.keys()
    assert dead["syntax_error.py"] == "line 1: '(' was never closed"
    assert "null bytes" in dead["nul_byte.py"]
    assert "can't decode byte 0xfc" in dead["not_utf8.py"]


def test_the_pick_up_is_measured_from_insert_to_handler(ran: dict[str, Any]) -> None:
    report = ran["report"]

    assert report["pick_ups"] == 50
    assert 0 < report["pick_up_p50_ms"] <= report["pick_up_p95_ms"]


def test_the_demo_leaves_other_jobs_alone_and_clears_only_its_own(ran: dict[str, Any]) -> None:
    jobs = ran["conn"].execute("SELECT task, queue FROM pgqueue.jobs").fetchall()
    aborted = ran["conn"].execute(
        "SELECT count(*) FROM pgqueue.finished_jobs WHERE args ->> 'path' = '/gone'"
    )

    assert jobs == [("other", "default")]
    assert aborted.fetchone() == (0,)


def test_the_demo_leaves_no_process_and_no_folder(ran: dict[str, Any]) -> None:
    assert processes_with(str(ran["folder"])) == {}
    assert list(ran["folder"].iterdir()) == []


def test_the_demo_says_what_to_do_next(ran: dict[str, Any]) -> None:
    assert "What next:\n  pgqueue dlq list -q demo" in ran["told"]


# What is wrong is found.


def test_a_value_changed_behind_its_back_ends_the_demo_with_1_and_the_files_name(
    dsn: str, tmp_path: Path
) -> None:
    victim = find_library_files()[FILES // 2]
    with demo(dsn, tmp_path) as process, psycopg.connect(dsn, autocommit=True) as conn:
        wait_for_line(process, SAID_WHEN_IDLE)

        conn.execute("UPDATE pgqueue_demo.files SET sha256 = 'changed' WHERE path = %s", [victim])
        out, err = process.communicate(timeout=180)

    assert process.returncode == 1
    assert f"  {victim}: sha256 is 'changed' in the catalogue" in out
    assert "pgqueue: 1 thing not as it should be" in err


CHECKED = {
    "plain.py": b"def greet():\n    return 1\n\n\nclass Greeter:\n    def greet(self): ...\n",
    "empty.py": b"",
    "unended.py": b"x = 1\ny = 2",
    "crlf.py": b"async def greet():\r\n    pass\r\n",
    "bom.py": b"\xef\xbb\xbfdef greet(): ...\n",
    "latin.py": "# coding: latin-1\ndef grüße(): ...\n".encode("latin-1"),
    "formfeed.py": b"\x0cif x:\n    def hidden(): ...\n\x0c@staticmethod\ndef shown(): ...\n",
    **BROKEN,
}


class Checked:
    """Files that a worker has catalogued, and the check of them."""

    def __init__(self, conn: psycopg.Connection, folder: Path, since: int) -> None:
        self.conn = conn
        self.folder = folder
        self.since = since
        self.readings = [read(str(folder / name)) for name in CHECKED]

    def differences(self, crashed: tuple[int, ...] = ()) -> list[str]:
        return find_differences(
            self.readings,
            run(self.conn, statements.catalogue()),
            run(self.conn, statements.outcomes(self.since)),
            crashed,
        )


@pytest.fixture(scope="module")
def worked(postgres: Any, postgresql_noproc: Any, tmp_path_factory: Any) -> Iterator[Checked]:
    folder = tmp_path_factory.mktemp("checked")
    for name, source in CHECKED.items():
        (folder / name).write_bytes(source)
    with (
        make_database(postgres.dsn, postgresql_noproc.template_dbname) as dsn,
        psycopg.connect(dsn, autocommit=True) as conn,
    ):
        run(conn, statements.make_catalogue())
        run(conn, register_tasks(app.registry.registrations()))
        ids = run(conn, statements.insert_jobs([str(folder / name) for name in CHECKED]))
        ended = run_pgqueue("worker", "--app", "pgqueue.demo.tasks:app", "--until-empty", dsn=dsn)
        assert ended.returncode == 3, ended.stderr
        conn.autocommit = False
        yield Checked(conn, folder, min(ids))


@pytest.fixture
def checked(worked: Checked) -> Iterator[Checked]:
    yield worked
    worked.conn.rollback()


def test_files_of_all_kinds_are_catalogued_as_the_check_reads_them(checked: Checked) -> None:
    found = checked.conn.execute("SELECT path, lines, definitions FROM pgqueue_demo.files").fetchall()

    assert checked.differences() == []
    assert {Path(path).name: (lines, names) for path, lines, names in found} == {
        "plain.py": (6, ["greet", "Greeter"]),
        "empty.py": (0, []),
        "unended.py": (2, []),
        "crlf.py": (2, ["greet"]),
        "bom.py": (1, ["greet"]),
        "latin.py": (2, ["grüße"]),
        "formfeed.py": (4, ["shown"]),
    }


COPY_JOB = """
INSERT INTO pgqueue.finished_jobs
SELECT (jsonb_populate_record(job, '{"id": 999999}')).* FROM pgqueue.finished_jobs AS job
WHERE args ->> 'path' LIKE '%/plain.py'
"""


@pytest.mark.parametrize(
    ("change", "name", "what"),
    [
        ("UPDATE pgqueue_demo.files SET lines = 7 WHERE path LIKE '%/plain.py'", "plain.py", "lines is 7 in"),
        ("UPDATE pgqueue_demo.files SET bytes = 1 WHERE path LIKE '%/empty.py'", "empty.py", "bytes is 1 in"),
        (
            "UPDATE pgqueue_demo.files SET definitions = '{}' WHERE path LIKE '%/bom.py'",
            "bom.py",
            "definitions is [] in the catalogue, ['greet'] in the file",
        ),
        ("DELETE FROM pgqueue_demo.files WHERE path LIKE '%/crlf.py'", "crlf.py", "missing from"),
        (
            "UPDATE pgqueue_demo.files SET path = replace(path, 'bom.py', 'nul_byte.py')",
            "nul_byte.py",
            "in the catalogue, although it does not parse",
        ),
        (
            "INSERT INTO pgqueue_demo.files VALUES ('/else/new.py', 0, 0, '', '{}')",
            "new.py",
            "nobody asked for it",
        ),
        (COPY_JOB, "plain.py", "2 jobs instead of one"),
        ("DELETE FROM pgqueue.finished_jobs WHERE args ->> 'path' LIKE '%/bom.py'", "bom.py", "is nowhere"),
        (
            "DELETE FROM pgqueue.dead_jobs WHERE args ->> 'path' LIKE '%/nul_byte.py'",
            "nul_byte.py",
            "nowhere",
        ),
        (
            "UPDATE pgqueue.dead_jobs SET reason = 'bad luck' WHERE args ->> 'path' LIKE '%/not_utf8.py'",
            "not_utf8.py",
            "dead: bad luck, but the reason is",
        ),
        (
            "UPDATE pgqueue.finished_jobs SET state = 'cancelled' WHERE args ->> 'path' LIKE '%/crlf.py'",
            "crlf.py",
            "is cancelled",
        ),
        (
            "INSERT INTO pgqueue.jobs (task, args) VALUES ('demo.catalogue', '{\"path\": \"/else/b.py\"}')",
            "b.py",
            "nobody asked for that",
        ),
        ("INSERT INTO pgqueue.jobs (task) VALUES ('demo.pick_up')", "demo.pick_up", "is ready"),
    ],
)
def test_the_check_names_what_is_wrong(checked: Checked, change: str, name: str, what: str) -> None:
    checked.conn.execute(change)

    found = checked.differences()

    assert [line for line in found if name in line and what in line], found


def test_the_check_asks_that_what_crashed_ran_again(checked: Checked) -> None:
    found = checked.differences(crashed=(checked.since,))

    assert found == [f"job {checked.since} ran in the process that was killed, and did not run again"]


# However it ends.


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143)],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_in_the_middle_leaves_nothing(
    dsn: str, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with demo(dsn, tmp_path) as process:
        wait_for_line(process, "Half-way")

        process.send_signal(number)
        out, err = process.communicate(timeout=180)

    assert process.returncode == code
    assert "Traceback" not in err
    assert out == ""
    # Of a worker that had to be killed the kernel ends the children, a moment later.
    wait_until(lambda: processes_with(str(tmp_path)) == {}, 30)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a process does not learn of its parent's death"
)
def test_killed_outright_it_leaves_no_process(dsn: str, tmp_path: Path) -> None:
    with demo(dsn, tmp_path) as process:
        wait_for_line(process, "Half-way")

        process.kill()
        process.wait()

    wait_until(lambda: processes_with(str(tmp_path)) == {}, seconds=30)


def test_a_process_is_killed_only_at_work() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        spared = kill_at_work(process.pid, list)
        lived = process.poll() is None and _state(process.pid) != "T"
        killed = kill_at_work(process.pid, lambda: ["work"])
        code = process.wait(10)

    assert (spared, lived) == ([], True)
    assert (killed, code) == (["work"], -signal.SIGKILL)
    assert kill_at_work(process.pid, lambda: ["work"]) == []


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# When it cannot be.


def test_a_database_without_a_schema_is_refused_in_one_line(empty_dsn: str) -> None:
    ended = run_pgqueue("demo", dsn=empty_dsn)

    assert ended.returncode == 1
    assert ended.stderr == "pgqueue: the database has no schema 'pgqueue'; run: pgqueue migrate\n"


def test_two_demos_at_once_do_not_share_a_database(fast_dsn: str, connect: Any) -> None:
    other = connect(fast_dsn)
    assert run(other, statements.take_stage())

    ended = run_pgqueue("demo", dsn=fast_dsn)

    assert ended.returncode == 1
    assert ended.stderr == "pgqueue: another demo is running in this database; wait for its end\n"


def test_a_queue_of_that_name_with_somebody_elses_jobs_is_left_alone(fast_dsn: str, connect: Any) -> None:
    conn = connect(fast_dsn)
    conn.execute("INSERT INTO pgqueue.jobs (task, queue) VALUES ('mine', 'demo')")

    ended = run_pgqueue("demo", dsn=fast_dsn)

    assert ended.returncode == 1
    assert "(task 'mine')" in ended.stderr
    assert conn.execute("SELECT task FROM pgqueue.jobs").fetchall() == [("mine",)]
