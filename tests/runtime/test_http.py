"""The door for machines: it answers whatever the loop and other clients do."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException

import pytest

from pgqueue.errors import ConfigurationError
from pgqueue.runtime import http
from pgqueue.runtime.health import Health
from pgqueue.runtime.http import Answer, Server, pages
from tests.support import wait_until


def ask(port: int, path: str, method: str = "GET", host: str = "127.0.0.1") -> tuple[int, bytes]:
    connection = HTTPConnection(host, port, timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.fixture
def pulse() -> Health:
    return Health()


@pytest.fixture
def server(pulse: Health) -> Iterator[Server]:
    made = Server("127.0.0.1", 0, pages(lambda: b"numbers\n", pulse))
    yield made
    made.close()


def test_each_page_answers(server):
    assert ask(server.port, "/metrics") == (200, b"numbers\n")
    assert ask(server.port, "/metrics?name[]=x") == (200, b"numbers\n")
    assert ask(server.port, "/metrics", "HEAD") == (200, b"")
    for probe in ("/healthz", "/readyz", "/startupz"):
        status, body = ask(server.port, probe)
        assert (status, json.loads(body)["status"]) == (200, "ok")


def test_what_is_not_there_says_what_is(server):
    status, body = ask(server.port, "/etc/passwd")

    assert status == 404
    assert body == b"not here; there is /healthz /metrics /readyz /startupz\n"


def test_a_probe_tells_the_reasons(server, pulse):
    pulse.hindrances.append(lambda: ["it is draining"])

    status, body = ask(server.port, "/readyz")

    assert (status, json.loads(body)["reasons"]) == (503, ["it is draining"])
    assert ask(server.port, "/healthz")[0] == 200


def test_once_started_stays_started(server, pulse):
    reasons = ["it is starting"]
    pulse.hindrances.append(lambda: reasons)
    assert ask(server.port, "/startupz")[0] == 503

    reasons.clear()
    assert ask(server.port, "/startupz")[0] == 200

    reasons.append("it is draining")
    assert ask(server.port, "/startupz")[0] == 200
    assert ask(server.port, "/readyz")[0] == 503


def test_a_page_that_fails_says_so_without_its_secrets():
    def fail() -> Answer:
        raise RuntimeError("password=hunter2")

    server = Server("127.0.0.1", 0, {"/metrics": fail})
    try:
        assert ask(server.port, "/metrics") == (500, b"RuntimeError while answering\n")
    finally:
        server.close()


def test_clients_that_say_nothing_hold_nobody_up_for_long(server, monkeypatch):
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(http._MAX_REQUESTS - 1)]

    assert ask(server.port, "/metrics")[0] == 200

    for one in silent:
        one.close()


def test_more_clients_than_any_monitoring_has_are_turned_away(monkeypatch):
    monkeypatch.setattr(http, "_REQUEST_SECONDS", 300)  # none of them leaves room for another
    served = Server("127.0.0.1", 0, {})
    silent = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(http._MAX_REQUESTS + 5)]
    for one in silent:
        one.settimeout(60)

    turned_away = [one for one in silent[http._MAX_REQUESTS :] if one.recv(1) == b""]

    assert len(turned_away) == 5
    for one in silent:
        one.close()
    served.close()


def test_clients_that_say_a_little_now_and_then_are_cut_off_in_time(monkeypatch):
    """The time is for the whole request: each byte in time must not earn another read's time."""
    monkeypatch.setattr(http, "_REQUEST_SECONDS", 0.6)
    served = Server("127.0.0.1", 0, {"/healthz": lambda: Answer(200, "text/plain", b"ok\n")})
    slow = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(http._MAX_REQUESTS)]
    try:

        def answers() -> bool:
            for one in slow:
                with contextlib.suppress(OSError):
                    one.send(b"G")
            try:
                return ask(served.port, "/healthz") == (200, b"ok\n")
            except (OSError, HTTPException):
                return False

        wait_until(answers)
    finally:
        for one in slow:
            one.close()
        served.close()


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow"])
def test_a_client_that_stops_in_the_middle_of_its_request_is_cut_off(monkeypatch, sent):
    monkeypatch.setattr(http, "_REQUEST_SECONDS", 0.2)
    served = Server("127.0.0.1", 0, {})
    try:
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as one:
            one.sendall(sent)

            assert one.recv(1) == b""
    finally:
        served.close()


def test_a_request_that_no_thread_could_be_started_for_gives_its_turn_back(server, monkeypatch):
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(http._MAX_REQUESTS + 1):
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as one:
                assert one.recv(1) == b""

    assert ask(server.port, "/metrics") == (200, b"numbers\n")


def test_a_port_that_is_taken_is_one_sentence(server):
    with pytest.raises(
        ConfigurationError, match=rf"^cannot serve metrics on 127.0.0.1:{server.port}: Address already"
    ):
        Server("127.0.0.1", server.port, {})


def test_closed_it_leaves_no_thread_and_no_port():
    before = threading.active_count()

    server = Server("127.0.0.1", 0, {})
    server.close()

    assert threading.active_count() <= before + 1  # serve_forever has ended; its thread may be on its way
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
