"""What a worker tells systemd, read from the socket that systemd would listen on."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.support import Queue, worker
from tests.support import open_folder, wait_until


class Systemd:
    """The listening end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.lines: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setblocking(False)

    def hear(self) -> list[str]:
        """Read what has come, and give everything so far."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.lines += self._socket.recv(4096).decode().splitlines()
        return self.lines

    def wait_for(self, line: str, count: int = 1) -> None:
        wait_until(lambda: sum(one.startswith(line) for one in self.hear()) >= count, 20, f"{line}")

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest) -> Iterator[Systemd]:
    with open_folder() as folder:
        made = Systemd(f"{'@' if request.param == 'abstract' else ''}{folder}/notify")
        yield made
        made.close()


def test_systemd_hears_when_a_worker_is_ready_lives_and_stops(
    queue: Queue, tmp_path: Path, systemd: Systemd
) -> None:
    told = {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "300000"}
    job = queue.insert("sleep", '{"seconds": 1}')
    with worker(queue.dsn, tmp_path, env=told) as started:
        systemd.wait_for("READY=1")
        systemd.wait_for("STATUS=1 running, 0 succeeded")
        systemd.wait_for("STATUS=0 running, 1 succeeded")
        systemd.wait_for("WATCHDOG=1", 4)
        # Not for its children to speak with.
        environment = Path(f"/proc/{started.children()[0]}/environ").read_bytes()
        assert b"NOTIFY_SOCKET" not in environment
        assert b"WATCHDOG_USEC" not in environment
        assert "STOPPING=1" not in systemd.lines

        assert started.stop() == 0
        systemd.wait_for("STOPPING=1")
    assert queue.state(job) == "succeeded"
    assert systemd.lines.count("READY=1") == systemd.lines.count("STOPPING=1") == 1


def test_the_watchdog_starves_while_the_loop_stands_still(
    queue: Queue, tmp_path: Path, systemd: Systemd
) -> None:
    told = {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "200000"}
    with worker(queue.dsn, tmp_path, "--processes", "0", env=told) as started:
        systemd.wait_for("WATCHDOG=1")
        job = queue.insert("block_the_loop", '{"seconds": 6}')
        wait_until(lambda: queue.effects(job) == 1)
        heard, stands_still_until = len(systemd.hear()), time.monotonic() + 1.5
        wait_until(lambda: time.monotonic() > stands_still_until)

        assert len(systemd.hear()) == heard
        queue.wait_for_state(job, "succeeded")
        systemd.wait_for("WATCHDOG=1", systemd.lines.count("WATCHDOG=1") + 2)
        assert started.stop() == 0


def test_a_supervisor_that_does_not_listen_holds_nobody_up(queue: Queue, tmp_path: Path) -> None:
    job = queue.insert("touch")
    told = {"NOTIFY_SOCKET": str(tmp_path / "nobody"), "WATCHDOG_USEC": "not a number"}
    with worker(queue.dsn, tmp_path, env=told) as started:
        queue.wait_for_state(job, "succeeded")

        assert started.stop() == 0
