"""The schema: functions, triggers, indexes, tables, partitions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pgqueue import __version__, migrate
from pgqueue.diagnosis.finding import Exam, Finding
from pgqueue.errors import SchemaMismatch, SchemaMissing, SchemaTooNew, SchemaTooOld
from pgqueue.model.spoken import counted
from pgqueue.shell import sql_name, write_command, write_psql
from pgqueue.sql import doctor as questions

# What the queue's own table is made with; without it a table that turns over many times an hour bloats.
AUTOVACUUM = "autovacuum_vacuum_scale_factor"
# Without a schema there is nothing else to ask.
MISSING = "schema_missing"


def definitions(exam: Exam) -> Iterator[Finding]:
    mismatch = migrate.mismatch(exam.connection, exam.schema)
    if mismatch is not None:
        yield _mismatched(exam, mismatch)
        return
    relations = exam.ask(questions.relations(exam.schema))
    if missing := sorted(_wanted_tables(exam.schema).difference(relations)):
        yield Finding(
            "table_missing",
            "critical",
            f"tables are missing: {_in_schema(missing, exam.schema)}; only a backup has what was in them",
            [
                f'pg_restore --dbname="$PGQUEUE_DSN" --schema={exam.schema} --table={missing[0]} BACKUP',
                exam.command("migrate", check=True),
            ],
        )
    given = exam.ask(questions.definitions())
    for kind, code, found in (
        ("function", "function_missing", exam.ask(questions.functions(exam.schema))),
        ("view", "view_missing", relations),
    ):
        names = {re.split(r"[ .(]", name)[2] for name in given if name.startswith(f"{kind.upper()} ")}
        if missing := sorted(names.difference(found)):
            yield Finding(
                code,
                "critical",
                f"{kind}s are missing that pgqueue made: {_in_schema(missing, exam.schema)}",
                _made_anew(exam.schema),
            )


def _mismatched(exam: Exam, mismatch: SchemaMismatch) -> Finding:
    """Say how the schema and this pgqueue differ; whatever it is, nothing of pgqueue's works here."""
    update = [exam.command("migrate")]
    match mismatch:
        case SchemaMissing():
            return Finding(MISSING, "critical", f"the database has no schema {exam.schema!r}", update)
        case SchemaTooNew():
            return Finding(
                "schema_new",
                "critical",
                f"the schema is at revision {mismatch.found}, made by a newer pgqueue than this one "
                f"({__version__}), whose workers refuse to start",
                ["pip install --upgrade pgqueue-jobs"],
            )
        case SchemaTooOld() if mismatch.found in migrate.revisions():
            return Finding(
                "schema_old",
                "critical",
                f"the schema is at revision {mismatch.found}, and this pgqueue ({__version__}) needs "
                f"{mismatch.needed}: its workers refuse to start",
                update,
            )
        case _:
            return Finding(
                "functions_differ",
                "critical",
                f"the functions in the database are not those of this pgqueue ({__version__}), whose "
                "workers refuse to start",
                update,
            )


def triggers(exam: Exam) -> Iterator[Finding]:
    found = {trigger.name: trigger for trigger in exam.ask(questions.triggers(exam.schema))}
    given = exam.ask(questions.definitions())
    for item in sorted(given):
        wanted = re.fullmatch(r"TRIGGER (\w+) ON (\S+)", item)
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
                [write_psql(f"ALTER TABLE {table} ENABLE TRIGGER {name}")],
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
                [write_psql(text)],
            )
    for name, is_valid in found.items():
        if not is_valid:
            yield Finding(
                "index_invalid",
                "critical",
                f"the index {name} is invalid: no query uses it",
                [write_psql(f"REINDEX INDEX CONCURRENTLY {sql_name(name, exam.schema)}")],
            )


def tables(exam: Exam) -> Iterator[Finding]:
    for table in exam.ask(questions.tables(exam.schema)):
        name = sql_name(table.name, exam.schema)
        options = dict(option.split("=", 1) for option in table.options)
        if table.is_unlogged:
            yield Finding(
                "unlogged",
                "critical",
                f"{name} is UNLOGGED: a crash of the server empties it",
                [write_psql(f"ALTER TABLE {name} SET LOGGED")],
            )
        if options.get("autovacuum_enabled", "true").lower() in ("false", "off", "0", "no"):
            yield Finding(
                "autovacuum_table",
                "critical",
                f"autovacuum is switched off for {name}: its dead rows are never removed",
                [write_psql(f"ALTER TABLE {name} RESET (autovacuum_enabled)")],
            )
        elif table.name == "jobs" and AUTOVACUUM not in options:
            yield Finding(
                "autovacuum_settings",
                "warning",
                f"{name} has lost its own autovacuum settings: with the server's it is vacuumed too late",
                [
                    write_psql(
                        f"ALTER TABLE {name} SET ({AUTOVACUUM} = 0.01, "
                        "autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0)"
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
                    write_psql(f"VACUUM (VERBOSE) {name}"),
                    exam.command("doctor", transactions_older_than="1m"),
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
                [write_psql(f"VACUUM (FULL) {name}") + "   # locks it, for seconds when it is empty"],
            )


def partitions(exam: Exam) -> Iterator[Finding]:
    partitions = exam.ask(questions.partitions(exam.schema))
    if partitions.missing:
        yield Finding(
            "partition_missing",
            "critical",
            f"the history has no partition for {', '.join(partitions.missing)}: jobs that end then have to "
            "wait until a worker has made it",
            [write_psql(f"SELECT {exam.schema}.make_partitions()"), exam.command("workers")],
        )
    for name in partitions.half_detached:
        yield Finding(
            "partition_half_detached",
            "warning",
            f"the partition {name} is half detached: removing it was interrupted",
            [
                write_psql(
                    f"ALTER TABLE {exam.schema}.finished_jobs DETACH PARTITION "
                    f"{sql_name(name, exam.schema)} FINALIZE"
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
                write_psql(
                    f"ALTER TABLE {exam.schema}.finished_jobs DETACH PARTITION {sql_name(name, exam.schema)}"
                ),
            ],
        )


def _made_anew(schema: str) -> Sequence[str]:
    """Forget what was made, so that all of it is made again."""
    forget = write_psql(f"TRUNCATE {schema}.definitions")
    return [f"{forget} && {write_command('migrate', schema=schema)}"]


def _in_schema(names: Sequence[str], schema: str) -> str:
    return ", ".join(f"{schema}.{name}" for name in names)


def _wanted_tables(schema: str) -> set[str]:
    """Name the tables that the revisions make."""
    return {
        name
        for text in _revisions(schema)
        for name in re.findall(rf"^CREATE TABLE {schema}\.(\w+) ", text, re.MULTILINE)
    }


def _revisions(schema: str) -> Iterator[str]:
    for path in sorted((migrate.location() / "versions").glob("*.sql")):
        yield migrate.in_schema(path.read_text(encoding="utf-8"), schema)


def _wanted_indexes(schema: str) -> Iterator[tuple[str, str]]:
    """Give the indexes that the revisions make, and the statement that makes each anew."""
    for text in _revisions(schema):
        for found in re.finditer(r"^CREATE (UNIQUE )?INDEX (\w+) ON [^;]*;", text, re.MULTILINE):
            statement = " ".join(found[0].rstrip(";").split())
            if " ON " + f"{schema}.finished_jobs " not in statement:  # of a partitioned table it cannot be
                statement = statement.replace("INDEX ", "INDEX CONCURRENTLY ", 1)
            yield found[2], statement
