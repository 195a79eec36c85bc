"""The application of `pgqueue demo payments`: move money here, and tell the bank.

An ordinary one, run by ordinary workers: `pgqueue worker --app pgqueue.demo.payments.tasks:app`.
"""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

from pgqueue import App, JobContext
from pgqueue.database import Connection, run
from pgqueue.model.retry import Exponential
from pgqueue.sql import demo_payments as statements
from pgqueue.sql.demo_payments import Transfer

QUEUE = "demo_payments"
BREAKER = "demo bank"
BANK_VARIABLE = "DEMO_BANK_URL"
_CALL_SECONDS = 5.0

app = App()
app.breaker(
    BREAKER,
    max_failures=10,
    window_seconds=1,
    open_seconds=0.5,
    max_open_seconds=1,
    probe_seconds=3,
)


@app.task(
    name="demo.transfer",
    queue=QUEUE,
    transactional=True,
    idempotency_key="demo:transfer:{transfer}",
    retry=Exponential(base_seconds=0.2, max_seconds=2),
)
def transfer(
    tx: Connection[Any], job: JobContext, transfer: int, source: int, target: int, cents: int
) -> None:
    """Move money between two accounts, once, and have the bank told: all in the worker's transaction."""
    run(tx, statements.lock_accounts([source, target]))
    run(tx, statements.move(Transfer(transfer, source, target, cents), job.job_id, job.attempt))
    settle.using(conn=tx).enqueue(transfer=transfer, cents=cents)


@app.task(
    name="demo.settle",
    queue=QUEUE,
    breaker=BREAKER,
    idempotency_key="demo:settle:{transfer}",
    idempotent=True,
    max_attempts=50,
    timeout_seconds=20,
    retry=Exponential(base_seconds=0.2, max_seconds=2),
)
def settle(job: JobContext, transfer: int, cents: int) -> str:
    """Tell the bank about a transfer; it knows by our key what it has been told before."""
    request = urllib.request.Request(  # noqa: S310  a server on this machine
        os.environ[BANK_VARIABLE],
        json.dumps({"key": job.idempotency_key, "transfer": transfer, "cents": cents}).encode(),
    )
    with urllib.request.urlopen(request, timeout=_CALL_SECONDS) as answer:  # noqa: S310
        receipt: str = json.load(answer)["receipt"]
    return receipt
