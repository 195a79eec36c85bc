"""Doing something once, without a worker: in a web handler, or in a consumer of another system."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from uuid import uuid4

from pgqueue.database import AsyncConnection, Connection, arun, run
from pgqueue.errors import ConfigurationError, KeyBusy
from pgqueue.model.encoding import Misfit, checked_text, dumps, plain
from pgqueue.model.keys import MAX_KEY_BYTES
from pgqueue.sql import Statement
from pgqueue.sql import once as statements


class OnceClaim:
    """What `once` gives: whether the key's effect has happened, and what it answered.

    Set `response`, anything JSON holds, for those who come with the same key later.
    """

    def __init__(self, key: str, token: str, begun: statements.Begun) -> None:
        self.key = key
        self.is_done = begun.verdict == "done"
        self.is_takeover = begun.verdict == "takeover"
        self.response: Any = None if begun.response is None else json.loads(begun.response)
        self._token = token
        self._began = begun.began

    def finish(self) -> Statement[str]:
        """Give the statement that says it has happened."""
        try:
            response = None if self.response is None else dumps(plain(self.response))
        except Misfit as misfit:
            raise ConfigurationError(f"key {self.key!r}: {misfit.where('response')}") from None
        return statements.finish(self.key, self._token, None, response, None, self._began)


@contextmanager
def once(conn: Connection[Any], key: str, job_name: str, *, schema: str = "pgqueue") -> Iterator[OnceClaim]:
    """Do something once for a key, on a connection of the caller's; jobs with this key count as well.

    `with pgqueue.once(conn, "charge:17", "charge") as claim:` opens a transaction (inside one, a
    savepoint). If `claim.is_done`, it has happened before and `claim.response` is what was
    answered then. Otherwise do it on this connection, and set `claim.response` if there is
    something to answer: what was done, and that it was, are committed together when the block
    ends, or neither is if it raises.

    Raises:
        KeyBusy: somebody is at it just now; nothing was done, try again later.
    """
    with conn.transaction():
        token, begin = _asked(key, job_name)
        claim = _claimed(token, key, run(conn, begin, schema))
        yield claim
        if not claim.is_done and run(conn, claim.finish(), schema) != "done":
            raise KeyBusy(key)


@asynccontextmanager
async def aonce(
    conn: AsyncConnection[Any], key: str, job_name: str, *, schema: str = "pgqueue"
) -> AsyncIterator[OnceClaim]:
    """Do something once for a key, on an async connection of the caller's; see `once`."""
    async with conn.transaction():
        token, begin = _asked(key, job_name)
        claim = _claimed(token, key, await arun(conn, begin, schema))
        yield claim
        if not claim.is_done and await arun(conn, claim.finish(), schema) != "done":
            raise KeyBusy(key)


def _asked(key: str, job_name: str) -> tuple[str, Statement[statements.Begun]]:
    try:
        checked_text("the key", key, MAX_KEY_BYTES)
        checked_text("the job's name", job_name, MAX_KEY_BYTES)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    token = str(uuid4())
    # An effect in this transaction cannot have happened in one that was cut off.
    return token, statements.begin(key, job_name, token)


def _claimed(token: str, key: str, begun: statements.Begun) -> OnceClaim:
    if begun.verdict == "busy":
        raise KeyBusy(key)
    return OnceClaim(key, token, begun)
