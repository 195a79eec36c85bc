"""The worker's door for machines: /metrics, /healthz, /readyz, /startupz, served by threads of their own.

A loop that stands still cannot keep it from answering, and a client that is slow cannot hold the loop up.
"""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from pgqueue import __version__
from pgqueue.errors import ConfigurationError
from pgqueue.runtime.health import Health

_TEXT = "text/plain; charset=utf-8"
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"

# More at once than any monitoring asks; whoever comes then is turned away, not queued.
_MAX_REQUESTS = 8
# For a whole request, and as much for the answer: who sends a byte now and then holds a turn no longer.
_REQUEST_SECONDS = 5.0


class Answer(NamedTuple):
    status: int
    content_type: str
    body: bytes


Page = Callable[[], Answer]


def pages(render: Callable[[], bytes], pulse: Health) -> dict[str, Page]:
    """Give the pages of a process: what it measures, whether it lives, works, and has ever worked."""
    return {
        "/metrics": lambda: Answer(200, _EXPOSITION, render()),
        "/healthz": lambda: _verdict(pulse.against_life()),
        "/readyz": lambda: _verdict(pulse.against_work()),
        "/startupz": lambda: _verdict(pulse.against_start()),
    }


def _verdict(reasons: list[str]) -> Answer:
    """Answer a probe: 200 without reasons against it, else 503 with them."""
    document = {"status": "unready" if reasons else "ok", "reasons": reasons, "version": __version__}
    return Answer(503 if reasons else 200, "application/json", json.dumps(document).encode() + b"\n")


class _Request(io.RawIOBase):
    """What a client sends, until its time is over."""

    def __init__(self, client: socket.socket, seconds: float) -> None:
        self._client = client
        self._seconds = seconds
        self._ends_at = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._client.settimeout(left)
        try:
            return self._client.recv_into(buffer)
        finally:
            # The answer has a time of its own.
            self._client.settimeout(self._seconds)


class Server:
    """Serves pages from threads until closed. Port 0 takes any that is free; `port` says which."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Page]) -> None:
        """Listen.

        Raises:
            ConfigurationError: the address cannot be had.
        """
        try:
            self._server = _server(host, port, pages)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigurationError(f"cannot serve metrics on {host}:{port}: {reason}") from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="pgqueue-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _server(host: str, port: int, pages: Mapping[str, Page]) -> ThreadingHTTPServer:
    turns = threading.BoundedSemaphore(_MAX_REQUESTS)

    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_SECONDS
        server_version = "pgqueue"
        sys_version = ""

        def setup(self) -> None:
            super().setup()
            self.rfile.close()
            self.rfile = io.BufferedReader(_Request(self.connection, _REQUEST_SECONDS))

        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            if page is None:
                known = " ".join(sorted(pages))
                answer = Answer(404, _TEXT, f"not here; there is {known}\n".encode())
            else:
                try:
                    answer = page()
                except Exception as error:  # noqa: BLE001  the rim of a thread: the client hears of it
                    text = f"{type(error).__name__} while answering\n"
                    answer = Answer(500, _TEXT, text.encode())
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  its name there
            """Say nothing: a probe every second would be most of the log."""

    class Listener(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        # A full backlog would cost a probe the second after which it knocks again.
        request_queue_size = 64
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def server_bind(self) -> None:
            # Not HTTPServer's: it asks the resolver for our own name, which can take its time.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind(self.server_address)
            self.server_address = self.socket.getsockname()
            self.server_name, self.server_port = host, self.server_address[1]

        def process_request(self, request: Any, client_address: Any) -> None:
            if turns.acquire(blocking=False):
                try:
                    super().process_request(request, client_address)
                except BaseException:
                    # No thread could be started that would give it back.
                    turns.release()
                    raise
            else:
                self.shutdown_request(request)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                turns.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Say nothing: a client that hung up is its own affair."""

    return Listener((host, port), Handler)
