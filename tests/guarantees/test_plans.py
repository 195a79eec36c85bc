"""The plans stay boring: made from an empty table, before a burst, with stale or fresh statistics.

auto_explain shows each statement inside the functions. Not allowed on jobs: a sequential or bitmap
scan, a hash or merge join, an index scan that reads many rows for each that it keeps.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.sql.support import OpenSession, Session

BURST = """
INSERT INTO pgqueue.jobs (task, queue, priority, max_attempts, timeout_seconds, concurrency_limit, state,
                          concurrency_key)
SELECT 't', CASE WHEN i % 4 = 0 THEN 'plain' ELSE 'default' END, 0, 5, 300, 1, 'ready',
       CASE WHEN i % 4 > 0 THEN 'k' || i % 2000 END
FROM generate_series(1, 60000) AS i
"""
FULL_SCAN = re.compile(r"Seq Scan on jobs|Bitmap Heap Scan on jobs")
JOIN = re.compile(r"(?:Hash|Merge) (?:\w+ )?Join")
INDEX_SCAN = re.compile(
    r"(Index (?:Only )?Scan using \w+) on jobs.*?rows=([\d.]+) loops=\d+\)((?:\n(?!\s*->).*)*)"
)
REMOVED = re.compile(r"Rows Removed by (?:Filter|Index Recheck): (\d+)")


def faults(plan: str) -> set[str]:
    found = {match[0] for match in FULL_SCAN.finditer(plan)}
    found |= {match[0] for match in JOIN.finditer(plan) if " on jobs" in plan[match.start() :]}
    for scan, kept, details in INDEX_SCAN.findall(plan):
        removed = REMOVED.search(details)
        if removed and int(removed[1]) > 20 * max(1.0, float(kept)):
            found.add(f"{scan} reads {removed[1]} rows for {kept}")
    return found


@pytest.fixture
def open_explained(dsn: str, open_session: OpenSession) -> Callable[[], Session]:
    def open_one() -> Session:
        session = open_session(dsn)
        session.plans = []
        session.connection.add_notice_handler(
            lambda notice: session.plans.append(notice.message_primary or "")
        )
        session.rows(
            "LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0; "
            "SET auto_explain.log_nested_statements = on; SET auto_explain.log_analyze = on; "
            "SET auto_explain.log_timing = off; SET client_min_messages = log; SET synchronous_commit = off"
        )
        return session

    return open_one


def use_everything(session: Session, batch: int) -> set[str]:
    """Call every function that works on jobs, and give what is wrong with the plans."""
    session.plans.clear()
    for queue in ("default", "plain"):
        attempts = session.claim(queue, batch)
        quarter = max(1, len(attempts) // 4)
        session.heartbeat(*attempts)
        session.complete(*attempts[:quarter])
        session.fail(*attempts[quarter : 2 * quarter], base_seconds=0)
        session.release(*attempts[2 * quarter : 3 * quarter])
        session.cancel(*(attempt.job_id for attempt in attempts[3 * quarter :]))
        session.crash(*attempts[3 * quarter :])
    session.enqueue(unique_key="u", on_conflict="replace", concurrency_key="k1")
    session.enqueue_many({"task": "t", "unique_key": "v"}, {"task": "t"})
    session.call("promote")
    session.call("reap")
    session.call("sweep")
    return {fault for plan in session.plans for fault in faults(plan.partition("Query Text:")[2])}


def test_plans_made_from_an_empty_table_survive_a_burst(session, open_explained):
    early = open_explained()
    for _ in range(6):  # a statement's plan is made for good at its sixth use
        assert use_everything(early, 10) == set()

    early.rows(
        "SET auto_explain.log_min_duration = -1; ALTER TABLE pgqueue.jobs SET (autovacuum_enabled = off)"
    )
    early.rows(BURST)
    early.rows("SET auto_explain.log_min_duration = 0")

    assert use_everything(early, 10) == set()
    assert use_everything(early, 1000) == set()
    late = open_explained()
    assert use_everything(late, 10) == set(), "with the statistics of an empty table"
    assert use_everything(late, 1000) == set(), "with the statistics of an empty table"
    late.rows("ANALYZE pgqueue.jobs")
    assert use_everything(early, 100) == set(), "after ANALYZE"
    assert use_everything(open_explained(), 100) == set(), "after ANALYZE, a new session"


@pytest.mark.parametrize(
    "switches",
    [["hashjoin"], ["mergejoin"], ["nestloop"], ["indexscan"], ["sort"], ["material"], ["hashagg", "sort"]],
    ids="-".join,
)
def test_a_sessions_own_planner_settings_change_nothing(open_explained, switches):
    session = open_explained()
    session.rows("SET auto_explain.log_min_duration = -1")
    session.rows(BURST.replace("60000", "5000"))
    session.rows("ANALYZE pgqueue.jobs; SET auto_explain.log_min_duration = 0")
    session.rows("; ".join(f"SET enable_{name} = off" for name in switches))

    assert use_everything(session, 50) == set()


def test_rate_limits_do_not_read_more_than_they_need(open_explained):
    session = open_explained()
    session.rows("SET auto_explain.log_min_duration = -1")
    session.rows(BURST)
    session.rows("INSERT INTO pgqueue.rate_limits (name, tokens_per_second, burst) VALUES ('task:t', 1, 1)")
    session.rows("SET auto_explain.log_min_duration = 0")

    for _ in range(4):
        assert use_everything(session, 100) == set()


def test_a_full_scan_would_be_seen(open_explained):
    """The control of the tests before."""
    session = open_explained()
    session.rows(BURST.replace("60000", "500"))

    session.rows("SELECT count(*) FROM pgqueue.jobs WHERE headers IS NOT NULL")

    assert faults(session.plans[-1]) == {"Seq Scan on jobs"}
