"""An application with rate limits, declared in each way there is."""

from __future__ import annotations

import pgqueue

app = pgqueue.App()
app.rate_limit("queue:narrow", "5/s")


@app.task(queue="fast", rate_limit="100/s", rate_burst=10)
async def hundred_a_second() -> None:
    """Do nothing, a hundred times a second at most."""


@app.task(queue="roomy", rate_limit="100/s", rate_burst=1000)
async def hundred_a_second_with_room() -> None:
    """Do nothing, a hundred times a second at most, but for what was left over in the last ten."""


@app.task(queue="slow", rate_limit="5/s")
async def five_a_second() -> None:
    """Do nothing, five times a second at most."""


@app.task(queue="tenants", rate_key="api:{customer}", rate_limit="2/s")
async def call(customer: int) -> None:
    """Do nothing, twice a second at most for each customer."""


@app.task(queue="narrow")
async def unlimited() -> None:
    """Do nothing, in a queue that starts five a second."""
