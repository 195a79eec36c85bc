"""Make a data folder and start the server on it; the caller holds the folder's lock."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from pgqueue.embedded.folder import DataFolder, Postmaster
from pgqueue.embedded.programs import Account, Install, no_entry, programs_for, telling_line
from pgqueue.errors import EmbeddedServerError

Settings = Mapping[str, str | int]

DATABASE = "pgqueue"
USER = "postgres"
PORT = 5432
INCLUDE = "include_if_exists = 'pgqueue.conf'"

# pg_ctl would do, but it puts its paths into a shell's command unquoted.
DETACH = '"$@" </dev/null >>"$0" 2>&1 & echo $!'


def launch(folder: DataFolder, install: Install, settings: Settings, lock: int) -> Postmaster:
    """Start a server where none runs, on new data if there is none yet; `lock` is the folder's.

    Raises:
        EmbeddedServerError: it does not start; the message says what its log says.
    """
    owner = folder.path.stat().st_uid if folder.exists else None
    account, bindir = programs_for(install, folder.path.parent, owner)
    if not folder.exists:
        _initialise(folder, install.major, account, bindir, settings, lock)
    folder.clear_stale()
    socket_folder = folder.socket_folder()
    account.own(socket_folder)
    _write_settings(folder, account, {"unix_socket_directories": str(socket_folder), **settings})
    log_end = folder.log.stat().st_size if folder.log.exists() else 0
    try:
        said = account.run("/bin/sh", "-c", DETACH, folder.log, bindir / "postgres", "-D", folder.path)
        pid = re.search(r"^\d+$", said, re.MULTILINE)
        postmaster = folder.settle(int(pid[0]) if pid else None)
    except BaseException:
        folder.stop(at_once=True)
        raise
    if postmaster is None:
        folder.remove_socket_folder(socket_folder)
        reason = _logged(folder, log_end) or "it says nothing about why"
        raise EmbeddedServerError(f"PostgreSQL does not start: {reason} (log: {folder.log})")
    return postmaster


def _initialise(
    folder: DataFolder, major: int, account: Account, bindir: Path, settings: Settings, lock: int
) -> None:
    """Make the data, all or nothing: a kill half-way leaves only `.init`, which the next start redoes."""
    made = folder.beside("init")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(mode=0o700)
    account.own(made)
    is_durable = settings.get("fsync") != "off"
    try:
        # initdb outlives us if we are killed. It inherits the lock: nobody redoes this before it ends.
        account.run(
            *(bindir / "initdb", "-D", made, "-U", USER, "--auth=trust", "--encoding=UTF8"),
            *(["--locale-provider=libc"] if major >= 15 else []),
            *([] if is_durable else ["--no-sync"]),
            keep_open=(lock,),
        )
    except EmbeddedServerError as error:
        if account.can_enter(made):
            raise
        raise no_entry(account, made.parent) from error
    fsync = f"fsync={'on' if is_durable else 'off'}"
    printed = account.run(
        *(bindir / "postgres", "--single", "-D", made, "-c", fsync, "postgres"),
        stdin=f"CREATE DATABASE {DATABASE}\n",
        keep_open=(lock,),
    )
    if "ERROR" in printed:
        raise EmbeddedServerError(f"the database {DATABASE} could not be made: {telling_line(printed)}")
    shutil.rmtree(folder.path, ignore_errors=True)
    made.rename(folder.path)
    _sync(folder.path.parent)


def _write_settings(folder: DataFolder, account: Account, settings: Settings) -> None:
    every_setting = {
        "listen_addresses": "",
        "port": PORT,
        "cluster_name": folder.cluster_name,
        "max_connections": 200,
        **settings,
    }
    lines = ["# Written at every start. For settings of your own: ALTER SYSTEM."]
    for name, value in every_setting.items():
        quoted = str(value).replace("\\", "\\\\").replace("'", "''")
        lines.append(f"{name} = '{quoted}'")
    conf = folder.path / "pgqueue.conf"
    conf.write_text("\n".join(lines) + "\n", encoding="utf-8")
    account.own(conf)
    main = folder.path / "postgresql.conf"
    if INCLUDE not in main.read_text(encoding="utf-8"):
        with main.open("a", encoding="utf-8") as end:
            end.write(f"\n{INCLUDE}\n")


def _logged(folder: DataFolder, since: int) -> str:
    try:
        with folder.log.open("rb") as log:
            log.seek(since)
            line = telling_line(log.read().decode("utf-8", "replace"))
            return re.sub(r"^.*?\[\d+\] (?=[A-Z]+: )", "", line)
    except OSError:
        return ""


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
