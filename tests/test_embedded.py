from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import pwd
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from pgqueue import embedded
from pgqueue.errors import EmbeddedServerError
from tests.support import end, is_alive, kill, open_folder, processes_with, wait_until

IS_ROOT = os.geteuid() == 0
as_root = pytest.mark.skipif(not IS_ROOT, reason="is about what root has to do")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="is about what /proc shows")

CLIENT = """
import os, sys
from pgqueue import embedded
server = embedded.start(*sys.argv[1:])
print(server.pid, os.stat(server.data).st_uid, server.data, flush=True)
sys.stdin.readline()
print("last" if server.close() else "not last")
"""


class Client:
    """A process that starts or joins the server of a folder, and stays until told otherwise."""

    def __init__(self, folder: Path | None = None, *, prefix: tuple[str, ...] = (), **popen: object) -> None:
        command = [*prefix, sys.executable, "-c", CLIENT, *([str(folder)] if folder else [])]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen(command, text=True, **pipes, **popen)

    def report(self) -> list[str]:
        """Wait until it has the server; give the server's pid, its data folder's owner, and that folder."""
        report = self.process.stdout.readline().strip().split(maxsplit=2)
        assert report, self.process.stderr.read()
        return report

    def server_pid(self) -> int:
        return int(self.report()[0])

    def leave(self) -> bool:
        """Make it leave, and say whether it stopped the server."""
        said, complaint = self.process.communicate("\n", timeout=180)
        assert not complaint
        return said.strip() == "last"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def close(self) -> None:
        end(self.process)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()


@pytest.fixture
def client() -> Iterator[Callable[..., Client]]:
    with contextlib.ExitStack() as stack:

        def start_client(*arguments: object, **options: object) -> Client:
            started = Client(*arguments, **options)
            stack.callback(started.close)
            return started

        yield start_client


@pytest.fixture(scope="module")
def initialised() -> Iterator[Path]:
    """A data folder that was in use once; to be copied, because making one takes a second."""
    with open_folder() as folder:
        embedded.start(folder / "data").close()
        yield folder / "data"


@pytest.fixture
def empty() -> Iterator[Path]:
    """A path where no data folder is yet; no server is left on it."""
    with open_folder() as folder:
        yield folder / "data"
        embedded.stop(folder / "data")


@pytest.fixture
def data(empty: Path, initialised: Path) -> Path:
    """A data folder of this test's own; no server is left on it."""
    copy(initialised, empty)
    return empty


def copy(folder: Path, to: Path) -> None:
    subprocess.run(["cp", "-a", folder, to], check=True)  # with its owner, unlike shutil


def run_python(text: str, *arguments: object, prefix: tuple[str, ...] = (), **options: object) -> str:
    command = [*prefix, sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)]
    ended = subprocess.run(command, text=True, capture_output=True, timeout=240, check=False, **options)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def value(dsn: str, query: str) -> object:
    with psycopg.connect(dsn) as conn:
        return conn.execute(query).fetchone()[0]


# Sharing.


def test_eight_processes_starting_at_once_get_one_server_and_stop_it_once(empty, client):
    clients = [client(empty) for _ in range(8)]
    pids = {each.server_pid() for each in clients}
    used_by = embedded.status(empty).clients

    stops = [each.leave() for each in clients]

    assert len(pids) == 1
    assert used_by is None or sorted(used_by) == sorted(each.process.pid for each in clients)
    assert stops == [False] * 7 + [True]
    log = embedded.status(empty).data.joinpath("server.log").read_text()
    assert log.count("starting PostgreSQL") == log.count("database system is shut down") == 1


def test_the_last_one_out_stops_the_server_and_nothing_of_it_is_left(data):
    server = embedded.start(data)
    assert value(server.dsn(), "SHOW listen_addresses") == ""

    assert server.close()

    assert embedded.status(data).state == "stopped"
    assert not processes_with(str(data))
    assert not list(data.rglob(".s.PGSQL*"))
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(server.dsn())


def test_a_second_lease_in_the_same_process_keeps_the_server_up(data):
    first, second = embedded.start(data), embedded.start(data)

    assert not first.close()
    assert value(second.dsn(), "SELECT 1") == 1

    assert second.close()
    assert not second.close()


def test_the_lease_is_given_back_at_the_end_of_a_process_that_forgot_it(data):
    run_python("import sys; from pgqueue import embedded; server = embedded.start(sys.argv[1])", data)

    assert embedded.status(data).state == "stopped"


def test_a_killed_client_does_not_keep_the_server_up(data, client):
    killed, staying = client(data), client(data)
    assert killed.server_pid() == staying.server_pid()

    killed.kill()

    assert staying.leave()
    assert embedded.status(data).state == "stopped"


def test_a_server_whose_only_client_was_killed_is_joined_and_stopped_by_the_next_one(data, client):
    killed = client(data)
    pid = killed.server_pid()
    killed.kill()

    following = client(data)

    assert following.server_pid() == pid
    assert following.leave()


def test_a_program_started_by_a_client_holds_no_lease(data):
    server = embedded.start(data)
    child = subprocess.Popen(["sleep", "60"], close_fds=False)

    try:
        assert server.close()
    finally:
        end(child)


def test_a_forked_child_keeps_the_server_up_after_its_parent_left(data):
    said = run_python(
        """
        import os, sys
        from pgqueue import embedded
        server = embedded.start(sys.argv[1])
        ready, go = os.pipe(), os.pipe()
        if os.fork() == 0:
            os.read(go[0], 1)
            os.write(ready[1], b"%d" % server.close())
            os._exit(0)
        parent = server.close()
        os.write(go[1], b"x")
        print(int(parent), os.read(ready[0], 1).decode())
        os.wait()
        """,
        data,
    )

    assert said == "0 1"


@on_linux
def test_joining_starts_no_program(data, monkeypatch):
    monkeypatch.delenv("PGQUEUE_PG_BINDIR", raising=False)
    with embedded.start(data):
        started = run_python(
            """
            import sys
            from pgqueue import embedded
            started = []
            sys.addaudithook(lambda event, arguments: started.append(event) if "Popen" in event else None)
            embedded.start(sys.argv[1]).close()
            print(started)
            """,
            data,
        )

    assert started == "[]"


def test_a_kept_server_stays_up_without_clients_until_it_is_stopped(data, client):
    assert not embedded.start(data, is_kept=True).close()
    visitor = client(data)
    pid = visitor.server_pid()
    assert not visitor.leave()
    assert embedded.status(data).pid == pid

    assert embedded.stop(data)

    assert embedded.status(data).state == "stopped"
    assert not embedded.status(data).is_kept
    assert not embedded.stop(data)


def test_stop_does_not_ask_the_clients(data, client):
    staying = client(data)
    staying.server_pid()

    assert embedded.stop(data)

    assert embedded.status(data).state == "stopped"
    assert not staying.leave()


# Kills.


def test_every_acknowledged_row_is_there_after_the_server_was_killed(data):
    server = embedded.start(data)
    acknowledged: list[int] = []

    def insert() -> None:
        with (
            contextlib.suppress(psycopg.OperationalError),
            psycopg.connect(server.dsn(), autocommit=True) as conn,
        ):
            conn.execute("CREATE TABLE kept (id int PRIMARY KEY)")
            for number in range(1_000_000):
                conn.execute("INSERT INTO kept VALUES (%s)", [number])
                acknowledged.append(number)

    writer = threading.Thread(target=insert)
    writer.start()
    wait_until(lambda: len(acknowledged) > 200, 60, "rows are acknowledged")

    os.kill(server.pid, signal.SIGKILL)

    with embedded.start(data) as again, psycopg.connect(again.dsn()) as conn:
        writer.join()
        kept = [number for (number,) in conn.execute("SELECT id FROM kept ORDER BY id")]
        assert conn.execute("SHOW fsync").fetchone() == ("on",)
    server.close()
    assert kept[: len(acknowledged)] == acknowledged
    assert len(kept) - len(acknowledged) in {0, 1}


@on_linux
def test_a_killed_server_that_nobody_reaps_does_not_prevent_a_start(data):
    said = run_python(
        """
        import ctypes, os, signal, sys
        from pgqueue import embedded

        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: its orphans become ours, and we never reap
        first = embedded.start(sys.argv[1])
        os.kill(first.pid, signal.SIGKILL)
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # dead, and left a zombie
        with embedded.start(sys.argv[1]) as second:
            os.kill(first.pid, 0)
            print(embedded.status(sys.argv[1]).pid == second.pid != first.pid)
        first.close()
        """,
        data,
    )

    assert said == "True"


@on_linux
def test_a_stranger_that_has_the_old_servers_pid_does_not_prevent_a_start(data):
    folder = embedded.status(data).data
    stranger = subprocess.Popen(["sleep", "60"])
    stale = f"{stranger.pid}\n{folder}\n1700000000\n5432\n{folder}\n\n  1234567         0\nready   \n"
    (folder / "postmaster.pid").write_text(stale)
    (folder / ".s.PGSQL.5432.lock").write_text(stale)

    try:
        assert embedded.status(data).state == "stopped"
        with embedded.start(data) as server:
            assert value(server.dsn(), "SELECT 1") == 1
    finally:
        is_unharmed = stranger.poll() is None
        end(stranger)
    assert is_unharmed


@on_linux
def test_a_server_at_the_same_path_in_a_container_is_a_stranger(data, tmp_path):
    # To the host a container's server looks like this: the same arguments, in another folder.
    folder = embedded.status(data).data
    command = [sys.executable, "-c", "import time; time.sleep(60)", "-D", folder]
    stranger = subprocess.Popen(command, cwd=tmp_path)

    try:
        with embedded.start(data) as server:
            assert value(server.dsn(), "SELECT 1") == 1
        assert embedded.status(data).state == "stopped"
    finally:
        is_unharmed = stranger.poll() is None
        end(stranger)
    assert is_unharmed


@on_linux
def test_a_backend_that_outlives_its_killed_server_is_ended_before_the_next_start(data, connect):
    server = embedded.start(data)
    busy = connect(server.dsn())
    backend = busy.info.backend_pid
    busy.pgconn.send_query(b"DO 'BEGIN LOOP END LOOP; END'")
    kill(server.pid)
    assert is_alive(backend)

    with embedded.start(data) as again:
        is_ended = not is_alive(backend)
        kill(backend)
        assert is_ended
        assert value(again.dsn(), "SELECT 1") == 1
    server.close()


def test_a_client_killed_in_the_middle_of_initdb_harms_nobody(empty, client):
    killed = client(empty)
    (made, *_) = wait_until(lambda: [*empty.glob("pg*.init/base")], message="initdb is at work")
    killed.kill()
    orphans = processes_with(str(made.parent))
    send(signal.SIGSTOP, *orphans)
    assert embedded.status(empty).state == "absent"

    # An initdb that lost its client goes on. Nobody may redo its work until it has ended.
    (lock,) = empty.glob("pg*.lock")
    with lock.open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    following = client(empty)
    send(signal.SIGCONT, *orphans)

    following.server_pid()
    assert orphans
    assert value(embedded.status(empty).dsn, "SELECT current_database()") == "pgqueue"
    assert following.leave()
    assert not made.parent.exists()


def send(number: signal.Signals, *pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# Folders.


def test_a_server_reached_by_two_paths_is_one_server(data):
    other = data.with_name("other")
    other.symlink_to(data)

    with embedded.start(data) as server, embedded.start(other) as same:
        assert same.pid == server.pid
    assert embedded.status(other).state == "stopped"


@pytest.mark.parametrize("name", ["it's a path", '`"$HOME" \\ü`', "long" * 30])
def test_any_path_will_do(initialised, name):
    with open_folder() as folder:
        copy(initialised, folder / name)
        elsewhere = set(folder.parent.iterdir())

        with embedded.start(folder / name) as server:
            assert value(server.dsn(), "SHOW data_directory") == str(server.data)

        assert set(folder.parent.iterdir()) == elsewhere


def test_an_existing_folder_for_the_socket_is_refused_if_it_is_not_ours(data):
    odd = data.with_name("odd name")
    data.rename(odd)
    with embedded.start(odd) as server:
        socket_folder = Path(server.environment()["PGHOST"])
    target = data.with_name("target")
    target.mkdir()
    socket_folder.symlink_to(target)

    try:
        with pytest.raises(EmbeddedServerError, match="is not ours"):
            embedded.start(odd)
    finally:
        socket_folder.unlink()
        odd.rename(data)


def test_data_of_a_version_without_programs_is_not_passed_over(empty, monkeypatch):
    monkeypatch.delenv("PGQUEUE_PG_BINDIR", raising=False)
    old = empty / "pg13"
    old.mkdir(parents=True)
    (old / "PG_VERSION").write_text("13\n")

    with pytest.raises(EmbeddedServerError) as refusal:
        embedded.start(empty)

    assert f"the data in {old} was made by PostgreSQL 13, and here is only PostgreSQL" in str(refusal.value)
    assert [*empty.glob("pg*")] == [old, *empty.glob("pg13.*")]


def test_pgqueue_pg_bindir_decides_and_is_refused_when_it_is_empty(empty, monkeypatch):
    (preferred, *_) = embedded.installs()
    monkeypatch.setenv("PGQUEUE_PG_BINDIR", str(preferred.bindir))
    (asked_for,) = embedded.installs()
    assert (asked_for.origin, asked_for.version) == ("PGQUEUE_PG_BINDIR", preferred.version)
    empty.mkdir()
    monkeypatch.setenv("PGQUEUE_PG_BINDIR", str(empty))

    with pytest.raises(EmbeddedServerError, match=f"PGQUEUE_PG_BINDIR={empty} holds no usable PostgreSQL"):
        embedded.start(empty)


def test_pgqueue_pg_bindir_does_not_start_afresh_beside_existing_data(empty, monkeypatch):
    (preferred, *_) = embedded.installs()
    monkeypatch.setenv("PGQUEUE_PG_BINDIR", str(preferred.bindir))
    (empty / "pg13").mkdir(parents=True)
    (empty / "pg13/PG_VERSION").write_text("13\n")

    with pytest.raises(
        EmbeddedServerError, match=f"made by PostgreSQL 13, not by PostgreSQL {preferred.version}"
    ):
        embedded.start(empty)


def test_the_default_folder_is_pgqueue_datas_else_the_users_own(monkeypatch, tmp_path):
    monkeypatch.setenv("PGQUEUE_DATA", str(tmp_path))
    assert embedded.default_data() == tmp_path

    monkeypatch.delenv("PGQUEUE_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))

    assert embedded.default_data() == (Path("/var/lib/pgqueue") if IS_ROOT else tmp_path / "pgqueue")


def test_a_folder_that_cannot_be_made_is_one_clear_sentence(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(EmbeddedServerError, match=f"cannot use {tmp_path}/file/data: Not a directory"):
        embedded.start(tmp_path / "file" / "data")


def test_a_server_that_does_not_start_says_what_its_log_says(data):
    with pytest.raises(EmbeddedServerError) as refusal:
        embedded.start(data, settings={"max_connections": "many"})

    assert 'invalid value for parameter "max_connections": "many"' in str(refusal.value)
    assert "server.log" in str(refusal.value)
    assert embedded.status(data).state == "stopped"


def test_settings_are_taken_as_they_are(data):
    with embedded.start(
        data, settings={"log_line_prefix": "it's 100 % \\ ", "max_connections": 20}
    ) as server:
        assert value(server.dsn(), "SHOW log_line_prefix") == "it's 100 % \\ "
        assert value(server.dsn(), "SHOW max_connections") == "20"


# Throwaway servers.


def test_a_throwaway_server_takes_its_folder_along():
    with embedded.start(throwaway=True) as server:
        folder = server.data.parent
        assert value(server.dsn(), "SHOW fsync") == "off"
        assert embedded.status(folder).state == "running"

    assert not folder.exists()
    assert not processes_with(str(folder))


def test_a_throwaway_server_is_removed_by_the_next_one_if_all_its_clients_were_killed():
    pid, folder = run_python(
        """
        import os
        from pgqueue import embedded
        server = embedded.start(throwaway=True)
        print(server.pid, server.data.parent, flush=True)
        os._exit(0)
        """
    ).split()
    an_hour_ago = Path(folder).stat().st_mtime - 3600
    os.utime(folder, (an_hour_ago, an_hour_ago))

    with embedded.start(throwaway=True) as used:
        assert not Path(folder).exists()
        assert not is_alive(int(pid))

        os.utime(used.data.parent, (an_hour_ago, an_hour_ago))
        with embedded.start(throwaway=True):
            assert value(used.dsn(), "SELECT 1") == 1


# Accounts.


def in_user_namespace(account: pwd.struct_passwd) -> tuple[str, ...]:
    program = Path(embedded.__file__).with_name("namespace.py")
    return (sys.executable, "-I", "-S", str(program), str(account.pw_uid), str(account.pw_gid))


@pytest.fixture
def ordinary_user() -> dict[str, object]:
    """Options for a client that runs as an ordinary user: not root, no capability, a home of its own."""
    if not IS_ROOT:
        return {}
    nobody = pwd.getpwnam("nobody")
    # Root's virtual environment is mostly closed to others. The second way is still root for the
    # file system, and for everything else a user like any other.
    plain = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    for options in (plain, {"prefix": in_user_namespace(nobody)}):
        with contextlib.suppress(OSError, AssertionError):
            run_python("import pgqueue.embedded, psycopg", **options)
            return options
    pytest.skip(f"{nobody.pw_name} cannot be made to read {sys.executable}")


def test_an_ordinary_user_needs_no_privilege_and_no_configuration(client, ordinary_user):
    with open_folder() as home:
        home.chmod(0o777)
        environment = {name: text for name, text in os.environ.items() if not name.startswith(("PG", "XDG_"))}
        user = client(**ordinary_user, env={**environment, "HOME": str(home)}, cwd="/")

        _, owner, folder = user.report()

        assert int(owner) == (pwd.getpwnam("nobody").pw_uid if IS_ROOT else os.geteuid())
        assert Path(folder).parent == home / ".local/share/pgqueue"
        assert Path(folder).stat().st_mode & 0o777 == 0o700
        assert user.leave()


@as_root
@on_linux
def test_root_runs_the_server_in_a_user_namespace_and_its_files_stay_roots(data):
    nobody = pwd.getpwnam("nobody")
    if subprocess.run([*in_user_namespace(nobody), "/bin/true"], capture_output=True, check=False).returncode:
        pytest.skip("user namespaces are refused here")
    with embedded.start(data) as server:
        process = Path(f"/proc/{server.pid}")

        assert process.stat().st_uid == 0
        assert (process / "uid_map").read_text().split() == [str(nobody.pw_uid), "0", "1"]
    assert {path.stat().st_uid for path in data.rglob("*")} == {0}


def refuse_user_namespaces() -> None:
    """Make unshare() and clone() of namespaces fail with EPERM, as Docker does: a seccomp filter."""
    unshare = {"x86_64": 272, "aarch64": 97}[platform.machine()]
    # Load the number of the system call; equal: return ERRNO|EPERM; else: return ALLOW.
    program = [(0x20, 0, 0, 0), (0x15, 0, 1, unshare), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    code = b"".join(
        op.to_bytes(2, "little") + bytes([yes, no]) + operand.to_bytes(4, "little")
        for op, yes, no, operand in program
    )
    buffer = ctypes.create_string_buffer(code)

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_void_p))

    given = Filter(len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.byref(given), 0, 0) == 0  # PR_SET_SECCOMP


@as_root
@on_linux
@pytest.mark.skipif(platform.machine() not in {"x86_64", "aarch64"}, reason="knows no number of unshare here")
def test_root_takes_another_account_where_user_namespaces_are_refused(empty, client):
    confined = client(empty, preexec_fn=refuse_user_namespaces)
    pid, owner, _ = confined.report()
    account = pwd.getpwuid(int(owner))

    assert account.pw_name in {"postgres", "nobody"}
    assert Path(f"/proc/{pid}").stat().st_uid == account.pw_uid
    assert value(embedded.status(empty).dsn, "SELECT 1") == 1
    assert confined.leave()

    # The data has its owner now, also where namespaces are allowed.
    with embedded.start(empty) as server:
        assert Path(f"/proc/{server.pid}").stat().st_uid == account.pw_uid


@as_root
def test_the_account_that_cannot_enter_the_data_folder_is_named(client):
    with open_folder() as folder:
        folder.chmod(0o700)

        confined = client(folder / "data", preexec_fn=refuse_user_namespaces)
        _, complaint = confined.process.communicate(timeout=180)

        assert re.search(r"would run as (postgres|nobody), who cannot enter", complaint)


@as_root
def test_no_mode_of_an_existing_folder_is_changed(data):
    before = {path: path.stat().st_mode for path in [*Path(sys.executable).parents, *data.parents]}

    embedded.start(data).close()

    assert {path: path.stat().st_mode for path in before} == before
