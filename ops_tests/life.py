"""A scripted life of a real server under a real Prometheus, and what was seen at each moment."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.demo.files import ensure_demo_model
from holdfast.demo.switches import DemoFault, DemoSwitches
from ops import queries
from ops.prometheus import Prometheus, Series, now, prometheus
from servers import SMALL, Server, descendants, running, wait_until

MIB = 1024 * 1024
WINDOW_SECONDS = 30
"""The load lasts at least this long, which gives its rate to a few percent."""
SCRAPE_SECONDS = 1.0
LEAST_WINDOW_SECONDS = 5
MODEL = "holdfast-demo"
HOLD_SECONDS = START_SECONDS = 600
PROMPT = [65 + i % 26 for i in range(100)]
OUTPUT_TOKENS = 8
AT_ONCE = 4
GROWTH_PROMPT = [65 + i % 26 for i in range(5000)]
GROWN_BYTES = 40 * MIB
SLOS = {"ttft_slo": "2.5", "tpot_slo": "0.1"}
SWITCHES = DemoSwitches(
    faults=(DemoFault("context", 5000, "scratch", scratch_bytes=GROWN_BYTES, until=5010),)
)
"""What the probe does not meet: its contexts are other numbers of tokens."""

FIRING_SECONDS = 600
"""The longest window of an alert that is waited for, and what a busy machine adds."""

Page = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(frozen=True, slots=True)
class Rules:
    """The expressions that are asked beside those of the panels, by name."""

    alerts: Mapping[str, str] = field(default_factory=dict)
    records: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Moment:
    """What the server said and what Prometheus made of it, while nothing moved."""

    name: str
    since: Page
    """The page at the beginning of the window that rates are taken over."""
    window_seconds: int
    before: Page
    """The page before the queries below were asked, and after."""
    after: Page
    panels: Mapping[str, Series]
    alerts: Mapping[str, Series]
    records: Mapping[str, Series]
    """What the recording rules come to, and what was recorded last, as `record` and `=record`."""
    unfollowed: Sequence[str]
    """Queries of panels that show something though a variable names nobody."""


@dataclass
class Life:
    """All moments, and what the script did."""

    address: str
    moments: dict[str, Moment] = field(default_factory=dict)
    requests: int = 0
    """What the load was."""
    names: set[str] = field(default_factory=set)
    """Every metric that Prometheus ever saw."""
    marks: Mapping[str, int] = field(default_factory=dict)
    """How often the annotations of a dashboard marked something, by their names."""
    gone_panels: Mapping[str, Series] = field(default_factory=dict)
    gone_alerts: Mapping[str, Series] = field(default_factory=dict)
    """What is shown and due when there is no server any more."""
    servers_listed: Mapping[str, set[str]] = field(default_factory=dict)
    """The servers that may be chosen, while one runs and when it is gone."""
    exit_code: int | None = None


class Script:
    """Does what is scripted, and looks."""

    def __init__(self, server: Server, scraping: Prometheus, rules: Rules) -> None:
        self._server = server
        self.prometheus = scraping
        self._rules = rules
        self.life = Life(server.url.removeprefix("http://"))
        self._began_seconds = now()
        self._since: Page = {}
        self._since_seconds = now()

    def live(self) -> Life:
        """Start, probe, load, growth, kill, recovery, drain."""
        self.live_until_recovered()
        self.drain()
        self.look_after_the_end()
        self.life.names = self.prometheus.names()
        return self.life

    def live_until_recovered(self) -> None:
        """All of it but the drain."""
        self.begin_window()
        self.look("starting")
        self._until_ready()
        self.begin_window()
        self.look("ready")
        self.begin_window()
        self.load()
        self.look("loaded")
        self.grow()
        self._until_fired("HoldfastWorkspaceGrew")
        self.look("grown")
        self.begin_window()
        self.kill()
        self.look("recovered")

    def live_without_growth(self) -> Life:
        """Start, probe, rejection, recovery, a second death: where workspaces may not grow."""
        self._until_ready()
        self.begin_window()
        self.grow()
        self._until_ready()
        self.look("rejected")
        self._kill_engine()
        self._until_ready()
        self.look("killed too")
        self.life.names = self.prometheus.names()
        return self.life

    def begin_window(self) -> None:
        """Rates of the moments that follow are taken from here on."""
        self.prometheus.until_scraped(now())
        self._since, self._since_seconds = self._server.metrics(), now()
        self.prometheus.until_scraped(self._since_seconds)

    def look(self, name: str) -> None:
        """Ask every panel and every rule now."""
        before = self._server.metrics()
        least = self._since_seconds + LEAST_WINDOW_SECONDS
        at = self.prometheus.until_scraped(max(now(), least)) + 0.001
        window = math.ceil(at - self._since_seconds)
        panels, alerts = self._panels(at, window), self._alerts(at)
        records = self._records(at)
        unfollowed = self._unfollowed(at, window)
        after = self._server.metrics()
        self.life.moments[name] = Moment(
            name,
            self._since,
            window,
            before,
            after,
            panels,
            alerts,
            records,
            unfollowed,
        )

    def look_after_the_end(self) -> None:
        """Ask once more when Prometheus has seen that nobody answers."""
        wait_until(
            lambda: self.prometheus.query('up{job="holdfast"} == 0'),
            deadline_seconds=HOLD_SECONDS,
            what=lambda: "the target still answers",
        )
        at = now()
        lived_seconds = math.ceil(at - self._began_seconds)
        self.life.gone_panels = self._panels(at, lived_seconds)
        self.life.gone_alerts = self._alerts(at)
        self.life.servers_listed = {
            "with all of its life": self._servers(at, lived_seconds),
            "at its end": self._servers(at, 2),
        }
        self.life.marks = self._marks(at)

    def _shown(self, expression: str, at: float, window: int, **chosen: str) -> Series:
        """What a query of a panel comes to where these variables are not all there is."""
        query = queries.filled(expression, {**SLOS, **chosen}, f"{window}s")
        return self.prometheus.query(query, at)

    def _panels(self, at: float, window: int) -> dict[str, Series]:
        return {
            str(target): self._shown(target.expression, at, window) for target in queries.targets()
        }

    def _alerts(self, at: float) -> dict[str, Series]:
        rules = self._rules.alerts
        return {alert: self.prometheus.query(rule, at) for alert, rule in rules.items()}

    def _records(self, at: float) -> dict[str, Series]:
        rules = self._rules.records
        computed = {f"={name}": self.prometheus.query(rule, at) for name, rule in rules.items()}
        # What is recorded is of the evaluation before.
        later = self.prometheus.until_scraped(at + 2 * SCRAPE_SECONDS)
        return {**computed, **{name: self.prometheus.query(name, later) for name in rules}}

    def _unfollowed(self, at: float, window: int) -> list[str]:
        """The queries that show something of nobody, for each variable that they name."""
        return [
            f"{target} with ${name}"
            for target in queries.targets()
            for name in queries.variables(target.expression) - set(SLOS)
            if self._shown(target.expression, at, window, **{name: "nobody"})
        ]

    def _servers(self, at: float, seconds: int) -> set[str]:
        """What the variable of the servers lists where the page shows the last `seconds`."""
        (query,) = {
            variable["query"]
            for dashboard in queries.dashboards().values()
            for variable in dashboard["templating"]["list"]
            if variable["name"] == "instance"
        }
        (inner,) = re.findall(r"^query_result\((.*)\)$", query)
        return {dict(labels)["instance"] for labels in self._shown(inner, at, seconds)}

    def _marks(self, at: float) -> dict[str, int]:
        """How often each annotation began to hold, seen as Grafana asks: a step at a time."""
        times = {"start": f"{self._began_seconds:.3f}", "end": f"{at:.3f}", "step": "60"}
        return {
            annotation["name"]: sum(
                len(series["values"])
                for series in self.prometheus.get(
                    "query_range", query=queries.filled(annotation["expr"], {}), **times
                )["result"]
            )
            for annotation in queries.dashboards()["lifecycle"]["annotations"]["list"]
        }

    def _until_fired(self, alert: str) -> None:
        wait_until(
            lambda: alert in self.prometheus.firing(),
            deadline_seconds=FIRING_SECONDS,
            what=lambda: f"{alert} does not fire",
        )

    def load(self) -> None:
        """Requests, a few at once, until the window is long enough."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            while now() - self._since_seconds < WINDOW_SECONDS:
                answers = list(pool.map(self._complete, [PROMPT] * AT_ONCE))
                assert answers == [200] * AT_ONCE
                self.life.requests += AT_ONCE

    def grow(self) -> None:
        """The one request that needs more than the probe had proven; it is served all the same."""
        assert self._complete(GROWTH_PROMPT) == 200

    def kill(self) -> None:
        """SIGKILL the engine, look while it recovers, with a request held, and wait for READY."""
        self._kill_engine()
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(self._complete, PROMPT)
            self._server.until(lambda: self._server.metric("requests_held") == 1, "a held request")
            self.look("recovering")
            assert held.result() == 200
        self._until_ready()

    def _kill_engine(self) -> None:
        (core,) = (
            process
            for process in descendants(self._server.process.pid)
            if "EngineCore" in process.name()
        )
        core.kill()
        self._server.until_state("RECOVERING")

    def drain(self) -> None:
        """SIGTERM while a request runs: look, and wait for the end."""
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(self._complete, PROMPT, max_tokens=3000)
            self._server.until(
                lambda: self._server.metric("requests_in_flight") == 1, "a request in flight"
            )
            self._server.process.send_signal(signal.SIGTERM)
            self._server.until_state("DRAINING")
            self.look("draining")
            assert long.result() == 200
        self.life.exit_code = self._server.wait()

    def _until_ready(self) -> None:
        """A start shares the machine with whatever else runs, so this waits longer than others."""
        wait_until(
            lambda: self._server.get("/readyz").status_code == 200,
            deadline_seconds=START_SECONDS,
            what=lambda: self._server.log[-4000:],
        )

    def _complete(self, prompt: Sequence[int], max_tokens: int = OUTPUT_TOKENS) -> int:
        answer = self._server.post(
            "/v1/completions",
            {
                "model": MODEL,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
            timeout=HOLD_SECONDS,
        )
        return answer.status_code


@contextmanager
def a_life(
    directory: Path, rules: Rules, *more: str, alertmanager_url: str = ""
) -> Iterator[Script]:
    """A server that starts, and the Prometheus that scrapes it."""
    model = ensure_demo_model(directory / "models", SWITCHES)
    flags = (
        str(model),
        *SMALL,
        f"--served-model-name={MODEL}",
        f"--hold-timeout={HOLD_SECONDS}",
        f"--drain-timeout={HOLD_SECONDS}",
        *more,
    )
    with running(directory / "server", *flags) as server:
        address = server.url.removeprefix("http://")
        with prometheus(directory / "prometheus", [address], alertmanager_url) as scraping:
            yield Script(server, scraping, rules)
