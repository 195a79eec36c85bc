"""With --pgbouncer, every test here goes through one, but for those that are about sessions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.guarantees import support
from tests.pooler import Pooler
from tests.sql.support import OpenSession, open_session, pooler, session

__all__ = ["open_session", "pooler", "session"]

_BY_PROCESS = "it waits for a session by its process"
# What a proxy that pools transactions cannot give, by file or test: these go straight to the server.
NEEDS_SESSIONS = {
    "test_bell.py": "a session that listens and holds locks; behind a proxy, on a DSN of its own",
    "test_limits_are_exact_by_every_measure_under_a_role_that_defaults_to_repeatable_read": (
        "its sessions are made READ COMMITTED for good; behind a proxy our statements carry that along"
    ),
    "test_interleavings.py": "each step of a function is held up by a lock of its session",
    "test_plans.py": "the plans are told to the session that asked for them",
    "test_an_attempt_that_ends_while_a_heartbeat_moves_its_row_is_not_lost": _BY_PROCESS,
    "test_a_statement_that_locks_and_changes_by_place_at_once_would_lose_it": _BY_PROCESS,
    "test_unblocking_outlasts_a_claim_that_holds_the_row_by_accident": _BY_PROCESS,
    "test_a_job_that_was_parked_while_its_key_was_being_freed_is_woken": _BY_PROCESS,
    "test_a_pattern_takes_along_what_a_claim_is_just_making_of_it": _BY_PROCESS,
    "test_a_batch_that_replaces_jobs_locks_them_in_order_of_id_like_everybody": _BY_PROCESS,
}


@pytest.fixture
def fast_dsn(fast_dsn: str, pooler: Pooler | None) -> str:
    return fast_dsn if pooler is None else pooler.lead(fast_dsn)


@pytest.fixture
def dsn(dsn: str, pooler: Pooler | None) -> str:
    return dsn if pooler is None else pooler.lead(dsn)


@pytest.fixture
def patient_unblock(open_session: OpenSession) -> Iterator[None]:
    """No wake-up is left to the sweep because the machine is busy."""
    with support.patient_unblock(open_session()):
        yield


@pytest.fixture(autouse=True)
def _skip_what_needs_sessions(request: pytest.FixtureRequest, pooler: Pooler | None) -> None:
    if pooler is not None:
        for name in (request.path.name, request.node.originalname):
            if name in NEEDS_SESSIONS:
                pytest.skip(f"needs sessions: {NEEDS_SESSIONS[name]}")
