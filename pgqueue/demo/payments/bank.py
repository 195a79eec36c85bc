"""The bank of the payments demo: a server on loopback that is away for a while and keeps its own books."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Bank:
    """What the bank was told, by key. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_away = False
        self.booked: dict[str, tuple[int, int]] = {}
        self.calls = 0
        self.refused = 0
        self.repeated = 0
        # Told something else under a key that it knew: that must not be.
        self.contradicted: list[str] = []
        self.url = ""

    def go_away(self) -> None:
        with self._lock:
            self._is_away = True

    def come_back(self) -> None:
        with self._lock:
            self._is_away = False

    def book(self, said: dict[str, Any]) -> str | None:
        """Book a transfer under its key, once, and give the receipt; None while away."""
        key, what = said["key"], (said["transfer"], said["cents"])
        with self._lock:
            self.calls += 1
            if self._is_away:
                self.refused += 1
                return None
            if (known := self.booked.get(key)) is not None:
                self.repeated += 1
                if known != what:
                    self.contradicted.append(key)
            else:
                self.booked[key] = what
            return f"receipt for {key}"


@contextmanager
def open_bank() -> Iterator[Bank]:
    """Serve a bank on loopback until the block ends."""
    bank = Bank()

    class Desk(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            receipt = bank.book(said)
            body = json.dumps({"receipt": receipt}).encode()
            self.send_response(503 if receipt is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Say nothing: what was booked is what counts."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Pass over a caller that was killed in the middle of its call: that is what this is about."""

    with Server(("127.0.0.1", 0), Desk) as server:
        bank.url = f"http://127.0.0.1:{server.server_address[1]}/"
        serving = threading.Thread(target=server.serve_forever, name="bank", daemon=True)
        serving.start()
        try:
            yield bank
        finally:
            server.shutdown()
            serving.join(5)
