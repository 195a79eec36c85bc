"""A Prometheus and an exporter for tests, with the rules that the package ships."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from pgqueue.cli.assets import read
from tests.support import end, installed, start_pgqueue, wait_until

# Thresholds in seconds that are minutes in the rules.
SHORTER = {
    "oldest_ready_seconds) > 300": "oldest_ready_seconds) > 2",
    "oldest_transaction_seconds) > 600": "oldest_transaction_seconds) > 2",
}


class Prometheus:
    """A Prometheus of the test's own, asked by HTTP."""

    def __init__(self, port: int) -> None:
        self.port = port
        # What each alert has been, in order.
        self.seen: dict[str, list[str]] = {}

    def get(self, path: str, **parameters: str) -> Any:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", f"{path}?{urllib.parse.urlencode(parameters)}")
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status == 200, body
            return json.loads(body)["data"] if body.startswith(b"{") else body
        finally:
            connection.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        return self.get("/api/v1/query", query=expression)["result"]

    def is_ready(self) -> bool:
        try:
            return bool(self.get("/-/ready"))
        except (OSError, AssertionError):
            return False

    def firing(self) -> set[str]:
        firing = set()
        for alert in self.get("/api/v1/alerts")["alerts"]:
            name, state = alert["labels"]["alertname"], alert["state"]
            seen = self.seen.setdefault(name, [])
            if not seen or seen[-1] != state:
                seen.append(state)
            if state == "firing":
                firing.add(name)
        return firing

    def wait_for(self, *alerts: str, seconds: float = 40) -> None:
        try:
            wait_until(lambda: set(alerts) <= self.firing(), seconds)
        except AssertionError:
            raise AssertionError(f"{set(alerts) - self.firing()} did not fire; seen: {self.seen}") from None


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def prometheus(folder: Path, *, is_hurried: bool = True, **targets: int) -> Iterator[Prometheus]:
    """Start one with the shipped rules, perhaps in a hurry, and the targets as jobs."""
    program = installed("prometheus", "prometheus")
    rules = read("prometheus-rules.yml")
    if is_hurried:
        rules = re.sub(r"\b(\d+)m\b", r"\1s", rules)
        for long, short in SHORTER.items():
            assert long in rules
            rules = rules.replace(long, short)
    interval = "500ms" if is_hurried else "5s"
    (folder / "rules.yml").write_text(rules)
    jobs = "".join(
        f"  - job_name: {name}\n    static_configs: [{{targets: ['127.0.0.1:{port}']}}]\n"
        for name, port in targets.items()
    )
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: {interval}, evaluation_interval: {interval}}}\n"
        f"rule_files: [rules.yml]\nscrape_configs:\n{jobs}"
    )
    port = free_port()
    command = [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            made = Prometheus(port)
            wait_until(made.is_ready, 30, "prometheus is ready")
            yield made
        finally:
            end(process)


def port_in(log: Path, event: str) -> int:
    found = re.search(rf'"event": ?"{event}".*"port": ?(\d+)', log.read_text())
    return int(found[1]) if found else 0


@contextmanager
def exporter(dsn: str, folder: Path, refresh_seconds: float = 0.5) -> Iterator[int]:
    path = folder / "exporter.log"
    arguments = ("exporter", "--port", "0", "--refresh-seconds", str(refresh_seconds), "--log-format", "json")
    with path.open("wb") as log, start_pgqueue(*arguments, dsn=dsn, stderr=log):
        yield wait_until(lambda: port_in(path, "exporter started"), 20, "the exporter's port")
