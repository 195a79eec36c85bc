"""An application that handles what nobody else is to read, and fails in every way."""

from __future__ import annotations

import logging
import os
from typing import Any

import pgqueue

app = pgqueue.App()
log = logging.getLogger("shop.mail")


@app.task
def succeed(card: str) -> dict[str, str]:
    log.info("charged")
    return {"charged": card}


@app.task(max_attempts=1)
def quote_it(card: str) -> None:
    raise ValueError(f"card {card} was refused")


@app.task
async def look_it_up(card: str) -> None:
    raise pgqueue.Unrecoverable(str({}.get(card) or KeyError(card)))


@app.task
def take_a_number(card: int) -> None:
    """Never runs: the argument is no number."""


@app.task
def cancel_it(card: str) -> None:
    raise pgqueue.Cancel(f"{card} is not wanted")


@app.task
def die_with_it(card: str) -> None:
    os._exit(3)


@app.task
def return_what_is_no_json(card: str) -> Any:
    return {"card": card, "of": object()}


@app.task
def tell_a_secret(card: str) -> None:
    """Write what an unhappy handler writes: the environment's DSN."""
    log.warning("cannot connect with %s", os.environ["PGQUEUE_DSN"])
    log.warning("nor with the password %s", os.environ.get("SHOP_PASSWORD"))


def redact(line: dict[str, Any]) -> dict[str, Any]:
    """Hide what this shop alone knows to be secret."""
    if line.get("event") == "charged":
        return {**line, "event": "c*****d", "by": "redact"}
    if "nor with" in line["event"]:
        raise ValueError(line["event"])
    return line
