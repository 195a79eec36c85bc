"""`pgqueue assets`: what is shipped for other programs fits this version."""

from __future__ import annotations

import asyncio
import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import psycopg
import pytest

from pgqueue import cli
from pgqueue.cli.assets import ASSETS, read
from pgqueue.errors import ConfigurationError, SchemaMismatch
from pgqueue.runtime.exposition import Exposition, WorkerNow
from pgqueue.runtime.gauges import Gauges
from pgqueue.runtime.link import Outage
from pgqueue.runtime.log import Log
from pgqueue.runtime.metrics import Metrics
from tests.support import ROOT, installed

FOLDER = ROOT / "pgqueue" / "assets"
RULES = read("prometheus-rules.yml")
ALERTS = {
    found["name"]: found["body"]
    for found in re.finditer(r"- alert: (?P<name>\w+)\n(?P<body>.*?)(?=\n      - |\Z)", RULES, re.DOTALL)
}
# In Grafana the last letters of a histogram's or counter's name say which of its series is meant.
METRIC = re.compile(r"\b(?:pgqueue|process)_\w+\b")
SERIES = re.compile(r"_(?:bucket|sum|count)$")


def dashboard_targets(name: str) -> list[tuple[str, dict]]:
    board = json.loads(read(name))
    return [(panel["title"], target) for panel in board["panels"] for target in panel.get("targets", ())]


def command_of(name: str) -> click.Command:
    command = cli.root.get_command(click.Context(cli.root), name)
    assert command is not None, name
    return command


@pytest.fixture
def promtool() -> str:
    return installed("promtool", "prometheus")


@pytest.fixture
def exported(fast_dsn: str) -> set[str]:
    """The names that a worker that reads the whole queue exports."""
    log = Log("test")

    async def render() -> str:
        outage = Outage(log)
        gauges = Gauges(fast_dsn, "pgqueue", outage, log)
        await gauges._turn()
        await gauges._link.close()
        exposition = Exposition()
        exposition.add_worker(Metrics(), WorkerNow)
        exposition.add_database(gauges, lambda: True)
        return exposition.render().decode()

    return set(re.findall(r"^# TYPE (\w+) ", asyncio.run(render()), re.MULTILINE))


# The command.


def test_every_file_is_listed_with_its_purpose(pgqueue):
    ended = pgqueue("assets", "list", "--json")

    assert {asset["name"] for asset in ended.json} == {path.name for path in FOLDER.iterdir()}
    assert all(asset["purpose"] for asset in ended.json)


@pytest.mark.parametrize("name", [asset.name for asset in ASSETS])
def test_a_file_is_shown_as_it_is(pgqueue, name):
    ended = pgqueue("assets", "show", name)

    assert (ended.code, ended.out, ended.err) == (0, (FOLDER / name).read_text(encoding="utf-8"), "")


def test_a_name_that_is_none_is_told_the_nearest(pgqueue):
    ended = pgqueue("assets", "show", "prometheus-rule.yml")

    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "pgqueue: no asset 'prometheus-rule.yml'; did you mean 'prometheus-rules.yml'?\n"


# Alerts.


def test_promtool_accepts_the_rules(promtool):
    checked = subprocess.run(
        [promtool, "check", "rules", FOLDER / "prometheus-rules.yml"],
        text=True,
        capture_output=True,
        check=False,
    )

    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_promtool_accepts_the_configuration(promtool):
    checked = subprocess.run(
        [promtool, "check", "config", FOLDER / "prometheus.yml"], text=True, capture_output=True, check=False
    )

    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_each_alert_is_quiet_pending_and_firing_when_it_should_be(promtool):
    tested = subprocess.run(
        [promtool, "test", "rules", FOLDER / "prometheus-rules.test.yml"],
        text=True,
        capture_output=True,
        check=False,
    )

    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_no_alert_is_without_a_test():
    tested = set(re.findall(r'alertname="(\w+)", alertstate="firing"', read("prometheus-rules.test.yml")))

    assert tested == set(ALERTS)


def test_every_alert_says_how_bad_it_is_and_what_to_do():
    assert len(ALERTS) >= 18
    for name, body in ALERTS.items():
        assert re.search(r"\n        for: \d+m\n", body), name
        assert re.search(r"labels: \{severity: (critical|warning|info)\}", body), name
        assert re.search(r"\n          summary: \S.*\n          runbook: \|\n            \S", body), name


def test_every_command_of_a_runbook_is_one():
    commands = set(re.findall(r"\bpgqueue ((?:[a-z]+(?:-[a-z]+)* ?){1,2})", RULES))

    unknown = set()
    for text in commands:
        words, group = text.split(), cli.root
        context = click.Context(group)
        command = group.get_command(context, words[0])
        if command is None or (
            isinstance(command, click.Group) and len(words) > 1 and words[1] not in command.commands
        ):
            unknown.add(text)

    assert len(commands) > 10
    assert unknown == set()


def test_what_a_runbook_says_of_a_command_is_so(pgqueue, queue):
    queue.see_worker(["mail"])
    queue.run(queue="mail", timeout_seconds=10)
    command_line = re.compile(r"pgqueue ([a-z]+) ?([a-z]+(?:-[a-z]+)*)?(.*)")

    for line in RULES.splitlines():
        if not (found := command_line.search(line)) or "`" in line:
            continue
        name, subcommand, rest = found.groups()
        command = command_of(name)
        if isinstance(command, click.Group):
            command = command.commands[subcommand or "list"]
        options = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= options, line
        if re.search(r"\basks\b", rest):
            assert "--yes" in options, line
        if column := re.search(r"\(column (\w+)\)", rest):
            words = [name, *([subcommand] if subcommand else [])]
            given = [] if name == "workers" else ["--state", "running"]
            assert column[1] in pgqueue(*words, *given).out.splitlines()[0].split(), line
        assert not re.search(r"\([A-Z]+\)", rest), "say (column NAME)"


def test_a_runbook_tells_the_exit_codes_that_a_worker_has():
    codes = {
        said: int(re.search(rf"Exit (\d+):[^\n]*{said}", ALERTS["PgqueueNoWorkerAlive"])[1])
        for said in ("setting", "schema")
    }

    assert codes == {"setting": ConfigurationError.exit_code, "schema": SchemaMismatch.exit_code}


def test_a_runbook_asks_the_database_where_a_variable_leads_to_the_process(pgqueue, monkeypatch):
    monkeypatch.setenv("PGQUEUE_METRICS_PORT", "1")
    (command_line,) = re.findall(
        r"Is it the database\? (.*?)   \(exit 75", ALERTS["PgqueueDatabaseUnreachable"]
    )
    *environment, _, command = command_line.split()
    assert environment[:2] == ["env", "-u"]
    monkeypatch.delenv(environment[2])

    assert pgqueue(command).out == "the queue is ready\n"


def test_the_rules_have_one_name_wherever_they_are_named():
    (wanted,) = re.findall(r"rule_files:\n  - (\S+)", read("prometheus.yml"))
    texts = [command_of("assets").help or "", (ROOT / "README.md").read_text(encoding="utf-8")]
    saved = [
        (shown, Path(path).name)
        for text in texts
        for shown, path in re.findall(r"assets show (\S+) > (\S+)", text)
    ]

    assert len(saved) >= 2
    assert set(saved) == {(wanted, wanted)}


def test_what_is_said_of_a_worker_behind_a_proxy_names_its_options():
    text = read("pgbouncer.md")
    (transaction,) = re.findall(r"\| `pgqueue worker` \| works \| (.*) \|", text)

    options = {option for parameter in command_of("worker").params for option in parameter.opts}
    assert set(re.findall(r"`(--[a-z-]+)", text)) <= options
    assert "--listen-dsn" in transaction
    assert "only" not in transaction


def test_the_rules_ask_for_metrics_that_there_are(exported):
    asked = {SERIES.sub("", name) for name in METRIC.findall(RULES)}

    recorded = {"pgqueue_queue_running"}
    assert asked - recorded - exported == set()


# Dashboards.


def test_every_panel_asks_for_metrics_that_there_are(exported):
    targets = dashboard_targets("grafana-prometheus.json")

    missing = {
        title: lacking
        for title, target in targets
        if (lacking := {SERIES.sub("", name) for name in METRIC.findall(target["expr"])} - exported)
    }

    assert len(targets) > 30
    assert missing == {}


def test_every_metric_is_on_a_panel(exported):
    shown = set()
    for _, target in dashboard_targets("grafana-prometheus.json"):
        shown |= {SERIES.sub("", name) for name in METRIC.findall(target["expr"])}

    assert {name for name in exported if name.startswith("pgqueue_")} - shown == set()


@pytest.mark.parametrize("name", ["grafana-prometheus.json", "grafana-postgresql.json"])
def test_panels_have_a_place_a_title_and_an_explanation_of_their_own(name):
    panels = json.loads(read(name))["panels"]

    places = []
    for at in (panel["gridPos"] for panel in panels):
        places.append({(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])})
    assert len(set().union(*places)) == sum(map(len, places)), "panels overlap"
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    assert all(panel.get("description") for panel in panels if panel["type"] != "row")


@pytest.mark.parametrize(
    ("title", "target"),
    dashboard_targets("grafana-postgresql.json"),
    ids=[title for title, _ in dashboard_targets("grafana-postgresql.json")],
)
def test_every_sql_panel_shows_what_is_there(queue, title, target):
    queue.see_worker(["mail"])
    queue.succeed()
    queue.bury()
    queue.run(queue="busy", timeout_seconds=10)
    queue.enqueue(queue="mail")
    queue.connection.execute(
        "INSERT INTO pgqueue.schedules (name, cron, task) VALUES ('nightly', '0 3 * * *', 'send')"
    )
    queue.connection.execute("INSERT INTO pgqueue.breakers (name, state) VALUES ('bank', 'open')")
    queue.connection.execute(
        "INSERT INTO pgqueue.rate_limits (name, tokens_per_second, next_at) VALUES ('task:send', 1, now())"
    )
    text = re.sub(
        r"\$__timeFilter\((\w+)\)", r"\1 BETWEEN now() - interval '3 h' AND now()", target["rawSql"]
    ).replace("$schema", "pgqueue")
    assert "$" not in text

    with psycopg.connect(queue.dsn) as holder:
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT 1")
        found = queue.connection.execute(text)
        names, rows = [column.name for column in found.description], found.fetchall()

    assert rows, title
    if target["format"] == "time_series":
        assert names[:2] == ["time", "metric"]


# Services.


def options_of(command_line: str) -> dict:
    """Give what the program makes of a command line; fails if it would refuse it."""
    program, name, *arguments = shlex.split(command_line)
    assert Path(program).name == "pgqueue"
    return command_of(name).make_context(name, arguments).params


def test_the_systemd_services_start_what_there_is_and_wait_longer_than_the_grace():
    for name in ("pgqueue.service", "pgqueue-exporter.service"):
        unit = configparser.ConfigParser(interpolation=None, strict=True)
        unit.optionxform = str
        unit.read_string(read(name))
        service = unit["Service"]

        options = options_of(service["ExecStart"])

        if "grace_seconds" in options:
            assert float(service["TimeoutStopSec"]) > options["grace_seconds"]
            assert service["Type"] == "notify"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
@pytest.mark.parametrize("name", ["pgqueue.service", "pgqueue-exporter.service"])
def test_systemd_finds_no_fault_with_them(tmp_path, name):
    unit = tmp_path / name
    unit.write_text(read(name).replace("/srv/shop/.venv/bin/pgqueue", shutil.which("true")))

    checked = subprocess.run(["systemd-analyze", "verify", unit], text=True, capture_output=True, check=False)

    assert name not in checked.stderr


def test_supervisor_starts_what_there_is_and_waits_longer_than_the_grace():
    programs = configparser.ConfigParser(interpolation=None, strict=True)
    programs.read_string(read("supervisor.conf"))

    worker = programs["program:pgqueue"]

    assert float(worker["stopwaitsecs"]) > options_of(worker["command"])["grace_seconds"]
    assert worker["stopsignal"] == "TERM"
    assert options_of(programs["program:pgqueue-exporter"]["command"])["port"] == 9465


def test_kubernetes_starts_what_there_is_and_probes_what_answers():
    text = read("kubernetes.yaml")

    lines = [
        [word.strip().strip('"') for word in found.split(",")]
        for found in re.findall(r"args: \[(.*)\]", text)
    ]
    options = [options_of(shlex.join(line)) for line in lines]

    assert [line[1] for line in lines] == ["migrate", "worker", "exporter"]
    (grace,) = re.findall(r"terminationGracePeriodSeconds: (\d+)", text)
    assert float(grace) > options[1]["grace_seconds"]
    assert re.findall(r"(\w+)Probe:\n +httpGet: \{path: (/\w+),", text) == [
        ("startup", "/startupz"),
        ("liveness", "/healthz"),
        ("readiness", "/readyz"),
        ("liveness", "/healthz"),
        ("readiness", "/readyz"),
    ]
