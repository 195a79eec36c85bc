"""The schema: functions, triggers, indexes, tables, partitions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from pgqueue import __version__, migrate
from pgqueue.diagnosis.finding import Exam, Finding
from pgqueue.model.spoken import counted
from pgqueue.sql import doctor as questions

# What the queue's own table is made with; without it a table that turns over many times an hour bloats.
AUTOVACUUM = "autovacuum_vacuum_scale_factor"


def definitions(exam: Exam) -> Iterator[Finding]:
    found = exam.ask(questions.definitions())
    revision, newest = found[0].revision, migrate.revisions()[-1]
    update = ["pgqueue migrate"]
    if revision not in migrate.revisions():
        yield Finding(
            "schema_new",
            "warning",
            f"the schema is at revision {revision}, made by a newer pgqueue than this one ({__version__})",
            ["pip install --upgrade pgqueue-jobs"],
        )
        return
    if revision != newest:
        yield Finding(
            "schema_old",
            "critical",
            f"the schema is at revision {revision}, and this pgqueue ({__version__}) needs {newest}",
            update,
        )
        return
    wanted = {item.object: item.checksum for item in migrate.definitions(exam.schema)}
    if {item.object: item.checksum for item in found if item.object} != wanted:
        version = next((item.version for item in found if item.version), "none")
        yield Finding(
            "functions_differ",
            "warning",
            f"the functions in the database were written by another pgqueue ({version}) than this one "
            f"({__version__})",
            update,
        )
    names = {re.split(r"[ .(]", name)[2] for name in wanted if name.startswith("FUNCTION ")}
    found_names = exam.ask(questions.functions(exam.schema))
    if missing := sorted(names.difference(found_names)):
        yield Finding(
            "function_missing",
            "critical",
            f"functions are missing that pgqueue made: {', '.join(missing)}",
            _made_anew(exam.schema),
        )


def triggers(exam: Exam) -> Iterator[Finding]:
    found = {trigger.name: trigger for trigger in exam.ask(questions.triggers(exam.schema))}
    for item in migrate.definitions(exam.schema):
        wanted = re.fullmatch(r"TRIGGER (\w+) ON (\S+)", item.object)
        if wanted is None:
            continue
        name, table = wanted[1], wanted[2]
        if name not in found:
            yield Finding(
                "trigger_missing",
                "critical",
                f"the trigger {name} on {table} is missing",
                _made_anew(exam.schema),
            )
        elif not found[name].is_enabled:
            yield Finding(
                "trigger_disabled",
                "critical",
                f"the trigger {name} on {table} is disabled",
                [f'psql "$PGQUEUE_DSN" -c "ALTER TABLE {table} ENABLE TRIGGER {name}"'],
            )


def indexes(exam: Exam) -> Iterator[Finding]:
    found = exam.ask(questions.indexes(exam.schema))
    for name, text in _wanted_indexes(exam.schema):
        if name not in found:
            yield Finding(
                "index_missing",
                "critical",
                f"the index {name} is missing: what needs it reads the whole table, or is not guarded any "
                "more",
                ['psql "$PGQUEUE_DSN" -c ' + shlex.quote(text)],
            )
    for name, is_valid in found.items():
        if not is_valid:
            yield Finding(
                "index_invalid",
                "critical",
                f"the index {name} is invalid: no query uses it",
                [f'psql "$PGQUEUE_DSN" -c "REINDEX INDEX CONCURRENTLY {exam.schema}.{name}"'],
            )


def tables(exam: Exam) -> Iterator[Finding]:
    for table in exam.ask(questions.tables(exam.schema)):
        name = f"{exam.schema}.{table.name}"
        options = dict(option.split("=", 1) for option in table.options)
        if table.is_unlogged:
            yield Finding(
                "unlogged",
                "critical",
                f"{name} is UNLOGGED: a crash of the server empties it",
                [f'psql "$PGQUEUE_DSN" -c "ALTER TABLE {name} SET LOGGED"'],
            )
        if options.get("autovacuum_enabled", "true").lower() in ("false", "off", "0", "no"):
            yield Finding(
                "autovacuum_table",
                "critical",
                f"autovacuum is switched off for {name}: its dead rows are never removed",
                [f'psql "$PGQUEUE_DSN" -c "ALTER TABLE {name} RESET (autovacuum_enabled)"'],
            )
        elif table.name == "jobs" and AUTOVACUUM not in options:
            yield Finding(
                "autovacuum_settings",
                "warning",
                f"{name} has lost its own autovacuum settings: with the server's it is vacuumed too late",
                [
                    (
                        f'psql "$PGQUEUE_DSN" -c "ALTER TABLE {name} SET ({AUTOVACUUM} = 0.01, '
                        'autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0)"'
                    ),
                ],
            )
        if table.dead_rows >= exam.at.dead_rows and table.dead_rows > 2 * table.live_rows:
            when = "" if table.vacuumed_at else ", and it was never vacuumed"
            yield Finding(
                "dead_rows",
                "warning",
                f"{name} has {table.dead_rows:,} dead rows to {table.live_rows:,} live ones{when}: vacuum "
                "does not come, or a snapshot keeps it from removing them",
                [
                    f'psql "$PGQUEUE_DSN" -c "VACUUM (VERBOSE) {name}"',
                    "pgqueue doctor --transactions-older-than 1m",
                ],
            )
        elif (
            table.size_bytes >= exam.at.bloat_bytes
            and table.size_bytes > max(table.live_rows, 1) * exam.at.bloat_bytes_a_row
        ):
            yield Finding(
                "bloat",
                "warning",
                f"{name} takes {table.size_bytes / 1_048_576:,.0f} MB for "
                f"{counted(table.live_rows, 'row')}: it was full once, and scans still read all of it",
                [f'psql "$PGQUEUE_DSN" -c "VACUUM (FULL) {name}"   # locks it, for seconds when it is empty'],
            )


def partitions(exam: Exam) -> Iterator[Finding]:
    partitions = exam.ask(questions.partitions(exam.schema))
    if partitions.missing:
        yield Finding(
            "partition_missing",
            "critical",
            f"the history has no partition for {', '.join(partitions.missing)}: jobs that end then have to "
            "wait until a worker has made it",
            [f'psql "$PGQUEUE_DSN" -c "SELECT {exam.schema}.make_partitions()"', "pgqueue workers"],
        )
    for name in partitions.half_detached:
        yield Finding(
            "partition_half_detached",
            "warning",
            f"the partition {name} is half detached: removing it was interrupted",
            [
                (
                    f'psql "$PGQUEUE_DSN" -c "ALTER TABLE {exam.schema}.finished_jobs DETACH PARTITION '
                    f'{exam.schema}.{name} FINALIZE"'
                ),
            ],
        )
    for name in partitions.default:
        yield Finding(
            "partition_default",
            "warning",
            f"{name} is a default partition of the history: while it is there, no day can be removed "
            "without stopping completions",
            [
                (
                    f'psql "$PGQUEUE_DSN" -c "ALTER TABLE {exam.schema}.finished_jobs DETACH PARTITION '
                    f'{exam.schema}.{name}"'
                ),
            ],
        )


def _made_anew(schema: str) -> Sequence[str]:
    """Forget what was made, so that all of it is made again."""
    return [f'psql "$PGQUEUE_DSN" -c "TRUNCATE {schema}.definitions" && pgqueue migrate']


def _wanted_indexes(schema: str) -> Iterator[tuple[str, str]]:
    """Give the indexes that the revisions make, and the statement that makes each anew."""
    for path in sorted((migrate.location() / "versions").glob("*.sql")):
        text = migrate.in_schema(path.read_text(encoding="utf-8"), schema)
        for found in re.finditer(r"^CREATE (UNIQUE )?INDEX (\w+) ON [^;]*;", text, re.MULTILINE):
            statement = " ".join(found[0].rstrip(";").split())
            if " ON " + f"{schema}.finished_jobs " not in statement:  # of a partitioned table it cannot be
                statement = statement.replace("INDEX ", "INDEX CONCURRENTLY ", 1)
            yield found[2], statement
