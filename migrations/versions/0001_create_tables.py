"""create the tables"""

from pathlib import Path

from pgqueue.migrate import run

revision = "0001"
down_revision = None


def upgrade(schema: str) -> None:
    run(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"), schema)
