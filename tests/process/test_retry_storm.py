"""Many jobs fail at the same instant: they come back apart."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.process.support import Queue, worker
from tests.support import wait_until

JOBS = 2000

# A retry is overwritten when the next one is planned, so each is written down.
HISTORY = """
CREATE TABLE retries (attempt integer, at timestamptz DEFAULT clock_timestamp(), run_at timestamptz);
CREATE FUNCTION write_down() RETURNS trigger LANGUAGE plpgsql AS
    $$BEGIN INSERT INTO public.retries VALUES (NEW.attempt, DEFAULT, NEW.run_at); RETURN NULL; END$$;
CREATE TRIGGER write_down AFTER UPDATE ON pgqueue.jobs FOR EACH ROW
    WHEN (OLD.state = 'running' AND NEW.state = 'scheduled') EXECUTE FUNCTION write_down();
"""


# The window of full jitter doubles with each attempt: 8 s after the third one, 16 s after the fourth.
@pytest.mark.parametrize(("attempt", "window_seconds"), [(3, 8), (4, 16)])
def test_jobs_that_fail_at_the_same_instant_are_tried_again_apart(
    attempt: int, window_seconds: int, queue: Queue, tmp_path: Path
) -> None:
    down = tmp_path / "down"
    queue.connection.execute(HISTORY)  # type: ignore[arg-type]
    queue.connection.execute(
        "INSERT INTO pgqueue.jobs (task, args, attempt) "
        "SELECT 'fail_together', jsonb_build_object('path', %s::text), %s FROM generate_series(1, %s)",
        (str(down), attempt - 1, JOBS),
    )
    with worker(queue.dsn, tmp_path, "-c", str(JOBS), app="tests.process.hard_jobs:app") as started:
        wait_until(lambda: queue.count("jobs", "state = 'running'") == JOBS, 30)

        down.touch()
        wait_until(lambda: queue.one("SELECT count(*) FROM retries WHERE attempt = %s", attempt) == JOBS, 30)
        started.process.kill()

    seconds = queue.all(
        "SELECT extract(epoch FROM run_at - min(at) OVER ())::float FROM retries WHERE attempt = %s", attempt
    )
    counts = Counter(int(second) for (second,) in seconds)
    ratio = max(counts.values()) / (JOBS / window_seconds)
    print("retries per second:", *(counts[second] for second in range(max(counts) + 1)), f"({ratio:.2f})")
    assert ratio <= 2
    assert len(counts) >= window_seconds
