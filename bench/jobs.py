"""The application under measurement: handlers that do nothing."""

from __future__ import annotations

import pgqueue

app = pgqueue.App()


@app.task
async def nothing(i: int) -> None:
    """Do nothing, in the event loop."""


@app.task
def nothing_sync(i: int) -> None:
    """Do nothing, in a thread."""
