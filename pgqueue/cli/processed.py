"""`pgqueue processed`: what happened once, by its idempotency key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pgqueue.cli import output
from pgqueue.cli.options import database_options, json_option, open_database

if TYPE_CHECKING:
    from pgqueue.sql.once import Processed


@click.group(short_help="See or forget what an idempotency key has done.")
def command() -> None:
    """See what became of an idempotency key, or forget it so that its effect may happen again.

    A key is done once its transactional task has committed, or its handler has returned. One that
    is in progress without an owner was cut off: what became of its effect is unknown.

    \b
    Example:
      pgqueue processed show charge:17
      pgqueue processed forget charge:17
    """


@command.command()
@click.argument("key")
@json_option
@database_options
def show(key: str, as_json: bool, dsn: str | None, schema: str) -> None:
    """Show what became of KEY, who did it, and what it answered.

    \b
    Example:
      pgqueue processed show charge:17
    """
    from pgqueue import admin
    from pgqueue.errors import PgqueueError

    with open_database(dsn, schema) as connection:
        found = admin.show_processed(connection, key, schema)
    if found is None:
        raise PgqueueError(f"nothing is remembered of the key {key!r}")
    if as_json:
        output.document(found)
        return
    click.echo(output.plain(f"key {found.key!r} {_standing(found)}") + "\n")
    output.fields(
        [
            ("by", found.job_name),
            ("job", found.job_id),
            ("began", output.instant(found.created_at, found.seen_at)),
            ("last change", output.instant(found.updated_at, found.seen_at)),
        ]
    )
    if found.response is not None:
        output.heading("response")
        output.block(output.pretty(found.response))


@command.command()
@click.argument("key")
@database_options
def forget(key: str, dsn: str | None, schema: str) -> None:
    """Forget KEY: the next job with it does its effect, whatever happened before.

    For an effect of which nobody knows whether it happened: find out, and forget the key if it did not.
    Refused while a job is at work on it.

    \b
    Example:
      pgqueue processed forget charge:17
    """
    from pgqueue import admin
    from pgqueue.errors import KeyBusy, PgqueueError

    with open_database(dsn, schema) as connection:
        if not admin.forget_processed(connection, key, schema):
            if admin.show_processed(connection, key, schema) is None:
                raise PgqueueError(f"nothing is remembered of the key {key!r}")
            raise KeyBusy(key)
    output.say(f"forgot the key {key!r}")


def _standing(found: Processed) -> str:
    if found.status == "COMPLETED":
        return "is done"
    if found.claim_token is None:
        return "was cut off: what became of it is unknown"
    return "is in progress, or was cut off"
