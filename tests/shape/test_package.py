"""The rules of the package that no other tool checks: what is built, where SQL may be, what is said."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import tarfile
import typing
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.model.job import NewJob
from pgqueue.model.schedule import ScheduleDefinition
from pgqueue.sql import Statement, load
from pgqueue.sql.inspect import DeadFilter, LiveFilter
from pgqueue.sql.presence import ExpiredPartition
from tests.support import ROOT

PACKAGE = ROOT / "pgqueue"
SUBJECTS = sorted(path.stem for path in (PACKAGE / "sql").glob("*.sql"))


# What is built.


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, and the wheel made from nothing but the sdist."""
    folder = tmp_path_factory.mktemp("built")
    environment = _with_hatchling(folder / "hatchling")
    sdist = folder / _build("sdist", ROOT, folder, environment)
    with tarfile.open(sdist) as archive:
        # The filter came with 3.11.4, and later versions want one named.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    wheel = folder / _build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder, environment)
    return {"sdist": sdist, "wheel": wheel}


def _with_hatchling(folder: Path) -> dict[str, str]:
    """Give an environment that has the build backend; [dev] lacks it, because pip brings its own."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    probe = [sys.executable, "-c", "import hatchling.build"]
    if subprocess.run(probe, env=environment, capture_output=True, check=False).returncode:
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", folder, "hatchling>=1.27"]
        ended = subprocess.run(command, text=True, capture_output=True, check=False)
        if ended.returncode:
            reason = f"hatchling could not be installed: {ended.stderr.strip()[-300:]}"
            pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
        environment["PYTHONPATH"] = str(folder)
    return environment


def _build(kind: str, source: Path, target: Path, environment: dict[str, str]) -> str:
    code = f"import sys, hatchling.build; print(hatchling.build.build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-c", code, target]
    ended = subprocess.run(command, cwd=source, env=environment, text=True, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()[-1]


def _files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_the_whole_package_and_the_migrations_and_nothing_else(built: dict[str, Path]) -> None:
    package = _files(PACKAGE)
    migrations = {f"pgqueue/{name}" for name in _files(ROOT / "migrations")}

    with zipfile.ZipFile(built["wheel"]) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}

    assert {"pgqueue/py.typed", "pgqueue/sql/enqueue.sql"} <= package
    assert "pgqueue/migrations/functions/enqueue.sql" in migrations
    assert found == package | migrations


def test_the_sdist_has_what_a_distributor_needs_to_test_it(built: dict[str, Path]) -> None:
    wanted = {
        *_files(PACKAGE),
        *_files(ROOT / "migrations"),
        *_files(ROOT / "tests"),
        *_files(ROOT / "bench"),
    }
    wanted |= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml"}

    with tarfile.open(built["sdist"]) as sdist:
        found = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}

    assert wanted - found == set()


def test_the_wheel_can_migrate_without_the_checkout(built: dict[str, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        wheel.extractall(tmp_path / "installed")

    ended = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import pgqueue.migrate as m; print(m.location()); print(m.render())",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        text=True,
        capture_output=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    place, _, script = ended.stdout.partition("\n")
    assert place == str(tmp_path / "installed" / "pgqueue" / "migrations")
    assert "CREATE TABLE pgqueue.jobs" in script
    assert "CREATE OR REPLACE FUNCTION pgqueue.enqueue(" in script


def test_every_public_name_can_be_imported() -> None:
    missing = [name for name in pgqueue.__all__ if getattr(pgqueue, name, None) is None]

    assert missing == []


# Where SQL may be.

SQL = re.compile(
    r"\s*(?:--\s|(?:SELECT|INSERT|UPDATE|DELETE|WITH|VALUES|TABLE|CREATE|ALTER|DROP|TRUNCATE|GRANT|REVOKE|LISTEN"
    r"|UNLISTEN|NOTIFY|SET|RESET|SHOW|BEGIN|START|COMMIT|ROLLBACK|SAVEPOINT|CALL|DO|LOCK|COPY|VACUUM|ANALYZE"
    r"|EXPLAIN|PREPARE|EXECUTE|DEALLOCATE|DISCARD|COMMENT)\b)"
)
# Files outside pgqueue/sql that hold SQL all the same, and why.
WITH_SQL = {
    "client.py": "begins the caller's transaction, so that ours becomes a savepoint in it",
    "database.py": "sets a session up before any statement can be run on it",
    "diagnosis/schema.py": "says to a person which statement mends a fault",
    "diagnosis/server.py": "says to a person which statement mends a fault",
    "diagnosis/sessions.py": "says to a person which statement mends a fault",
    "embedded/cluster.py": "makes the database, on a server that has none yet",
    "migrate.py": "makes the schema that statements are about",
    "shell.py": "says to a person which statement ends a session",
}


def _texts(path: Path) -> Iterator[str]:
    """Give a module's literals without its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
            yield node.value if isinstance(node.value, str) else node.value.decode("latin-1")


def test_sql_is_only_in_its_own_room() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "sql"]

    found = {str(path.relative_to(PACKAGE)) for path in modules if any(map(SQL.match, _texts(path)))}

    assert found == set(WITH_SQL)


# Whether it is SQL at all.


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_statement_is_understood_by_the_migrated_schema(fast_dsn: str, subject: str) -> None:
    texts = {name: text.replace("{{schema}}", "pgqueue") for name, text in load(subject).items()}
    definitions = {name for name, text in texts.items() if re.search(r"^CREATE ", text, re.MULTILINE)}
    refused = {}

    with psycopg.connect(fast_dsn) as connection:
        for name in definitions:
            connection.execute(texts[name].encode())
        for name in texts.keys() - definitions:
            numbers = {parameter: f"${n}" for n, parameter in enumerate(_named(texts[name]), 1)}
            try:
                with connection.transaction():
                    # Without types for the parameters: a cast that is missing is an error here, not at 3 a.m.
                    connection.execute(f'PREPARE "{name}" AS {texts[name] % numbers}'.encode())
            except psycopg.Error as error:
                refused[name] = str(error)
        connection.rollback()

    assert refused == {}


def test_every_statement_gets_exactly_the_parameters_it_names() -> None:
    wrong = {}
    for builder in _builders():
        for statement in _built_by(builder):
            if difference := _named(statement.text) ^ set(statement.params):
                wrong[builder.__qualname__] = difference

    assert wrong == {}


def test_no_statement_lies_unused() -> None:
    used = {statement.text for builder in _builders() for statement in _built_by(builder)}

    unused = [
        f"{subject}.sql: {name}"
        for subject in SUBJECTS
        for name, text in load(subject).items()
        if text not in used
    ]

    assert unused == []


def _named(text: str) -> set[str]:
    """Give the parameters that a statement names."""
    return set(re.findall(r"%\((\w+)\)s", text))


@cache
def _builders() -> list[Callable[..., Any]]:
    """Give the functions of pgqueue/sql that build statements."""
    found = []
    for subject in sorted(path.stem for path in (PACKAGE / "sql").glob("[!_]*.py")):
        module = importlib.import_module(f"pgqueue.sql.{subject}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            is_own = function.__module__ == module.__name__ and not name.startswith("_")
            if is_own and "Statement" in str(function.__annotations__.get("return")):
                found.append(function)
    return found


def _built_by(builder: Callable[..., Any]) -> list[Statement[Any]]:
    """Call a builder in the ways its branches ask for."""
    hints = typing.get_type_hints(builder)
    arguments = {name: _sample(hint) for name, hint in hints.items() if name != "return"}
    calls = [arguments]
    if "job" in hints:
        calls = [{"job": NewJob(task="x")}, {"job": NewJob(task="x", is_complete=True)}]
    if "jobs" in hints:
        calls.append({"jobs": [NewJob(task="x", is_complete=True)]})
    built: list[Statement[Any]] = []
    for call in calls:
        made = builder(**call)
        built += [made] if isinstance(made, Statement) else made
    return built


def _sample(hint: Any) -> Any:
    simple: Mapping[Any, Any] = {
        int: 1,
        float: 1.0,
        str: "x",
        bool: True,
        datetime: datetime(2026, 1, 31, tzinfo=UTC),
        NewJob: NewJob(task="x"),
        DeadFilter: DeadFilter(),
        LiveFilter: LiveFilter(states=["ready"]),
        ScheduleDefinition: ScheduleDefinition(
            name="x",
            cron="x",
            timezone="x",
            task="x",
            args="{}",
            queue=None,
            priority=None,
            catch_up="all",
            catch_up_limit=1,
        ),
        ExpiredPartition: ExpiredPartition(
            "finished_jobs_20260131", is_attached=True, is_half_detached=False
        ),
    }
    if hint in simple:
        return simple[hint]
    if hasattr(hint, "_fields"):
        return hint(*map(_sample, typing.get_type_hints(hint).values()))
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return _sample(next(part for part in parts if part is not type(None)))
    if origin in (Sequence, Iterable, list):
        return [_sample(parts[0])]
    if origin is tuple:
        return tuple(_sample(part) for part in parts)
    if origin is Mapping:
        return {}
    raise AssertionError(f"no sample for {hint}: add one")


# What is said.

# A home directory, a folder of somebody's machine, a package registry, a promise to finish it later.
UNWANTED = re.compile(
    r"(?<![\w.-])/(?:root|home/\w+|Users/\w+|work)(?:/|\b(?![\w-]))"
    r"|\b(?:pypi\.org|pythonhosted\.org|registry\.npmjs\.org)\b"
    r"|\b(?:TODO|FIXME|XXX)\b(?!.*#\d)"
)
TEXT_SUFFIXES = {
    ".py",
    ".sql",
    ".md",
    ".toml",
    ".mjs",
    ".ini",
    ".cfg",
    ".yml",
    ".yaml",
    ".sh",
    ".html",
    ".mako",
    "",
}


def _repository() -> Iterator[Path]:
    for path in _kept():
        if path.is_file() and path.suffix in TEXT_SUFFIXES and path != Path(__file__):
            yield path


def _kept() -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        names = [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    else:  # an sdist; what starts with a dot, or is compiled, was made here
        names = [name for name in _files(ROOT) if not re.search(r"(?:^|/)\.", name)]
    yield from (ROOT / name for name in names)


def test_no_file_names_a_place_that_readers_do_not_have() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in _repository()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if UNWANTED.search(line)
    ]

    assert found == []


def test_no_file_is_left_over_from_an_edit() -> None:
    found = [path for path in _kept() if path.suffix in {".orig", ".rej", ".bak", ".swp"} and path.exists()]

    assert found == []
