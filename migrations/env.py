"""The Alembic environment: a schema and a version table of our own, one transaction, one lock."""

from alembic import context

from pgqueue import migrate

attributes = context.config.attributes
schema: str = attributes.get("schema", migrate.DEFAULT_SCHEMA)
applied: list[str] = attributes.get("applied", [])


def note(step, **_) -> None:
    applied.append(step.up_revision_id)


context.configure(
    connection=attributes.get("connection"),
    dialect_name="postgresql",
    version_table="alembic_version",
    version_table_schema=schema,
    on_version_apply=note,
    transaction_per_migration=False,
)
with context.begin_transaction():
    migrate.prepare(schema)
    context.run_migrations(schema=schema)
    applied += migrate.define(schema)
    if applied or context.is_offline_mode():
        migrate.renew_grants(schema)
