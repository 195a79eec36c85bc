"""A PostgreSQL server of one's own, for trying out and for tests: nothing to install or to set up.

Whoever needs it starts it or joins it, and the last one out stops it, unless `pgqueue db start`
asked that it stays. Clients may be killed at any instant, and so may the server: what was
acknowledged is there again after the next start. It listens on a socket in its own folder, never
on a port.

An application in production is given a DSN and never comes here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from pgqueue.embedded.cluster import DATABASE, USER, Settings, launch
from pgqueue.embedded.folder import DataFolder, Postmaster
from pgqueue.embedded.programs import Install, chosen_install, find_install, find_psql, installs, version_of
from pgqueue.errors import EmbeddedServerError

__all__ = [
    "Install",
    "Server",
    "Status",
    "default_data",
    "find_psql",
    "installs",
    "start",
    "status",
    "stop",
    "version_of",
]

# Quick, and lost when the machine is: for data nobody will miss.
THROWAWAY_SETTINGS: Settings = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": 0,
    "autovacuum": "off",
}
THROWAWAY_PREFIX = "pgqueue-throwaway-"


def default_data() -> Path:
    """Give the folder the server's data lives in unless told otherwise."""
    if chosen := os.environ.get("PGQUEUE_DATA"):
        return Path(chosen)
    if os.geteuid() == 0:
        return Path("/var/lib/pgqueue")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "pgqueue"


class Server:
    """This process's lease on a running server, made by `start`.

    A forked child shares the lease: the server stays up until the last of them has left.
    """

    def __init__(self, folder: DataFolder, postmaster: Postmaster, *, is_throwaway: bool) -> None:
        self._folder = folder
        self._postmaster = postmaster
        self._is_throwaway = is_throwaway
        self._is_closed = False
        self._lease: int | None = folder.take_lease()
        atexit.register(self.close)

    @property
    def data(self) -> Path:
        """The server's data folder."""
        return self._folder.path

    @property
    def pid(self) -> int:
        return self._postmaster.pid

    @property
    def version(self) -> str:
        """The server's version, as in "18.6"."""
        return _version(self._folder)

    def dsn(self, dbname: str = DATABASE) -> str:
        """Give the DSN of a database on this server."""
        return _dsn(self._postmaster, dbname)

    def environment(self) -> dict[str, str]:
        """Give the variables that lead libpq's programs to this server."""
        return {
            "PGHOST": self._postmaster.socket_folder,
            "PGPORT": str(self._postmaster.port),
            "PGUSER": USER,
            "PGDATABASE": DATABASE,
        }

    def close(self) -> bool:
        """Give the lease back, and say whether we were the last one out and so stopped the server."""
        if self._is_closed:
            return False
        if self._lease is not None:
            lease, self._lease = self._lease, None
            os.close(lease)
        is_stopped = False
        # Not found: somebody deleted it all, and what no longer has its files stops by itself.
        with _readable_errors(), contextlib.suppress(FileNotFoundError), self._folder.locked():
            if not self._folder.is_kept and not self._folder.has_clients():
                is_stopped = self._folder.stop(at_once=self._is_throwaway)
                if self._is_throwaway:
                    shutil.rmtree(self._folder.path.parent, ignore_errors=True)
        # Only now: what an interrupt kept us from, the end of the process does.
        self._is_closed = True
        atexit.unregister(self.close)
        return is_stopped

    def stop(self) -> None:
        """Stop the server now, whoever uses it, and keep it up no longer."""
        with _readable_errors(), self._folder.locked():
            self._folder.release()
            self._folder.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Status:
    """What is known about the server of a data folder.

    `state` is running, starting, stopping, stopped, or absent when there is no data yet.
    `clients` are the processes that hold a lease; None where the kernel does not tell.
    """

    state: str
    data: Path
    version: str | None
    dsn: str | None
    pid: int | None
    clients: list[int] | None
    is_kept: bool


def start(
    data: Path | str | None = None,
    *,
    throwaway: bool = False,
    is_kept: bool = False,
    settings: Settings | None = None,
) -> Server:
    """Start the server of this data folder, or join it if it runs already.

    The lease is given back by `close`, at the end of a `with`, or at the end of this process,
    however that comes. `is_kept` asks that the server stays up without clients until `stop`.
    `settings` count only if this call is the one that starts the server. A `throwaway` server has
    quick and unsafe settings and a temporary folder, which goes when the last client does.

    Raises:
        EmbeddedServerError: there is no PostgreSQL, no permission, or the server does not start.
    """
    if throwaway and (data is not None or is_kept):
        raise ValueError("a throwaway server has a temporary data folder and is never kept")
    with _readable_errors():
        base = _throwaway_folder() if throwaway else _base(data)
        every_setting = {**(THROWAWAY_SETTINGS if throwaway else {}), **(settings or {})}
        try:
            if not base.exists():
                base.mkdir(parents=True, exist_ok=True)
                base.chmod(0o755)  # whatever the umask: the account that runs the server passes through
            path, install = _choose(base)
            folder = DataFolder(path)
            with folder.locked() as lock:
                postmaster = folder.settle()
                if postmaster is None:
                    install = install or find_install(_major(path), needed_by=path)
                    postmaster = launch(folder, install, every_setting, lock)
                if is_kept:
                    folder.keep()
                return Server(folder, postmaster, is_throwaway=throwaway)
        except BaseException:
            if throwaway:
                shutil.rmtree(base, ignore_errors=True)
            raise


def stop(data: Path | str | None = None) -> bool:
    """Stop the server of this data folder, whoever uses it, and say whether it ran.

    Raises:
        EmbeddedServerError: it is not ours to stop, or does not end.
    """
    with _readable_errors():
        was_up = False
        for path in _existing(_base(data)):
            folder = DataFolder(path)
            with folder.locked():
                folder.release()
                was_up |= folder.stop()
        return was_up


def status(data: Path | str | None = None) -> Status:
    """Say what is known about the server of this data folder, and change nothing.

    Raises:
        EmbeddedServerError: the folder cannot be read.
    """
    with _readable_errors():
        base = _base(data)
        found = _existing(base)
        if not found:
            return Status("absent", base, None, None, None, [], is_kept=False)
        folder = DataFolder(found[-1])
        version, clients, is_kept = _version(folder), folder.clients(), folder.is_kept
        postmaster = folder.postmaster()
        if postmaster is None:
            return Status("stopped", folder.path, version, None, None, clients, is_kept)
        state = "running" if postmaster.is_ready else postmaster.status
        dsn = _dsn(postmaster, DATABASE)
        return Status(state, folder.path, version, dsn, postmaster.pid, clients, is_kept)


def _choose(base: Path) -> tuple[Path, Install | None]:
    """Choose the server's folder by the data that is there, so that an upgrade never hides jobs.

    The install is left open for existing data: joining a server that runs needs no binaries.
    """
    existing = _existing(base)
    install = chosen_install()
    if not existing:
        install = install or find_install()
        return base / f"pg{install.major}", install
    path = existing[-1]
    if install and install.major != _major(path):
        raise EmbeddedServerError(
            f"the data in {path} was made by PostgreSQL {_major(path)}, not by {install}; "
            "use those programs, or another folder (PGQUEUE_DATA)"
        )
    return path, install


def _throwaway_folder() -> Path:
    fresh = Path(tempfile.mkdtemp(prefix=THROWAWAY_PREFIX))
    fresh.chmod(0o755)
    for left in fresh.parent.glob(f"{THROWAWAY_PREFIX}*"):
        with contextlib.suppress(OSError, EmbeddedServerError):
            _remove_abandoned(left, fresh)
    return fresh


def _remove_abandoned(left: Path, fresh: Path) -> None:
    """Remove a throwaway server whose clients were all killed: nobody would ever join it again."""
    ours, theirs = fresh.stat(), left.stat()
    # A minute's grace for a folder just made, whose lock is not taken yet.
    if theirs.st_uid != ours.st_uid or ours.st_mtime - theirs.st_mtime < 60:
        return
    for lock in left.glob("pg*.lock"):
        folder = DataFolder(lock.with_suffix(""))
        with folder.locked(timeout_seconds=0):
            if folder.has_clients():
                return
            folder.stop(at_once=True)
    shutil.rmtree(left, ignore_errors=True)


def _base(data: Path | str | None) -> Path:
    return Path(data or default_data()).resolve()


def _existing(base: Path) -> list[Path]:
    found = [path for path in base.glob("pg*") if re.fullmatch(r"pg\d+", path.name)]
    return sorted((path for path in found if DataFolder(path).exists), key=_major)


def _version(folder: DataFolder) -> str:
    program = folder.program()
    return (version_of(program) if program else None) or str(_major(folder.path))


def _major(path: Path) -> int:
    return int(path.name.removeprefix("pg"))


def _dsn(postmaster: Postmaster, dbname: str) -> str:
    def quoted(value: str) -> str:
        return value if re.fullmatch(r"[\w./-]+", value) else "'" + re.sub(r"(['\\])", r"\\\1", value) + "'"

    host = quoted(postmaster.socket_folder)
    return f"host={host} port={postmaster.port} user={USER} dbname={quoted(dbname)}"


@contextlib.contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" {error.filename}" if error.filename else " the server's data folder"
        raise EmbeddedServerError(f"cannot use{where}: {error.strerror}") from error
