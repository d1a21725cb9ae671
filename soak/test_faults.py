"""A hundred faults under load, drawn at random, cost no answer, and no stream that can go on."""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal

import psutil
import pytest

import faults
import tiny_models
from faults import BIND, FAULTS, MIB, FaultyServer, can_starve, faulty_model, left_in_shared_memory
from hostile_report import ResourceCounts, require_released
from load_generator import loaded, questions, undisturbed
from servers import (
    NOT_COMPILED,
    READY_DEADLINE_SECONDS,
    Server,
    descendants,
    forkable,
    reserved_port,
    running,
    title_of,
)
from stream_features import PARSER_FLAGS
from streaming_load import both_loaded, expected_streams, expected_whole

FAULT_COUNT = int(os.environ.get("SOAK_FAULTS", "100"))
SEED = int(os.environ.get("SOAK_SEED", "4"))
CHOSEN = [name for name in os.environ.get("SOAK_NAMES", "").split(",") if name]
"""The faults to draw from; empty for all of them."""
MANY_FAULTS = 60
"""From this many on, each fault was drawn, and each kind of stream was cut by one."""
CLIENTS = 16
"""This many ask for streams, and this many for whole answers."""
STALL_SECONDS = 10
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
SEAM = re.compile(r"continued_at_tokens=.* id=([a-z-]+)[.]")
"""The kind of a stream that went on, in its line of the request log."""


LONG_QUESTIONS = [
    replace(question, max_tokens=2000) for question in questions(SEED, count=5, longest_tokens=500)
]
"""Questions with answers that take long enough for a fault to strike meanwhile."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A model and its ranks."""

    make: Callable[[Path, Path], Path]
    """Makes the model, with the directory of triggers."""
    ranks: int
    longest_tokens: int
    """Of a prompt; as text, one is up to half as long again."""
    is_demo: bool = True

    @property
    def faults(self) -> list[str]:
        """What it can fail by, on this machine."""
        return [
            name
            for name in CHOSEN or FAULTS
            if (self.is_demo or not FAULTS[name].needs_demo)
            and (name != "out of memory" or can_starve())
        ]


SETUPS = {
    "TP=1": Setup(lambda models, files: faulty_model(models, files, raising_rank=0), 1, 2000),
    "TP=2": Setup(faulty_model, 2, 2000),
    "foreign": Setup(
        lambda models, _: tiny_models.make_qwen(models / "qwen"), 1, 1000, is_demo=False
    ),
}


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
    return [p for p in descendants(server.process.pid) if "VLLM::" in title_of(p)]


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


def _drawn(names: Sequence[str]) -> Iterator[str]:
    """Yield the faults in a random order, then all of them in another one, and so on."""
    chosen = random.Random(SEED)
    while True:
        yield from chosen.sample(names, len(names))


@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("name", SETUPS)
def test_faults_cost_no_answer(name: str, tmp_path: Path) -> None:
    """No call is lost, each stream is whole, and all are equal to those of an undisturbed run.

    Tokens, texts, finish reasons and usage are equal, log-probs up to a rounding. Another batch or
    a prompt in other steps changes the sums of floats, so only questions are asked whose greedy
    tokens are ahead of all others by a hundred times that.
    """
    setup = SETUPS[name]
    model = setup.make(tmp_path / "models", tmp_path / "triggers")
    ranks, sequences = f"--tensor-parallel-size={setup.ranks}", f"--max-num-seqs={2 * CLIENTS}"
    flags = (*FLAGS, *PARSER_FLAGS, ranks, sequences)
    environment = {**forkable(), **NOT_COMPILED}
    log = Log()
    with (
        reserved_port() as port,
        running(tmp_path, str(model), *flags, environment=environment, port=port) as server,
    ):
        server.until_ready()
        streams = expected_streams(server, SEED, longest_tokens=setup.longest_tokens)
        whole = expected_whole(server, SEED, longest_tokens=setup.longest_tokens)
        under_load = partial(both_loaded, server, streams, whole, clients=CLIENTS, seed=SEED)
        with under_load(is_once=True) as both:
            pass  # what differs here does not differ because of a death
        both.check()
        before, threads = (
            ResourceCounts.of(server),
            psutil.Process(server.process.pid).num_threads(),
        )
        shared = left_in_shared_memory()
        faulty = FaultyServer(server, tmp_path / "triggers")
        names = _drawn(setup.faults)
        with under_load() as both:
            for number in count():
                if log.struck.total() >= FAULT_COUNT:
                    break
                log.lag_seconds.append(server.metric("event_loop_lag_seconds"))
                _until_moment(server, MOMENTS[number % len(MOMENTS)], log)
                _strike(faulty, next(names), log)
                assert _deaths(server) == log.deaths
                both.check()
            # An engine that died in its proof is let go with the next one.
            _until_moment(server, "serving", log)
            _strike(faulty, "SIGKILL core", log)
        both.check()
        went_on = Counter(SEAM.findall(server.log))
        print(both.streams.summary(), both.whole.summary(), went_on, log, sep="\n")
        assert went_on.total() > 0
        assert server.metric("requests_lost_total") == 0
        if FAULT_COUNT >= MANY_FAULTS:
            assert set(log.struck) >= set(setup.faults)
            assert set(went_on) == {question.name for question in streams}
        require_released(server, before, deadline_seconds=30)
        # A pool may have grown since, but a leak would be a thread for each death.
        assert psutil.Process(server.process.pid).num_threads() < threads + log.deaths
        assert len(left_in_shared_memory()) <= len(shared)
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
    """With the budget spent, the exit code is 5, and each client that gets no answer is told."""
    model = faulty_model(tmp_path / "models", tmp_path / "triggers")
    flags = (*FLAGS, "--max-engine-restarts=0")
    with running(tmp_path, str(model), *flags, environment=BIND) as server:
        server.until_ready()
        expected = undisturbed(server, LONG_QUESTIONS)
        with loaded(server, expected, clients=2, seed=SEED, is_once=True) as load:
            server.until(lambda: server.metric("requests_in_flight") >= 1, "requests")
            FAULTS["SIGKILL core"].strike(FaultyServer(server, tmp_path / "triggers"))
        assert server.wait() == 5
    unanswered = [*load.lost, *load.broken]
    assert unanswered
    told = re.compile("503|died|has shut down")
    assert all(told.search(a.error) for a in unanswered), unanswered
