"""An engine with two ranks is hurt under load, again and again, and nobody loses an answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

import faults
from faults import BIND, FAULTS, POISON_TOKENS, FaultyServer, faulty_model, left_in_shared_memory
from load_generator import Answer, Load, ask, client_of, loaded, questions, undisturbed
from servers import Server, descendants, running, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CLIENTS = 8
STALL_SECONDS = 8
FLAGS = (
    *faults.FLAGS,
    f"--stall-timeout={STALL_SECONDS}",
    "--max-engine-restarts=20",
    "--hold-timeout=300",
)
STRUCK = ("SIGKILL core", "raise on rank 1", "SIGSTOP worker", "workspace rejection")


@dataclass(frozen=True, slots=True)
class ResourceCounts:
    """What a server has that a death may leak."""

    processes: int
    descriptors: int
    threads: int
    orphaned_memory: frozenset[Path]
    """Shared memory that no process has mapped: other servers of this machine map theirs."""

    @classmethod
    def of(cls, server: Server) -> ResourceCounts:
        """What it has now."""
        process = psutil.Process(server.process.pid)
        return cls(
            processes=len(descendants(process.pid)),
            descriptors=process.num_fds(),
            threads=process.num_threads(),
            orphaned_memory=frozenset(left_in_shared_memory()),
        )


@dataclass
class Life:
    """What was seen of a server that was hurt."""

    server: Server
    load: Load
    before: ResourceCounts
    reports: list[dict[str, Any]] = field(default_factory=list)
    """`/statusz` after each recovery."""
    prompt_tokens: list[float] = field(default_factory=list)
    """vLLM's own counter, before the first fault and after each recovery."""
    after: ResourceCounts | None = None
    death_counts: dict[str, float] = field(default_factory=dict)


def deaths(server: Server) -> dict[str, float]:
    """Deaths counted so far, by cause."""
    found = {
        dict(labels).get("cause", ""): v
        for (n, labels), v in server.metrics().items()
        if n == "holdfast_engine_deaths_total"
    }
    return {cause: value for cause, value in found.items() if value}


def hurt(faulty: FaultyServer, name: str) -> None:
    """Strike, and wait until the death is counted and the next generation is READY."""
    server = faulty.server
    before = sum(deaths(server).values())
    wait_until(  # a request that is alone in the last step is accused, rightly or not
        lambda: server.status["progress"]["running"] > 1,
        deadline_seconds=60,
        what=lambda: "nobody asks",
    )
    FAULTS[name].strike(faulty)
    server.until(lambda: sum(deaths(server).values()) > before, f"a death by {name}")
    server.until_ready()


@pytest.fixture(scope="module")
def life(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    """A server that is READY, and is hurt in each way under load."""
    directory = tmp_path_factory.mktemp("recovery")
    model = faulty_model(models, directory / "triggers")
    with running(directory, str(model), *FLAGS, environment=BIND) as server:
        server.until_ready()
        expected = undisturbed(server, questions(7, count=10, longest_tokens=4000))
        before = ResourceCounts.of(server)
        faulty = FaultyServer(server, directory / "triggers")
        with loaded(server, expected, clients=CLIENTS, seed=7) as load:
            seen = Life(server, load, before)
            seen.prompt_tokens.append(_prompt_tokens(server))
            for name in STRUCK:
                hurt(faulty, name)
                seen.reports.append(server.status)
                seen.prompt_tokens.append(_prompt_tokens(server))
        seen.after = _settled(server, before)
        seen.death_counts = deaths(server)
        yield seen


def _prompt_tokens(server: Server) -> float:
    return sum(v for (name, _), v in server.metrics().items() if name == "vllm:prompt_tokens_total")


def _settled(server: Server, before: ResourceCounts) -> ResourceCounts:
    """What it has once it has had the time to let go."""

    def has_let_go() -> bool:
        now = ResourceCounts.of(server)
        return now.descriptors <= before.descriptors and now.processes <= before.processes

    wait_until(
        has_let_go,
        deadline_seconds=60,
        what=lambda: f"{before} has become {ResourceCounts.of(server)}: {_titles(server)}",
    )
    return ResourceCounts.of(server)


def _titles(server: Server) -> list[str]:
    """What its processes call themselves."""
    return [
        process.info["name"]
        for process in psutil.process_iter(["name"])
        if process in descendants(server.process.pid)
    ]


def test_no_answer_is_lost(life: Life) -> None:
    """Whoever had seen nothing yet gets the whole answer, whatever the route and the death."""
    lost = [answer for answer in life.load.lost if not _is_suspected(answer)]
    assert not lost, lost
    assert len(life.load.answers) > CLIENTS


def test_only_what_was_alone_in_a_step_is_suspected(life: Life) -> None:
    """A fault that no request is to blame for may strike when there is only one; it is counted."""
    suspected = [answer for answer in life.load.lost if _is_suspected(answer)]
    assert len(suspected) == life.server.metric("requests_lost_total", reason="suspected")
    assert len(suspected) <= len(STRUCK)


def _is_suspected(answer: Answer) -> bool:
    return "which may have caused it" in answer.error


def test_replayed_answers_are_those_of_an_undisturbed_run(life: Life) -> None:
    """Greedy decoding, token for token, and none ends with `abort`."""
    assert not life.load.wrong, life.load.wrong


def test_every_broken_stream_is_an_error(life: Life) -> None:
    """As the official client sees it; each is counted."""
    told = {answer.error for answer in life.load.broken}
    assert told <= {"APIError: The engine died while it worked on this request."}
    counted = life.server.metric("requests_lost_total", reason="stream_broken")
    assert counted == len(life.load.broken)


def test_each_death_is_counted_once_by_its_cause(life: Life) -> None:
    """And told on `/statusz`, with its root and not with where to look for it."""
    assert life.death_counts == {FAULTS[name].cause: 1.0 for name in STRUCK}
    exits = [report["engine"]["last_exit"] for report in life.reports]
    assert [told.partition(":")[0] for told in exits] == [FAULTS[name].cause for name in STRUCK]
    assert "InjectedFaultError" in exits[1]
    assert not any("stack trace" in told for told in exits)


def test_calls_were_replayed(life: Life) -> None:
    """Else nothing of this was tested."""
    assert life.server.metric("requests_replayed_total") > 0


def test_counters_of_vllm_never_fall(life: Life) -> None:
    """They belong to the server, not to an engine."""
    assert life.prompt_tokens == sorted(life.prompt_tokens)
    assert life.prompt_tokens[0] > 0


def test_nothing_is_left_behind(life: Life) -> None:
    """As many processes, descriptors and threads as before, and no memory that nobody has."""
    assert life.after is not None
    assert life.after.processes == life.before.processes
    assert life.after.descriptors <= life.before.descriptors
    assert life.after.threads <= life.before.threads
    before = life.before.orphaned_memory
    wait_until(  # what a neighbour's engine has just left is soon gone
        lambda: len(left_in_shared_memory()) <= len(before),
        deadline_seconds=60,
        what=lambda: f"still there: {left_in_shared_memory() - before}",
    )


def test_what_kills_every_engine_is_quarantined(life: Life) -> None:
    """With the second death, tried alone or sent again; its neighbours are served."""
    server = life.server
    before = sum(deaths(server).values())
    poison = [50] * POISON_TOKENS
    with loaded(server, life.load.expected, clients=3, seed=8) as load:
        answer = server.completion(poison, timeout=300)
        server.until_ready()
        again = server.completion(poison, timeout=300)
    assert (answer.status_code, again.status_code) in {(422, 422), (500, 422)}
    assert answer.headers["x-should-retry"] == "false"
    assert again.headers["x-should-retry"] == "false"
    assert sum(deaths(server).values()) == before + 2
    assert not load.lost
    assert not load.wrong


def test_an_undisturbed_server_still_answers(life: Life) -> None:
    """After all of it, as at the beginning."""
    question, expected = next(iter(life.load.expected.items()))
    with client_of(life.server) as client:
        assert ask(client, "faulty", question) == expected
