"""`pgqueue exporter`: what it refuses; what it serves is in tests/process/test_metrics.py."""

from __future__ import annotations

import socket

from tests.support import run_pgqueue


def test_an_interval_that_makes_no_sense_is_refused(pgqueue):
    ended = pgqueue("exporter", "--refresh-seconds", "0.01")

    assert (ended.code, ended.err) == (
        2,
        "pgqueue: --refresh-seconds must be between 0.1 and 3600, not 0.01 (see: pgqueue exporter --help)\n",
    )


def test_a_port_that_is_taken_is_one_sentence(fast_dsn):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        ended = run_pgqueue("exporter", "--port", str(port), dsn=fast_dsn)

    assert ended.returncode == 2
    last = ended.stderr.splitlines()[-1]
    assert last == f"pgqueue: cannot serve metrics on 127.0.0.1:{port}: Address already in use"


def test_a_database_that_is_not_migrated_is_refused(empty_dsn):
    ended = run_pgqueue("exporter", "--port", "0", dsn=empty_dsn)

    assert ended.returncode == 1
    assert "pgqueue migrate" in ended.stderr.splitlines()[-1]
