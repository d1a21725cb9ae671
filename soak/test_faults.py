"""A hundred faults under load from 16 clients, drawn at random, and nobody loses an answer."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import psutil
import pytest

import faults
from faults import BIND, FAULTS, MIB, FaultyServer, can_starve, faulty_model, left_in_shared_memory
from load_generator import loaded, questions, undisturbed
from servers import READY_DEADLINE_SECONDS, Server, descendants, running, wait_until

FAULT_COUNT = int(os.environ.get("SOAK_FAULTS", "100"))
SEED = int(os.environ.get("SOAK_SEED", "4"))
CHOSEN = [name for name in os.environ.get("SOAK_NAMES", "").split(",") if name]
"""The faults to draw from; empty for all of them."""
CLIENTS = 16
STALL_SECONDS = 5
FLAGS = (
    *faults.FLAGS,
    f"--stall-timeout={STALL_SECONDS}",
    "--max-engine-restarts=1000",
    "--restart-window=1",  # neither the budget nor its back-off is tested here
    "--hold-timeout=600",
    f"--kv-cache-memory-bytes={1024 * MIB}",  # every refused need is taken from it, once learned
)
Moment = Literal["serving", "prefill", "RECOVERING", "PROBING"]
MOMENTS: tuple[Moment, ...] = ("serving", "prefill", "RECOVERING", "prefill", "PROBING", "serving")


LONG_QUESTIONS = [
    replace(question, max_tokens=2000) for question in questions(SEED, count=5, longest_tokens=500)
]
"""Questions with answers that take long enough for a fault to strike meanwhile."""


@dataclass
class Log:
    """What the test saw."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """The times from each fault to the count of its death."""
    struck: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    """The states in which faults struck."""
    recovery_seconds: list[float] = field(default_factory=list)
    kills: int = 0
    """Engines that were killed only so that a fault could strike their recovery."""
    lag_seconds: list[float] = field(default_factory=list)
    """The longest delay of the event loop in the minute before each fault."""

    @property
    def deaths(self) -> int:
        """The number of deaths that must have happened."""
        return self.kills + self.struck.total()


def _deaths(server: Server) -> float:
    return server.metric("engine_deaths_total")


def _until_moment(server: Server, moment: Moment, log: Log) -> None:
    """Return when the server is in the state that the fault is for, or just past it."""
    if moment in {"RECOVERING", "PROBING"}:
        core = FaultyServer(server, Path()).process("EngineCore")
        before = _deaths(server)
        last = set(_engine(server))
        core.kill()
        log.kills += 1
        server.until(lambda: _deaths(server) > before, "a death")
        if moment == "RECOVERING":
            server.until(lambda: set(_engine(server)) - last, "processes of the next generation")
        else:
            _until_probing(server)
        log.moments[server.state] += 1
        return
    server.until_ready()
    scheduled = _scheduled(server)
    # Only steps of prefills have this many tokens, and they are slow.
    wanted = 900 if moment == "prefill" else 1
    server.until(lambda: _scheduled(server) - scheduled >= wanted, f"{wanted} scheduled tokens")
    log.moments[moment] += 1


def _until_probing(server: Server) -> None:
    """Return when the server has left RECOVERING; the proof that follows takes only one request."""
    deadline = time.monotonic() + READY_DEADLINE_SECONDS
    while server.state == "RECOVERING":
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _scheduled(server: Server) -> float:
    return server.metric("engine_scheduled_tokens_total", rank="0")


def _engine(server: Server) -> list[psutil.Process]:
    return [p for p in descendants(server.process.pid) if "VLLM::" in " ".join(_cmdline(p))]


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _strike(faulty: FaultyServer, name: str, log: Log) -> None:
    server = faulty.server
    before = _deaths(server)
    try:
        FAULTS[name].strike(faulty)
    except (ValueError, psutil.Error, ProcessLookupError):
        return  # the process does not exist at this moment
    began = time.monotonic()
    server.until(lambda: _deaths(server) > before, f"a death by {name}")
    log.seconds.setdefault(name, []).append(time.monotonic() - began)
    server.until_ready()
    log.recovery_seconds.append(time.monotonic() - began)
    log.struck[name] += 1


@pytest.mark.timeout(4 * 3600)
def test_faults_cost_no_answer(tmp_path: Path) -> None:
    """No call is lost, no replayed answer differs, no stream ends cleanly that was broken."""
    chosen = random.Random(SEED)
    names = [name for name in CHOSEN or FAULTS if name != "out of memory" or can_starve()]
    model = faulty_model(tmp_path / "models", tmp_path / "triggers")
    log = Log()
    with running(tmp_path, str(model), *FLAGS, environment=BIND) as server:
        server.until_ready()
        expected = undisturbed(server, questions(SEED, count=20, longest_tokens=4000))
        before = psutil.Process(server.process.pid).as_dict(["num_fds", "num_threads"])
        shared = left_in_shared_memory()
        faulty = FaultyServer(server, tmp_path / "triggers")
        with loaded(server, expected, clients=CLIENTS, seed=SEED) as load:
            for number in range(FAULT_COUNT):
                log.lag_seconds.append(server.metric("event_loop_lag_seconds"))
                _until_moment(server, MOMENTS[number % len(MOMENTS)], log)
                _strike(faulty, chosen.choice(names), log)
                assert _deaths(server) == log.deaths
                assert not load.lost, load.lost
                assert not load.wrong, load.wrong
        assert set(log.struck) == set(names)
        print(load.summary())
        print(log)
        wait_until(
            lambda: psutil.Process(server.process.pid).num_fds() <= before["num_fds"],
            deadline_seconds=30,
            what=lambda: f"{before}, and now {psutil.Process(server.process.pid).num_fds()}",
        )
        assert psutil.Process(server.process.pid).num_threads() <= before["num_threads"]
        assert len(left_in_shared_memory()) <= len(shared)
        assert {a.error for a in load.broken} <= {
            "APIError: The engine died while it worked on this request."
        }
        family = descendants(server.process.pid)
        assert server.stop() == 0
    assert not [process for process in family if process.is_running()]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["SIGKILL core", "SIGKILL worker", "SIGTERM core"])
def test_faults_while_draining_cost_no_answer(name: str, tmp_path: Path) -> None:
    """The engine comes back for what is in flight, and the end is clean."""
    model = faulty_model(tmp_path / "models", tmp_path / "triggers")
    flags = (*FLAGS, "--drain-timeout=300")
    with running(tmp_path, str(model), *flags, environment=BIND) as server:
        server.until_ready()
        expected = undisturbed(server, LONG_QUESTIONS)
        faulty = FaultyServer(server, tmp_path / "triggers")
        with loaded(server, expected, clients=CLIENTS, seed=SEED, is_once=True) as load:
            server.until(lambda: server.metric("requests_in_flight") >= CLIENTS // 2, "requests")
            server.process.terminate()
            server.until_state("DRAINING")
            FAULTS[name].strike(faulty)
        assert server.wait() == 0
    refused = [a for a in load.lost if "503" not in a.error and "DRAINING" not in a.error]
    assert not refused, refused
    assert not load.wrong


def test_the_server_says_what_it_lost(tmp_path: Path) -> None:
    """With the budget spent, the exit code is 5, and waiting clients get an error."""
    model = faulty_model(tmp_path / "models", tmp_path / "triggers")
    flags = (*FLAGS, "--max-engine-restarts=0")
    with running(tmp_path, str(model), *flags, environment=BIND) as server:
        server.until_ready()
        expected = undisturbed(server, LONG_QUESTIONS)
        with loaded(server, expected, clients=2, seed=SEED, is_once=True) as load:
            server.until(lambda: server.metric("requests_in_flight") >= 1, "requests")
            FAULTS["SIGKILL core"].strike(FaultyServer(server, tmp_path / "triggers"))
        assert server.wait() == 5
    assert all("503" in a.error or "died" in a.error for a in load.lost)
