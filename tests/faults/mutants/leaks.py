"""Nothing stays behind, and no secret gets out: I10, I12."""

from __future__ import annotations

import signal

from tests.faults.arena import until
from tests.faults.drill import KEY, Drill
from tests.faults.invariants import Watch
from tests.faults.mutants.mutant import mutant


def keyed_jobs_run(drill: Drill) -> None:
    drill.enqueue(5, concurrency_key=KEY)
    session = drill.session
    while claimed := session.claim():
        for attempt in claimed:
            drill.count_up(session, attempt)
        drill.complete(session, *claimed)


@mutant("I10", keyed_jobs_run)
def keeps_the_key_locked(drill: Drill) -> None:
    drill.alter("claim", "pg_try_advisory_xact_lock(key_lock", "pg_try_advisory_lock(key_lock")


def a_worker_starts_and_ends(drill: Drill) -> None:
    drill.evidence.secret = drill.arena.secret
    watch = Watch(lambda: drill.arena.connect(drill.name), secret=drill.arena.secret, every_seconds=0.05)
    watch.start()
    worker = drill.worker("-c", "2")
    # Two whole looks with the worker there.
    looks = watch.looks["processes"]
    until(lambda: watch.looks["processes"] > looks + 2, 60)
    worker.signal(signal.SIGTERM)
    worker.end()
    watch.stop()
    drill.evidence.looks = watch.looks
    drill.evidence.secret_logs = [worker.log]


@mutant("I12", a_worker_starts_and_ends, is_slow=True)
def says_its_password(drill: Drill) -> None:
    """Be started by a script that takes the DSN as an argument."""
    drill.launcher = (
        "-c",
        "import sys; from pgqueue.cli import main; del sys.argv[1]; sys.exit(main())",
        drill.dsn,
    )


@mutant("I12", a_worker_starts_and_ends, is_slow=True)
def logs_its_password(drill: Drill) -> None:
    """Be started by a script that writes down its settings."""
    code = "import os, sys; from pgqueue.cli import main; print(os.environ['PGQUEUE_DSN']); sys.exit(main())"
    drill.launcher = ("-c", code)
