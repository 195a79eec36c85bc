"""The application of the schedule tests: which schedules it declares, its environment says."""

from __future__ import annotations

import os

import pgqueue
from pgqueue import JobContext
from tests.process.jobs import record

app = pgqueue.App()


@app.schedule(os.environ.get("BEAT", "* * * * * *"), name="beat", catch_up="all", catch_up_limit=1000)
@app.task
def tick(job: JobContext) -> None:
    record(job)
