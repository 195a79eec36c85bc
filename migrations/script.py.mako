"""${message}"""

from pgqueue.migrate import run

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade(schema: str) -> None:
    run("...", schema)
