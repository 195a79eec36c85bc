"""Connections whose other side is there and never answers."""

from __future__ import annotations

from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.faults.proxy import Proxy
from tests.process.support import Queue, worker
from tests.support import wait_until

SESSIONS = (
    "SELECT pid FROM pg_stat_activity "
    "WHERE application_name LIKE 'pgqueue worker%%' AND datname = current_database()"
)


def test_a_worker_whose_connections_fall_silent_gets_new_ones(queue: Queue, tmp_path: Path) -> None:
    server = conninfo_to_dict(queue.dsn)
    host, port = str(server["host"]), server.get("port", 5432)
    proxy = Proxy(lambda: f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, int(port)))
    try:
        with worker(make_conninfo(queue.dsn, host="127.0.0.1", port=proxy.port), tmp_path) as started:
            queue.wait_for_state(queue.insert("double", '{"number": 1}'), "succeeded")

            wait_until(lambda: len(queue.all(SESSIONS)) == 4, message="claim, finish, listen, lease are up")
            assert proxy.strand() == 4
            # Neither keepalives nor a timeout of the server's end this wait: only our own patience does.
            queue.wait_for_state(queue.insert("double", '{"number": 2}'), "succeeded", seconds=40)

            assert started.lines("database is back")
            started.process.kill()
    finally:
        proxy.close()
