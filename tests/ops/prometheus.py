"""Runs the real promtool, Prometheus and Alertmanager of `make ops-tools`, each on a free port."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from ops.queries import ROOT
from servers import wait_until

RULES = ROOT / "deploy" / "prometheus"
TOOLS = ROOT / ".ops-tools" / "bin"
DEADLINE_SECONDS = 120.0
_LISTENING = re.compile(r'msg="Listening on".* address=(\S+)')

Series = dict[frozenset[tuple[str, str]], float]
"""The value of each series of an answer, by its labels, without the name."""


def rules(name: str, kind: str) -> dict[str, dict[str, Any]]:
    """The rules of a file of ours by the name of their alert or record."""
    groups = yaml.safe_load((RULES / name).read_text())["groups"]
    return {rule[kind]: rule for group in groups for rule in group["rules"]}


def tool(name: str) -> str:
    """The path of a tool; the test is skipped where it is not there."""
    path = TOOLS / name
    if not path.exists():
        pytest.skip(f"no {name} here: run make ops-tools")
    return str(path)


def promtool(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """One run of promtool, whatever its exit code, with standard error in its output."""
    return subprocess.run(
        [tool("promtool"), *arguments],
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A Prometheus that runs."""

    url: str
    client: httpx.Client

    def get(self, path: str, **parameters: str) -> Any:
        """What the API answers; AssertionError with its message if it is an error."""
        answer = self.client.get(f"{self.url}/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    def query(self, expression: str, at: float | None = None) -> Series:
        """The vector that an expression is now, or was at a Unix time."""
        moment = {} if at is None else {"time": f"{at:.3f}"}
        data = self.get("query", query=expression, **moment)
        assert data["resultType"] == "vector", expression
        return {
            frozenset((key, text) for key, text in one["metric"].items() if key != "__name__"): (
                float(one["value"][1])
            )
            for one in data["result"]
        }

    def names(self) -> set[str]:
        """Every metric that it ever saw."""
        return set(self.get("label/__name__/values"))

    def firing(self) -> set[str]:
        """The names of the alerts that fire now."""
        alerts = self.get("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def until_scraped(self, after: float) -> float:
        """Wait until every target answered a scrape after a Unix time; when the first one did."""

        def oldest() -> float | None:
            found = self.query('timestamp(up{job="holdfast"}) and up{job="holdfast"} == 1')
            first = min(found.values(), default=0.0)
            return first if first > after else None

        return wait_until(oldest, deadline_seconds=DEADLINE_SECONDS, what=lambda: "no scrape")


@contextmanager
def prometheus(
    directory: Path, targets: Sequence[str], alertmanager_url: str = ""
) -> Iterator[Prometheus]:
    """A Prometheus with our rules that scrapes `targets` each second."""
    directory.mkdir(parents=True, exist_ok=True)
    configuration = _configuration(targets, alertmanager_url)
    (directory / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    command = [
        tool("prometheus"),
        f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/data",
        "--web.listen-address=127.0.0.1:0",
    ]
    with _running(command, directory / "prometheus.log") as url, httpx.Client() as client:
        wait_until(
            lambda: client.get(f"{url}/-/ready").is_success,
            deadline_seconds=DEADLINE_SECONDS,
            what=(directory / "prometheus.log").read_text,
        )
        yield Prometheus(url, client)


def _configuration(targets: Sequence[str], alertmanager_url: str) -> dict[str, Any]:
    shipped: dict[str, Any] = yaml.safe_load((RULES / "prometheus.yml").read_text())
    (scrape,) = shipped["scrape_configs"]
    scrape["static_configs"] = [{"targets": list(targets)}]
    managers = [alertmanager_url.removeprefix("http://")] if alertmanager_url else []
    return {
        **shipped,
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES / "*-rules.yml"), str(RULES / "alerts.yml")],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": managers}]}]},
    }


@dataclass
class Webhook:
    """What an Alertmanager sent."""

    url: str
    received: list[dict[str, Any]] = field(default_factory=list)

    def alerts(self) -> dict[str, dict[str, Any]]:
        """The last alert of each name that fired."""
        return {
            alert["labels"]["alertname"]: alert
            for message in self.received
            for alert in message["alerts"]
            if alert["status"] == "firing"
        }


@contextmanager
def webhook() -> Iterator[Webhook]:
    """A receiver of alerts."""
    hook = Webhook("")

    class Handler(_Quiet):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            hook.received.append(json.loads(self.rfile.read(length)))
            self.answer(b"")

    with _serving(Handler) as url:
        hook.url = url
        yield hook


@contextmanager
def alertmanager(directory: Path, hook: Webhook) -> Iterator[str]:
    """An Alertmanager that sends every alert to a webhook at once; its URL."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "alertmanager.yml"
    route = {"receiver": "hook", "group_by": ["alertname"], "group_wait": "0s"}
    receivers = [{"name": "hook", "webhook_configs": [{"url": hook.url}]}]
    path.write_text(yaml.safe_dump({"route": route, "receivers": receivers}))
    command = [
        tool("alertmanager"),
        f"--config.file={path}",
        f"--storage.path={directory}/data",
        "--web.listen-address=127.0.0.1:0",
        "--cluster.listen-address=",
    ]
    with _running(command, directory / "alertmanager.log") as url:
        yield url


@dataclass
class Page:
    """A page of metrics that a test writes and a Prometheus scrapes."""

    address: str
    samples: Mapping[str, float]


@contextmanager
def page(samples: Mapping[str, float]) -> Iterator[Page]:
    """A target that serves `samples`, by name and labels, as they stand when it is asked."""
    target = Page("", samples)

    class Handler(_Quiet):
        def do_GET(self) -> None:
            self.answer("".join(f"{k} {v}\n" for k, v in target.samples.items()).encode())

    with _serving(Handler) as url:
        target.address = url.removeprefix("http://")
        yield target


class _Quiet(BaseHTTPRequestHandler):
    def answer(self, body: bytes) -> None:
        """200, with a body."""
        self.send_response(200)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Nothing is logged."""


@contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _running(command: Sequence[str], log_path: Path) -> Iterator[str]:
    """A process that says where it listens; its URL."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )

    def address() -> str | None:
        assert process.poll() is None, log_path.read_text()
        found = _LISTENING.search(log_path.read_text())
        return found[1] if found else None

    try:
        listening = wait_until(address, deadline_seconds=DEADLINE_SECONDS, what=log_path.read_text)
        yield f"http://{listening}"
    finally:
        process.terminate()
        process.wait(DEADLINE_SECONDS)


def now() -> float:
    """The Unix time, as Prometheus stamps what it scrapes."""
    return time.time()
