"""Where it takes place: a server of its own, workers and producers as processes, and nothing left after it.

A janitor, a process of its own, sees to that when the run itself is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgqueue import embedded
from pgqueue.migrate import upgrade
from tests.support import ROOT, children_of, is_alive, processes_with, wait_until

PREFIX = "faults-"
ROLE = "app"
TEMPLATE = "faults_template"
APP = "tests.faults.jobs:app"
WORKER = ("-m", "pgqueue")

SKEW = Path(__file__).with_name("skew")
HISTORY = Path(__file__).with_name("history.sql")

# Production's settings but for what makes the log countable and the server small enough to be filled up.
SERVER_SETTINGS = {
    "max_connections": 200,
    "log_line_prefix": "%m [%p] %e %a: ",
    "log_error_verbosity": "terse",
    "log_min_error_statement": "panic",
    # One call a file system after a crash, where there is such a call, instead of one a file.
    **({"recovery_init_sync_method": "syncfs"} if sys.platform == "linux" else {}),
}
# What a nemesis changes, and a healer takes back.
CHANGED_SETTINGS = (
    "default_transaction_read_only",
    "statement_timeout",
    "synchronous_standby_names",
    "wal_writer_delay",
    "bgwriter_lru_maxpages",
    "autovacuum",
)


class Server:
    """A server to stop, kill and start again at will.

    One that is not durable keeps what it has given to the kernel, so it loses nothing by being killed.
    """

    def __init__(self, folder: Path, *, is_durable: bool) -> None:
        self.folder = folder
        self._settings = {**SERVER_SETTINGS, **({} if is_durable else {"fsync": "off"})}
        self._lease: embedded.Server | None = None
        self.start()

    def start(self) -> None:
        self._lease = embedded.start(self.folder, settings=self._settings)

    @property
    def lease(self) -> embedded.Server:
        assert self._lease is not None
        return self._lease

    @property
    def is_up(self) -> bool:
        return self._lease is not None and is_alive(self._lease.pid)

    @property
    def log(self) -> Path:
        return self.lease.data / "server.log"

    @property
    def socket(self) -> str:
        variables = self.lease.environment()
        return f"{variables['PGHOST']}/.s.PGSQL.{variables['PGPORT']}"

    def dsn(self, dbname: str, **parts: Any) -> str:
        return make_conninfo(self.lease.dsn(dbname), **parts)

    def freeze(self) -> None:
        """Stop all of its processes where they stand."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_all(signal.SIGCONT)

    def stop(self) -> None:
        """Stop it as an operator does: `pg_ctl -m fast`."""
        self._end(signal.SIGINT)

    def stop_at_once(self) -> None:
        """Stop it without a checkpoint: `pg_ctl -m immediate`. The next start recovers."""
        self._end(signal.SIGQUIT)

    def kill(self) -> None:
        """Kill all of its processes, as a power cut does."""
        self._signal_all(signal.SIGKILL)
        self._end(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        postmaster = self.lease.pid
        for pid in (postmaster, *children_of(postmaster)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _end(self, number: signal.Signals) -> None:
        pid = self.lease.pid
        everybody = [pid, *children_of(pid)]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        wait_until(lambda: not any(map(is_alive, everybody)), 60, "the server has ended")

    def restart(self) -> None:
        if self._lease is not None:
            self._lease.close()
        self.start()

    def close(self) -> None:
        if self._lease is not None:
            self.thaw()
            with contextlib.suppress(Exception):
                self.stop_at_once()
            self._lease.close()
            self._lease = None


class Process:
    """A process of ours by its role, through all its lives; it writes one log."""

    def __init__(
        self, arena: Arena, name: str, command: list[str], dsn: str, skew_seconds: float = 0.0
    ) -> None:
        self.name = name
        self.dsn = dsn
        self.log = arena.logs / f"{name}.log"
        self.lives = 0
        # Somebody is ending it; `expected_code` is what it must end with then, if that is known.
        self.ends_expected = False
        self.expected_code: int | None = None
        self._arena = arena
        self._command = command
        self._skew_seconds = skew_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._read_to = 0
        self._events: Counter[str] = Counter()
        self._starts_before = 0
        self._began_at = 0.0
        self._has_started = False
        # Of all its lives.
        self.slowest_start_seconds = 0.0

    def start(self) -> Self:
        self.lives += 1
        self.ends_expected, self.expected_code = False, None
        self._starts_before = self.count("worker started") if self.lives > 1 else 0
        self._began_at, self._has_started = time.monotonic(), False
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PG")},
            "PGQUEUE_DSN": self.dsn,
            "FAULTS_FOLDER": str(self._arena.logs),
            "TMPDIR": str(self._arena.temporary),
        }
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        if self._skew_seconds:
            environment["FAULTS_SKEW_SECONDS"] = str(self._skew_seconds)
            paths.insert(0, str(SKEW))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def exit_code(self) -> int | None:
        """How its latest life ended; None while it lives."""
        return self._process.poll() if self._process else 0

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def has_started(self) -> bool:
        """Whether this life of a worker has got as far as claiming."""
        self.look()
        return self._has_started

    def look(self) -> None:
        """Notice when a worker has started, and how long that took."""
        if not self._has_started and self.count("worker started") > self._starts_before:
            self._has_started = True
            seconds = time.monotonic() - self._began_at
            self.slowest_start_seconds = max(self.slowest_start_seconds, seconds)

    def children(self) -> list[int]:
        return sorted(pid for pid in children_of(self.pid) if is_alive(pid))

    def tree(self) -> list[int]:
        return [self.pid, *self.children()]

    def signal(self, number: signal.Signals) -> None:
        if self.is_up:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.ends_expected = True
        self.signal(signal.SIGKILL)
        if self._process:
            self._process.wait()

    def end(self, seconds: float = 60.0) -> int | None:
        """Ask it to end and give its exit code; killed if it does not, which is None."""
        self.ends_expected = True
        if self._process is None:
            return 0
        self.signal(signal.SIGTERM)
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return None

    def count(self, event: str) -> int:
        """Count the log's lines of one event, over all lives."""
        with self.log.open("rb") as log:
            log.seek(self._read_to)
            text = log.read()
        whole, newline, _ = text.rpartition(b"\n")
        self._read_to += len(whole) + len(newline)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                self._events[json.loads(line)["event"]] += 1
        return self._events[event]

    def wait_for(self, event: str, count: int = 1, seconds: float = 120.0) -> None:
        def is_there() -> bool:
            assert self.is_up or self.count(event) >= count, f"{self.name} ended:\n{self.tail()}"
            return self.count(event) >= count

        wait_until(is_there, seconds, f"{self.name} says {event!r}; it said:\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


def log_lines(log: Path) -> Iterator[dict[str, Any]]:
    """Give the JSON lines of a log; what is no JSON is a traceback or the end of a killed writer."""
    with log.open(errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found


class Arena:
    """A folder, a server with a migrated template, and every process started in it."""

    def __init__(self, folder: Path, *, is_durable: bool = True) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.temporary = folder / "tmp"
        for made in (self.logs, self.temporary):
            made.mkdir()
            made.chmod(0o777)
        # Found by nobody: neither in a log nor on a command line.
        self.secret = f"marker-{os.urandom(8).hex()}"
        self.processes: list[Process] = []
        self.server = Server(folder / "server", is_durable=is_durable)
        try:
            self._make_template()
        except BaseException:
            self.close()
            raise

    def _make_template(self) -> None:
        with self.connect("postgres") as admin:
            admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(ROLE)))
            admin.execute(
                sql.SQL("CREATE DATABASE {} OWNER {}").format(sql.Identifier(TEMPLATE), sql.Identifier(ROLE))
            )
        upgrade(self.dsn(TEMPLATE))
        with psycopg.connect(self.dsn(TEMPLATE), autocommit=True) as connection:
            connection.execute(HISTORY.read_bytes())

    def make_database(self, name: str) -> str:
        """Make a migrated database whose history is kept, and give the DSN that workers get."""
        with self.connect("postgres") as admin:
            admin.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {} OWNER {}").format(
                    sql.Identifier(name), sql.Identifier(TEMPLATE), sql.Identifier(ROLE)
                )
            )
        return self.dsn(name)

    def dsn(self, dbname: str, **parts: Any) -> str:
        """Give a DSN for an ordinary role, with a password that must be seen nowhere."""
        return self.server.dsn(dbname, **{"user": ROLE, "password": self.secret, **parts})

    def connect(self, dbname: str, **options: Any) -> psycopg.Connection[Any]:
        """Connect as the administrator, whom no limit and no setting of the nemesis concerns."""
        settings = "-c default_transaction_read_only=off -c statement_timeout=30s -c synchronous_commit=local"
        return psycopg.connect(
            self.server.dsn(dbname, application_name="faults admin", options=settings),
            autocommit=True,
            **options,
        )

    def worker(
        self,
        name: str,
        dsn: str,
        *options: str,
        skew_seconds: float = 0.0,
        launcher: Sequence[str] = WORKER,
    ) -> Process:
        """Give a worker to be started; its clock may be wrong."""
        command = [sys.executable, *launcher, "worker", "--app", APP, "--log-format", "json", *options]
        return self._add(Process(self, name, command, dsn, skew_seconds))

    def program(self, name: str, dsn: str, *command: str) -> Process:
        return self._add(Process(self, name, [sys.executable, *command], dsn))

    def _add(self, process: Process) -> Process:
        self.processes.append(process)
        return process

    def heal_settings(self) -> None:
        with self.connect("postgres") as admin:
            for name in CHANGED_SETTINGS:
                admin.execute(sql.SQL("ALTER SYSTEM RESET {}").format(sql.Identifier(name)))
            admin.execute("SELECT pg_reload_conf()")

    def end_processes(self) -> None:
        """Kill whatever of ours still runs, frozen or not, and what it may have left."""
        for process in self.processes:
            process.kill()
        for pid in self.left_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left_processes(self) -> dict[int, str]:
        """Give the processes of ours that live, but for the server's."""
        return {
            pid: command
            for pid, command in processes_with(str(self.folder)).items()
            if "postgres" not in command.partition(" ")[0]
        }

    def close(self) -> None:
        self.end_processes()
        with contextlib.suppress(OSError, AssertionError):
            shutil.copy(self.server.log, self.logs / "server.txt")
        self.server.close()
        for pid in processes_with(str(self.folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def run_folder(*, keep: Callable[[], bool]) -> Iterator[Path]:
    """Give a folder for one run; it goes with the block, but for its logs if they are to be kept."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    folder.chmod(0o755)  # the server's account passes through
    janitor = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.janitor"],
        stdin=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        start_new_session=True,
    )
    assert janitor.stdin is not None
    with janitor.stdin as line:
        print(folder, file=line, flush=True)
        try:
            yield folder
        finally:
            if keep():
                _remove(folder / "server")
                _remove(folder / "tmp")
            else:
                _remove(folder)
            print("done", file=line, flush=True)
    janitor.wait()


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def until(predicate: Callable[[], Any], seconds: float) -> bool:
    """Say whether it came true in time."""
    end = time.monotonic() + seconds
    while not predicate():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
