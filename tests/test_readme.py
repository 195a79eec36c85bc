"""README.md is run as it stands: every fenced block, in order, as its reader would.

A comment before a block says what cannot be guessed: `<!-- test: file jobs.py -->`. In a `console`
block what follows a command is what it must print; digits count as equal, blanks as one, and `…` stands
for anything, alone on a line for any lines.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest

from pgqueue import cli
from tests.languages.support import link_node_modules, run_node
from tests.support import ROOT, end, wait_until

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PROMPT = "$ "
PATIENCE_SECONDS = 60
# Asking again changes nothing, so what they show may take a moment to be so.
READ_ONLY = re.compile(
    r"pgqueue (?:jobs|dlq|queues|schedules) (?:list|show|why|next)|pgqueue (?:workers|top|doctor|log)\b"
    r"|pgqueue breakers$"
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, what a comment says of it, its line in the file, its text."""

    language: str
    test: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"README.md:{self.line} ({self.language} {self.test})".replace(" )", ")")


def _blocks() -> list[Block]:
    found = re.finditer(
        r"(?:^<!-- test: (?P<test>.+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
        TEXT,
        re.MULTILINE | re.DOTALL,
    )
    return [
        Block(one["language"], one["test"] or "", TEXT[: one.start("text")].count("\n"), one["text"])
        for one in found
    ]


BLOCKS = _blocks()
COMMANDS, STORY = BLOCKS[:2], BLOCKS[2:]


def test_no_block_is_overlooked() -> None:
    fences = [line for line in TEXT.splitlines() if line.lstrip().startswith("```")]

    assert len(fences) == 2 * len(BLOCKS)


# The two commands.


def test_the_two_commands_come_first_and_are_those_that_the_gate_runs() -> None:
    gate = (ROOT / ".ci" / "run").read_text(encoding="utf-8")

    commands = [block.text.strip() for block in COMMANDS]

    assert [command.rpartition(" && ")[2] for command in commands] == [
        ".venv/bin/pgqueue demo",
        ".venv/bin/pytest",
    ]
    for command in commands:
        assert re.search(rf"^\(?{re.escape(command)}\)?(?: \|\| exit 1)?$", gate, re.MULTILINE), command


# The story.


class Reader:
    """Somebody who follows the README: a folder, a shell that stays open, and a second terminal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._background: list[subprocess.Popen[bytes]] = []
        programs = folder / "bin"
        programs.mkdir()
        for name, command in (("pgqueue", "-m pgqueue"), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
            (programs / name).chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PGQUEUE_DATA": str(Path(os.environ["TMPDIR"]) / f"readme-{os.getpid()}"),
            "COLUMNS": "200",
        }
        self.work = folder / "shop"
        self.work.mkdir()
        self._shell = subprocess.Popen(
            ["bash"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.work,
            env=self.environment,
            text=True,
        )

    def run(self, block: Block) -> None:
        """Do what the block says, and check what it says will happen."""
        what, _, rest = block.test.partition(" ")
        match block.language, what:
            case _, "file":
                (self.work / rest).write_text(block.text, encoding="utf-8")
            case "bash", "background":
                self._start(block.text, rest)
            case "bash", "" | "last":
                for command in block.text.strip().splitlines():
                    self._ask(command)
            case "console", "":
                self._follow(block)
            case "python", "":
                _check_prints(block, "#", self._program(["python", "-c", block.text]))
            case "sql", "":
                with psycopg.connect(self.dsn, autocommit=True) as connection:
                    connection.execute(block.text.encode())
            case "ini", "systemd":
                self._serve(block)
            case "js", "":
                script = self.work / "client.mjs"
                script.write_text(block.text, encoding="utf-8")
                _check_prints(block, "//", run_node(script, dsn=self.dsn))
            case _:
                raise AssertionError(f"no way to test this block: {block}")

    @property
    def dsn(self) -> str:
        """The database, as the reader's shell knows it."""
        return self._ask('echo "$PGQUEUE_DSN"').strip()

    def _ask(self, command: str, *, succeeds: bool = True) -> str:
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f'{command}\necho "-- ended $?"\n')
        self._shell.stdin.flush()
        said = []
        for line in self._shell.stdout:
            if ended := re.fullmatch(r"(.*)-- ended (\d+)\n", line):
                said.append(ended[1])
                assert ended[2] == "0" or not succeeds, f"$ {command}\n{''.join(said)}"
                return "".join(said)
            said.append(line)
        raise AssertionError(f"the shell ended: $ {command}\n{''.join(said)}")

    def _follow(self, block: Block) -> None:
        for step in block.text.removeprefix(PROMPT).split(f"\n{PROMPT}"):
            command, _, expected = step.partition("\n")
            pattern = _pattern(expected)
            is_last = time.monotonic() + (PATIENCE_SECONDS if READ_ONLY.match(command) else 0)
            while not re.fullmatch(pattern, _plain(said := self._ask(command, succeeds=False))):
                assert time.monotonic() < is_last, f"{block}\n$ {command}\n{said}\n-- but not\n{expected}"

    def _program(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, "PGQUEUE_DSN": self.dsn}
        return subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            cwd=self.work,
            env=environment,
            text=True,
            capture_output=True,
            timeout=180,
            check=False,
        )

    def _start(self, command: str, sign: str) -> subprocess.Popen[bytes]:
        """Run a command in the second terminal until the end of the story, once it shows the sign."""
        log = self.folder / f"terminal-{len(self._background)}.log"
        environment = {**self.environment, "PGQUEUE_DSN": self.dsn}
        with log.open("wb") as stream:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.work,
                env=environment,
                stdout=stream,
                stderr=stream,
            )
        self._background.append(process)

        def is_up() -> bool:
            assert process.poll() is None, log.read_text()
            return sign in log.read_text()

        wait_until(is_up, PATIENCE_SECONDS, f"{command} says {sign!r}")
        return process

    def _serve(self, block: Block) -> None:
        """Run what systemd would, and stop it as systemd would."""
        unit = configparser.ConfigParser(interpolation=None)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read_string(block.text)
        service = unit["Service"]
        program, *arguments = shlex.split(service["ExecStart"])
        assert program.startswith(f"{service['WorkingDirectory']}/.venv/bin/")
        grace = float(arguments[arguments.index("--grace-seconds") + 1])
        assert float(service["TimeoutStopSec"]) > grace

        process = self._start(shlex.join([Path(program).name, *arguments]), "worker started")
        process.send_signal(signal.SIGTERM)

        assert process.wait(PATIENCE_SECONDS) == 0

    def stop(self) -> None:
        """Press Ctrl-C in the second terminal."""
        for process in self._background:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        codes = [process.wait(PATIENCE_SECONDS) for process in self._background]
        assert set(codes) <= {0}

    def close(self) -> None:
        for process in self._background:
            end(process)
        end(self._shell)
        for pipe in (self._shell.stdin, self._shell.stdout):
            assert pipe is not None
            pipe.close()
        subprocess.run(
            [self.folder / "bin" / "pgqueue", "db", "stop"],
            env=self.environment,
            capture_output=True,
            check=False,
        )


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    yield made
    made.close()


def test_every_block_works_as_written_in_the_order_written(reader: Reader) -> None:
    before = [block for block in STORY if block.test != "last" and block.language != "js"]
    last = [block for block in STORY if block.test == "last"]

    for block in before:
        reader.run(block)
    reader.stop()
    for block in last:
        reader.run(block)


def test_the_blocks_in_javascript_work_as_written(reader: Reader, dsn: str) -> None:
    link_node_modules(reader.work)
    reader.environment["PGQUEUE_DSN"] = dsn
    reader._ask(f"export PGQUEUE_DSN={shlex.quote(dsn)}")
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE users (id bigint GENERATED ALWAYS AS IDENTITY, name text)")

    for block in STORY:
        if block.language == "js" or block.test == "file jobs.py":
            reader.run(block)
    reader._ask("pgqueue worker --app jobs:app --until-empty")

    with psycopg.connect(dsn) as connection:
        succeeded = connection.execute("SELECT count(*) FROM pgqueue.finished_jobs").fetchone()
    assert succeeded == (4,)


def _pattern(expected: str) -> str:
    """Give the pattern of what must be printed: `…` is anything, alone on a line any lines."""
    lines = [re.escape(line).replace("…", "[^\n]*") for line in _plain(expected).splitlines()]
    parts = [r"(?:[^\n]*\n)*?" if line == "[^\n]*" else f"{line}\n" for line in lines]
    return "".join(parts)


def _plain(text: str) -> str:
    """Give a text in which only what is the same every time counts."""
    text = re.sub(r"\d+", "0", text)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return "".join(f"{line}\n" for line in lines)


def _check_prints(block: Block, comment: str, ended: subprocess.CompletedProcess[str]) -> None:
    """Check that a program printed what the comments behind its prints say."""
    assert ended.returncode == 0, f"{block}\n{ended.stderr}"
    call = r"(?:print|console\.log)\("
    expected = re.findall(rf"^\s*{call}.*\);?  ?{re.escape(comment)} (.*)$", block.text, re.MULTILINE)
    assert len(expected) == len(re.findall(call, block.text)), f"{block}: a print without its result"
    assert ended.stdout.splitlines() == expected, block


# What is said outside the blocks.


@pytest.fixture(scope="module")
def commands() -> dict[str, click.Command]:
    """Every command there is, by what one types to run it."""

    def walk(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        yield path, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from walk(f"{path} {name}", found)

    return dict(walk("pgqueue", cli.root))


def _options(command: click.Command) -> dict[str, Any]:
    return {
        name: parameter.default
        for parameter in command.params
        for name in [*parameter.opts, *parameter.secondary_opts]
    }


def test_every_command_and_option_that_is_named_exists(commands: dict[str, click.Command]) -> None:
    prose = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    spans = [span for span in re.findall(r"`([^`\n]+)`", prose) if not span.startswith("python")]
    known = {name for command in commands.values() for name in _options(command)}

    paths = {found[0] for span in spans if (found := re.match(r"pgqueue(?: [a-z][a-z-]*)*", span))}
    options = {option for span in spans for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", span)}

    assert paths - commands.keys() == set()
    assert options - known == {"--help"}


def test_the_table_of_the_workers_options_is_complete_and_has_the_defaults(
    commands: dict[str, click.Command],
) -> None:
    rows = _rows("Option of `pgqueue worker`")
    written = {name: default for names, default, _ in rows for name in re.findall(r"`(-\S+)`", names)}
    options = _options(commands["pgqueue worker"])

    elsewhere = {"--app", "--queue", "--dsn", "--schema", "--log-format", "--log-level", "-h", "--help"}
    assert set(written) == set(options) - elsewhere
    for name, default in written.items():
        if re.fullmatch(r"[\d.]+", default):
            assert float(options[name]) == float(default), name
    assert options["--retention-seconds"] == 7 * 86_400


def test_the_table_of_variables_has_every_one_that_is_read() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "pgqueue").rglob("*.py"))
    read = set(re.findall(r"\"(PGQUEUE_[A-Z_]+|DATABASE_URL)\"", source))

    written = {name for names, _ in _rows("Environment") for name in re.findall(r"`([A-Z_]+)`", names)}

    assert written == read


def test_every_file_that_is_named_exists() -> None:
    named = re.findall(r"`((?:tests|bench)/[\w/.]+|[A-Z]+\.md)`", TEXT)

    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert len({name for name in named if name.startswith("tests/")}) >= 4


def _rows(title: str) -> list[list[str]]:
    """Give the cells of the table whose first column has this title."""
    lines = TEXT[TEXT.index(f"| {title}") :].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines]
