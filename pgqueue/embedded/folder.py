"""One server's data folder: who uses it, whether its server lives, and how that ends.

Nothing here believes a file alone. A client is a lock the kernel drops when its process ends; a
server is a process seen to live, or a socket that answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import signal
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pgqueue.errors import EmbeddedServerError

# Crash recovery replays at most max_wal_size, but on a slow disk that takes its time.
START_SECONDS = 600.0
STOP_SECONDS = 60.0
ORPHAN_SECONDS = 2.0
MAX_SOCKET_BYTES = 100
SSL_REQUEST = struct.pack("!ii", 8, 80877103)  # a server answers it with one byte, whatever its state


@dataclass(frozen=True, slots=True)
class Postmaster:
    """What a server wrote about itself into postmaster.pid."""

    pid: int
    port: int
    socket_folder: str
    status: str

    @property
    def is_ready(self) -> bool:
        return self.status in {"ready", "standby"}

    def answers(self) -> bool:
        """Say whether a server answers on its socket, one in another container included.

        That somebody accepts the connection is not enough: for a moment the kernel still does so
        for a server just killed.
        """
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(2)
            try:
                probe.connect(f"{self.socket_folder}/.s.PGSQL.{self.port}")
                probe.sendall(SSL_REQUEST)
                return probe.recv(1) != b""
            except TimeoutError:
                return True
            except OSError:
                return False


class DataFolder:
    """A server's data folder (`pg18`) and the files beside it: `.lock`, `.users`, `.keep`, `.init`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:10]
        # Carried in the title of each of the server's processes, where everyone may read it.
        self.cluster_name = f"pgqueue-{digest}"

    def beside(self, ending: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{ending}")

    # Locks and leases.

    @contextlib.contextmanager
    def locked(self, timeout_seconds: float = START_SECONDS + STOP_SECONDS) -> Iterator[int]:
        """Be the only one who starts, joins, leaves or stops this server; gives the lock's descriptor."""
        lock = os.open(self.beside("lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _poll(lambda: _try_lock(lock), timeout_seconds):
                raise EmbeddedServerError(
                    f"another process has been starting or stopping the server of {self.path} "
                    f"for {timeout_seconds:g} s; try again"
                )
            yield lock
        finally:
            os.close(lock)

    def take_lease(self) -> int:
        """Count as a client until the descriptor is closed, by us or by the end of this process."""
        lease = os.open(self.beside("users"), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lease, fcntl.LOCK_SH)
        return lease

    def has_clients(self) -> bool:
        """Say whether any process holds a lease; ask only while holding the lock."""
        probe = os.open(self.beside("users"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            return not _try_lock(probe)
        finally:
            os.close(probe)

    def clients(self) -> list[int] | None:
        """List the processes that hold a lease, or None where the kernel does not tell."""
        # Trying the lock would tell everywhere, but a client leaving at that moment would take us
        # for another one and leave the server up.
        try:
            held = Path("/proc/locks").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        try:
            inode = self.beside("users").stat().st_ino
        except FileNotFoundError:
            return []
        pattern = re.compile(rf"\d+: FLOCK +\S+ +READ +(\d+) [^ ]*:{inode} ")
        return sorted({int(found[1]) for line in held if (found := pattern.match(line))})

    @property
    def is_kept(self) -> bool:
        """Whether somebody asked that the server stays up without clients."""
        return self.beside("keep").exists()

    def keep(self) -> None:
        self.beside("keep").touch()

    def release(self) -> None:
        self.beside("keep").unlink(missing_ok=True)

    # The server's process.

    def postmaster(self) -> Postmaster | None:
        """Give the server that lives on this folder, or None: neither a stale file nor a zombie is one."""
        found = self._postmaster_file()
        if found and (self._lives(found.pid) or found.answers()):
            return found
        return None

    def settle(self, launched: int | None = None) -> Postmaster | None:
        """Wait for what is under way here; give the server that takes connections then, or None.

        Under way is a server that starts, recovers or stops, and one just launched (`launched` is
        its pid) that has not written about itself yet, if only by somebody killed meanwhile.

        Raises:
            EmbeddedServerError: it takes longer than ten minutes.
        """
        found: Postmaster | None = None

        def is_settled() -> bool:
            nonlocal found
            found = self.postmaster()
            if found is None:
                return not self._is_launched(launched)
            # Ask it: one that is being killed at this moment still looks alive and ready.
            return found.is_ready and found.answers()

        if not _poll(is_settled, START_SECONDS):
            raise EmbeddedServerError(f"the server of {self.path} is not ready after {START_SECONDS:g} s")
        return found

    def stop(self, *, at_once: bool = False) -> bool:
        """Stop the server and say whether there was one; `at_once` leaves the rest to crash recovery.

        Raises:
            EmbeddedServerError: it is not ours to stop, or does not end.
        """
        found = self.postmaster()
        if found is None:
            return False
        if not self._lives(found.pid):
            raise EmbeddedServerError(
                f"the server of {self.path} answers, but its process {found.pid} cannot be seen from here; "
                "stop it where it was started"
            )
        try:
            os.kill(found.pid, signal.SIGQUIT if at_once else signal.SIGINT)
            if not _poll(lambda: not self._processes(found.pid), STOP_SECONDS):
                os.kill(found.pid, signal.SIGQUIT)
                self._end_orphans(found.pid)
        except ProcessLookupError:
            self._end_orphans(found.pid)
        except PermissionError as error:
            raise EmbeddedServerError(
                f"the server of {self.path} (process {found.pid}) belongs to another user"
            ) from error
        self.remove_socket_folder(Path(found.socket_folder))
        return True

    def clear_stale(self) -> None:
        """Remove what a killed server left, so that a new one may start.

        The new server itself asks only whether a process of that number exists. A zombie answers,
        and so does a stranger that got the number after a reboot: in a container whose first
        process never reaps, a killed server could not be started again.
        """
        found = self._postmaster_file()
        if found is None:
            return
        self._end_orphans(found.pid)
        if _sees_processes():  # else we know no better than the server itself
            Path(found.socket_folder, f".s.PGSQL.{found.port}.lock").unlink(missing_ok=True)
            (self.path / "postmaster.pid").unlink(missing_ok=True)

    def _end_orphans(self, pid: int) -> None:
        # A backend busy with a long statement outlives its postmaster, and no new server may touch
        # the files while it does.
        if _poll(lambda: not self._processes(pid), ORPHAN_SECONDS):
            return
        for orphan in self._processes(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGQUIT)
        if not _poll(lambda: not self._processes(pid), STOP_SECONDS):
            left = ", ".join(map(str, self._processes(pid)))
            raise EmbeddedServerError(f"processes of a server of {self.path} do not end: {left}")

    def _is_launched(self, pid: int | None) -> bool:
        # The one just launched by its number: in the middle of exec a process has no command line.
        if pid is not None and _exists(pid):
            return True
        # A backend that outlived its server is not under way to anything.
        return _sees_processes() and any(
            self._is_ours(found) and not _command(found)[0].startswith("postgres: ") for found in _every_pid()
        )

    def _lives(self, pid: int) -> bool:
        """Say whether `pid` is this server's postmaster and alive."""
        return self._is_ours(pid) if _sees_processes() else _exists(pid)

    def _processes(self, pid: int) -> list[int]:
        """List this server's living processes; where there is no /proc, `pid` alone if it exists."""
        if not _sees_processes():
            return [pid] if _exists(pid) else []
        return list(filter(self._is_ours, _every_pid()))

    def _is_ours(self, pid: int) -> bool:
        """Say whether a process belongs to this server, from its launch on.

        A server works in its data folder, whatever path leads there. The path alone says nothing:
        on a host one also sees the processes of containers, where the same path is another folder.
        """
        command = _command(pid)
        # The shell and the namespace through which it is launched carry its arguments already.
        is_named = command[0].startswith(f"postgres: {self.cluster_name}: ") or (
            "-D" in command and str(self.path) in command
        )
        is_postgres = command[0].startswith("postgres: ") or Path(command[0]).name in {
            "postgres",
            "postmaster",
        }
        if not (is_named or is_postgres):
            return False
        try:
            works_in = Path(f"/proc/{pid}/cwd").stat()
        except OSError:  # another account's, and we have no right to look
            return is_named
        if self.path.exists() and os.path.samestat(works_in, self.path.stat()):
            return True
        return is_named and os.path.samestat(works_in, Path("/").stat())

    def _postmaster_file(self) -> Postmaster | None:
        try:
            lines = (self.path / "postmaster.pid").read_text(encoding="utf-8").splitlines()
            pid, port = int(lines[0]), int(lines[3])
        except (OSError, ValueError, IndexError):
            return None
        lines += [""] * 8
        return Postmaster(pid, port, lines[4], lines[7].strip() or "starting")

    # Its files.

    @property
    def log(self) -> Path:
        return self.path / "server.log"

    @property
    def exists(self) -> bool:
        return (self.path / "PG_VERSION").exists()

    def program(self) -> Path | None:
        """Give the path of the `postgres` that ran on this folder last, or None if none ever did."""
        try:
            started = (self.path / "postmaster.opts").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return Path(started.partition(' "')[0].strip())

    def socket_folder(self) -> Path:
        """Give where the server's socket goes: the data folder, unless its path is too long or too odd."""
        if _takes_a_socket(self.path):
            return self.path
        name = f"{self.cluster_name}-{os.geteuid()}"
        folder = Path(tempfile.gettempdir(), name)
        if not _takes_a_socket(folder):
            folder = Path("/tmp", name)  # noqa: S108  nobody else's: looked at below
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in {os.geteuid(), self.path.stat().st_uid}:
            raise EmbeddedServerError(f"{folder} is needed for the server's socket, and is not ours")
        folder.chmod(0o700)
        return folder

    def remove_socket_folder(self, folder: Path) -> None:
        """Remove the folder the server's socket was in, if it was made for that alone."""
        if folder.name.startswith(self.cluster_name):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _takes_a_socket(folder: Path) -> bool:
    text = os.fsencode(folder / ".s.PGSQL.5432.lock")
    return len(text) <= MAX_SOCKET_BYTES and re.fullmatch(rb"[\w./-]+", text) is not None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _poll(is_done: Callable[[], bool], timeout_seconds: float) -> bool:
    end = time.monotonic() + timeout_seconds
    while not is_done():
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True


def _sees_processes() -> bool:
    return Path("/proc/self/cmdline").exists()


def _every_pid() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _command(pid: int) -> list[str]:
    """Give a process's command line; a zombie has an empty one, and so has a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        text = b""
    return os.fsdecode(text).split("\0")


def _exists(pid: int) -> bool:
    """Say whether there is such a process; where /proc tells, a zombie is none."""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        return state not in {"Z", "X"}
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
