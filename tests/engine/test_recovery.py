"""An engine with two ranks is hurt under load, again and again, and nobody loses an answer.

Streams go on, too.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

import faults
from cut_streams import Asked, Streamed, cut_streams, whole_streams
from endpoint_picker import EndpointPicker, picking
from faults import FAULTS, POISON_TOKENS, FaultyServer, OwnSharedMemory, faulty_model
from holdfast.labels import LOSS_REASONS
from holdfast.processes.stacks import stacks_of
from load_generator import Answer, Load, ask, client_of, loaded, questions, undisturbed
from seam_streams import (
    BLOCK_TOKENS,
    BUDGET_FLAGS,
    BUDGETS,
    END_OF_BUDGET,
    FEATURES,
    LONGER_THAN_A_BLOCK,
    PATTERN,
    STREAMS,
    TWO_ANSWERS,
    recycle,
)
from servers import Greedy, Server, descendants, forkable, running, wait_until
from stream_features import END_OF_THOUGHT, PARSER_FLAGS, shows

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CLIENTS = 8
STOP_CHARACTERS = 6
STALL_SECONDS = 8
RECYCLE_REQUESTS = 3000
"""More than an engine is given by any test but the one that waits for this limit."""
FLAGS = (
    *faults.FLAGS,
    *PARSER_FLAGS,
    *BUDGET_FLAGS,
    "--enable-prompt-tokens-details",
    "--max-model-len=6144",
    f"--stall-timeout={STALL_SECONDS}",
    "--max-engine-restarts=20",
    "--restart-window=1",  # the back-off is not tested here
    "--hold-timeout=300",
    f"--recycle-after={RECYCLE_REQUESTS}requests",
    "--recycle-within=0",
)
UNTRIED = "there was no time or engine left to try it alone"
STRUCK = ("SIGKILL core", "SIGSTOP worker", "workspace rejection")
"""A rank that raises is met below, by a request that makes it."""
POOLED = re.compile(r'^ *Thread .*"(?:uvloop_|AnyIO worker|ThreadPoolExecutor-)', re.MULTILINE)
RANKS = ("0", "1")
PROMPTS = ("hold fast", "0123456789" * 250)


@dataclass(frozen=True, slots=True)
class ResourceCounts:
    """What a server has that a death may leak."""

    processes: int
    descriptors: int
    threads: int
    """Except those of pools, which grow when many calls come at once, and stay."""

    @classmethod
    def of(cls, server: Server) -> ResourceCounts:
        """What it has now."""
        process = psutil.Process(server.process.pid)
        with TemporaryDirectory() as scratch:
            stacks = asyncio.run(stacks_of([process], Path(scratch)))
        return cls(
            processes=len(descendants(process.pid)),
            descriptors=process.num_fds(),
            threads=process.num_threads() - len(POOLED.findall(stacks)),
        )


@dataclass
class Life:
    """What was seen of a server that was hurt."""

    server: Server
    load: Load
    before: ResourceCounts
    shared_memory: OwnSharedMemory
    reports: list[dict[str, Any]] = field(default_factory=list)
    """`/statusz` after each recovery."""
    prompt_tokens: list[float] = field(default_factory=list)
    """vLLM's own counter, before the first fault and after each recovery."""
    after: ResourceCounts | None = None
    death_counts: dict[str, float] = field(default_factory=dict)
    picker: EndpointPicker = field(default_factory=EndpointPicker)
    """What a router has read meanwhile."""


def deaths(server: Server) -> dict[str, float]:
    """Deaths counted so far, by cause."""
    found = {
        dict(labels).get("cause", ""): v
        for (n, labels), v in server.metrics().items()
        if n == "holdfast_engine_deaths_total"
    }
    return {cause: value for cause, value in found.items() if value}


def losses(server: Server) -> dict[str, float]:
    """Requests lost so far, by reason."""
    return {reason: server.metric("requests_lost_total", reason=reason) for reason in LOSS_REASONS}


def steps(server: Server) -> list[float]:
    """How many steps each rank has taken."""
    return [server.metric("engine_steps_total", rank=rank) for rank in RANKS]


def hurt(faulty: FaultyServer, load: Load, name: str) -> None:
    """Strike, and wait until the next generation is READY."""
    server = faulty.server
    before, answered = server.generation, len(load.answers)
    wait_until(  # else the same few requests would go from one death to the next
        lambda: len(load.answers) > answered,
        deadline_seconds=120,
        what=lambda: "nobody is answered",
    )
    wait_until(  # a request that is alone in the last step is accused, rightly or not
        lambda: server.status["progress"]["running"] > 1,
        deadline_seconds=60,
        what=lambda: "nobody asks",
    )
    FAULTS[name].strike(faulty)
    server.until(lambda: server.generation > before, f"the generation after {name}")
    server.until_ready()


def until_seen(server: Server, picker: EndpointPicker) -> None:
    """Wait until a router has read that the server is READY, on a page later than this call."""
    since_seconds = time.monotonic()
    server.until(
        lambda: picker.sees_ready and picker.history[-1].at_seconds > since_seconds,
        "a router that knows it",
    )


@pytest.fixture(scope="module")
def life(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    """A server that is READY, and is hurt in each way under load."""
    directory = tmp_path_factory.mktemp("recovery")
    model = faulty_model(models, directory / "triggers")
    with (
        TemporaryDirectory(prefix="recovery-") as temporary,  # pytest's is too long for sockets
        running(
            directory, str(model), *FLAGS, environment={**forkable(), "TMPDIR": temporary}
        ) as server,
    ):
        server.until_ready()
        expected = undisturbed(server, questions(7, count=10, longest_tokens=4000))
        before = ResourceCounts.of(server)
        faulty = FaultyServer(server, directory / "triggers")
        with loaded(server, expected, clients=CLIENTS, seed=7) as load:
            seen = Life(server, load, before, OwnSharedMemory(Path(temporary)))
            seen.prompt_tokens.append(_prompt_tokens(server))
            with picking(server.url) as seen.picker:
                for name in STRUCK:
                    seen.shared_memory.note(server)
                    hurt(faulty, load, name)
                    until_seen(server, seen.picker)
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
        return (
            now.descriptors <= before.descriptors
            and now.processes <= before.processes
            and now.threads <= before.threads
        )

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


def test_both_ranks_report_and_answer_as_one(life: Life, greedy_reference: Greedy) -> None:
    """`/metrics` has both, which take the same steps, and their tokens are those of one rank."""
    server = life.server
    before = steps(server)
    for prompt in PROMPTS:
        options = {"max_tokens": 24, "return_token_ids": True, "ignore_eos": True}
        (choice,) = server.completion(prompt, **options).json()["choices"]
        assert choice["token_ids"] == greedy_reference(prompt, 24)
    for rank in RANKS:
        assert server.metric("workspace_reserved_bytes", rank=rank) > 0
        assert server.metric("workspace_locked", rank=rank) == 1
    server.until(
        lambda: len({now - then for now, then in zip(steps(server), before, strict=True)}) == 1,
        "as many steps of both ranks",
    )
    assert min(steps(server)) > max(before)


def test_workers_are_forked(life: Life) -> None:
    """`forkable` has all that they need; otherwise each start of an engine takes seconds longer."""
    core = FaultyServer(life.server, Path()).process("EngineCore")
    family = descendants(life.server.process.pid)
    workers = [one for one in family if one.name().startswith("VLLM::Worker")]
    assert [one.ppid() for one in workers] == [core.ppid()] * len(RANKS)


def test_no_answer_is_lost(life: Life) -> None:
    """Everybody gets the whole answer, streamed or not, whatever the route and the death."""
    failed = [*life.load.lost, *life.load.broken]
    lost = [answer for answer in failed if not _is_suspected(answer)]
    assert not lost, lost
    assert len(life.load.answers) > CLIENTS


def test_only_what_was_alone_in_a_step_is_suspected(life: Life) -> None:
    """A fault that no request is to blame for may strike when there is only one; it is counted.

    Suspects are tried alone for as long as one start takes. A suspect that is left when that time
    ends is answered like one that was alone, and named in the log.
    """
    failed = [*life.load.lost, *life.load.broken]
    suspected = [answer for answer in failed if _is_suspected(answer)]
    assert len(suspected) == life.server.metric("requests_lost_total", reason="suspected")
    untried = life.server.log.count(UNTRIED)
    assert len(suspected) - untried <= len(STRUCK)


def _is_suspected(answer: Answer) -> bool:
    return "which may have caused it" in answer.error


def test_answers_over_a_death_are_those_of_an_undisturbed_run(life: Life) -> None:
    """Greedy decoding, token for token, and none ends with `abort`."""
    assert not life.load.wrong, life.load.wrong


def test_each_death_is_counted_once_by_its_cause(life: Life) -> None:
    """And told on `/statusz`, with its root and not with where to look for it."""
    assert life.death_counts == {FAULTS[name].cause: 1.0 for name in STRUCK}
    exits = [report["engine"]["last_exit"] for report in life.reports]
    assert [told.partition(":")[0] for told in exits] == [FAULTS[name].cause for name in STRUCK]
    assert not any("stack trace" in told for told in exits)


def test_no_router_takes_a_lost_engine_for_an_idle_one(life: Life) -> None:
    """Every page between a death and READY shows a full server, and READY ends that each time.

    A page was read at each READY; a busy machine may have kept those of a recovery from coming.
    """
    pages = life.picker.history
    assert all(page.is_saturated for page in pages if not page.is_ready)
    changes = [is_ready for is_ready, _ in groupby(page.is_ready for page in pages)]
    assert (changes[0], changes[-1]) == (True, True)
    assert 1 <= changes.count(False) <= len(STRUCK)


def test_what_was_kept_over_a_death_is_on_the_first_page_after_it(life: Life) -> None:
    """Before the next engine has finished a step: the server that is READY again has work."""
    firsts = [after for before, after in pairwise(life.picker.history) if not before.is_ready]
    assert all(page.queue + page.running > 0 for page in firsts)


def test_calls_were_replayed(life: Life) -> None:
    """Else nothing of this was tested."""
    assert life.server.metric("requests_replayed_total") > 0


@dataclass(frozen=True, slots=True)
class Seam:
    """Streams as they are without a death, and over one."""

    whole: dict[str, Streamed]
    cut: dict[str, Streamed]
    broken: Streamed
    """The one that cannot go on."""
    continued: float
    lost: dict[str, float]
    """By reason."""


@pytest.fixture(scope="module")
def seam(life: Life) -> Seam:
    """One death in the middle of a stream of each kind."""
    server = life.server
    names = [*STREAMS]
    whole_streams(server, [STREAMS[name] for name in LONGER_THAN_A_BLOCK])  # cached from now on
    whole = dict(zip(names, whole_streams(server, [*STREAMS.values()]), strict=True))
    stopped = whole["text"].text
    asked = {**STREAMS, "stop string": _stopped_at(STREAMS["text"], stopped)}
    whole["stop string"] = whole_streams(server, [asked["stop string"]])[0]
    continued, lost = server.metric("requests_continued_total"), losses(server)
    core = FaultyServer(server, Path()).process("EngineCore")
    life.shared_memory.note(server)
    *cut, broken = cut_streams(server, core, [*asked.values(), TWO_ANSWERS])
    return Seam(
        whole,
        dict(zip(asked, cut, strict=True)),
        broken,
        server.metric("requests_continued_total") - continued,
        {
            reason: now - lost[reason]
            for reason, now in losses(server).items()
            if now > lost[reason]
        },
    )


def _stopped_at(asked: Asked, text: str) -> Asked:
    """The same request with a stop string that comes late in its answer."""
    late = range(len(text) * 3 // 4, len(text) - STOP_CHARACTERS)
    found = (text[place : place + STOP_CHARACTERS] for place in late)
    stop = next(one for one in found if text.index(one) >= late.start)
    return Asked(asked.route, {**asked.body, "stop": [stop]})


@pytest.mark.parametrize("name", [*STREAMS, "stop string"])
def test_a_stream_goes_on_as_if_nothing_had_happened(seam: Seam, name: str) -> None:
    """Token for token, with one finish reason, and counted as one answer."""
    whole, cut = seam.whole[name], seam.cut[name]
    assert not cut.error
    assert cut.heard.texts == whole.heard.texts
    assert cut.tokens == whole.tokens
    assert cut.finish_reasons == whole.finish_reasons
    assert len(cut.finish_reasons) == 1
    assert cut.usage == whole.usage
    assert cut.heard.log_probs == pytest.approx(whole.heard.log_probs, abs=1e-2)


@pytest.mark.parametrize("name", FEATURES)
def test_a_stream_has_its_feature_over_the_seam(seam: Seam, name: str) -> None:
    """A thought, a tool call or log-probs, and nothing else."""
    heard = seam.cut[name].heard
    assert shows(name, heard.texts, heard.log_probs)


@pytest.mark.parametrize("name", BUDGETS)
def test_a_thought_ends_with_its_budget(seam: Seam, name: str) -> None:
    """Once, before or after the seam."""
    answer, thought, _ = seam.cut[name].heard.texts
    assert f"{thought}{END_OF_THOUGHT}".endswith(END_OF_BUDGET)
    assert len(thought) < BUDGETS[name] + len(END_OF_BUDGET)
    assert answer
    assert END_OF_BUDGET not in answer


def test_what_was_cached_is_counted_over_the_seam(seam: Seam) -> None:
    """By the engine that computed the prompt; the next one has nothing in its cache."""
    assert seam.cut["text"].usage["prompt_tokens_details"]["cached_tokens"] == BLOCK_TOKENS


def test_only_what_can_go_on_goes_on(seam: Seam) -> None:
    """All of it is counted; the one stream that cannot ends with an error that says why."""
    assert seam.continued == len(seam.cut)
    assert seam.lost == {"stream_broken": 1}
    assert seam.broken.tokens
    assert "The engine died while it worked on this request" in seam.broken.error


def test_log_probs_go_on(seam: Seam) -> None:
    """Of the same tokens, at the same places of the text."""
    whole, cut = (_log_probs(one["text"]) for one in (seam.whole, seam.cut))
    assert cut["tokens"] == whole["tokens"]
    assert cut["text_offset"] == whole["text_offset"]


def _log_probs(streamed: Streamed) -> dict[str, list[Any]]:
    places = [choice["logprobs"] for choice in streamed.choices if choice["logprobs"]]
    return {
        name: [value for place in places for value in place[name]]
        for name in ("tokens", "text_offset")
    }


def test_a_grammar_goes_on(seam: Seam) -> None:
    """From the state that the tokens before the seam have led to."""
    assert re.fullmatch(PATTERN, seam.cut["grammar"].text)


def test_counters_of_vllm_never_fall(life: Life) -> None:
    """They belong to the server, not to an engine."""
    assert life.prompt_tokens == sorted(life.prompt_tokens)
    assert life.prompt_tokens[0] > 0


def test_nothing_is_left_behind(life: Life) -> None:
    """No more processes, descriptors or threads than before, and no memory of a dead engine."""
    assert life.after is not None
    assert life.after.processes <= life.before.processes
    assert life.after.descriptors <= life.before.descriptors
    assert life.after.threads <= life.before.threads
    assert life.shared_memory.left() == set()


def test_what_kills_every_engine_is_quarantined(life: Life) -> None:
    """With the second death, tried alone or sent again; its neighbours are served."""
    server = life.server
    before = sum(deaths(server).values())
    poison = [50] * POISON_TOKENS
    with loaded(server, life.load.expected, clients=3, seed=8) as load:
        answer = server.completion(poison, timeout=300)
        server.until_ready()
        again = server.completion(poison, timeout=300)
    assert (answer.status_code, again.status_code) == (422, 422)
    assert answer.headers["x-should-retry"] == "false"
    assert again.headers["x-should-retry"] == "false"
    assert sum(deaths(server).values()) == before + 2
    assert deaths(server)["worker_exception"] == 2
    told = server.status["engine"]["last_exit"]
    assert told.startswith("worker_exception: ")
    assert "InjectedFaultError" in told
    assert "stack trace" not in told
    assert not load.lost
    assert not load.wrong


def test_a_planned_restart_of_two_ranks_costs_no_answer(life: Life) -> None:
    """No stream either, while the ranks of one engine are exchanged for those of the next.

    A stream that the first engine has begun is among them.
    """
    server = life.server
    prompts = [[50, 60, 70, 80]] * (RECYCLE_REQUESTS // 6)
    many = {"model": "faulty", "prompt": prompts, "max_tokens": 1}

    def ask_many() -> None:
        assert server.post("/v1/completions", many, timeout=300).status_code == 200

    with loaded(server, life.load.expected, clients=CLIENTS, seed=9) as load:
        recycle(server, ask_many)
    assert not load.lost, load.lost
    assert not load.broken, load.broken
    assert not load.wrong, load.wrong
    assert server.metric("engine_recycles_total", reason="requests") == 1


def test_an_undisturbed_server_still_answers(life: Life) -> None:
    """After all of it, as at the beginning."""
    question, expected = next(iter(life.load.expected.items()))
    with client_of(life.server) as client:
        assert ask(client, "faulty", question) == expected
