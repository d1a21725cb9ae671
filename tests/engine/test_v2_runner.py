"""vLLM's V2 model runner, the default on GPUs, from the start to a recovery under Holdfast."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import v2_runner
from cut_streams import Asked, streams, whole_streams
from servers import (
    COMPILED,
    READY_DEADLINE_SECONDS,
    TINY,
    Greedy,
    Server,
    descendants,
    running,
    title_of,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), v2_runner.NEEDS_TRITON]

USED = "Using V2 Model Runner"
STEP_TOKENS = 128
LONG_PROMPT = [65 + index % 26 for index in range(200)]
"""More than one step takes in."""
SEEDED = Asked(
    "completions",
    {
        "prompt": LONG_PROMPT[:40],
        "max_tokens": 150,
        "temperature": 1.0,
        "seed": 7,
        "frequency_penalty": 0.5,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    },
)
PASSED = {
    "first_token",
    "context_sweep",
    "full_context",
    "batch_sweep",
    "full_batch",
    "widest_decode",
    "mixed",
    "first_sampling",
}


@pytest.fixture(scope="module")
def server(silent_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model with a need that nobody declared, READY."""
    flags = (*TINY, "--dtype=float32", "--learned-restart=always")
    environment = {**v2_runner.environment(), **COMPILED}
    directory = tmp_path_factory.mktemp("second-runner")
    with running(directory, str(silent_demo), *flags, environment=environment) as found:
        found.until_ready(deadline_seconds=2 * READY_DEADLINE_SECONDS)
        yield found


def test_the_worst_case_is_proven(server: Server) -> None:
    """Every step of the probe that has room in such a context, on this runner."""
    assert USED in server.log
    probe = server.status["probe"]
    assert probe["passed"]
    assert {step["name"] for step in probe["steps"] if step["outcome"] == "passed"} == PASSED


def test_undeclared_growth_is_learned(server: Server) -> None:
    """Seen under the lock, reserved at the next start, and not seen again."""
    assert server.log.count(USED) == server.metric("engine_starts_total") == 2
    assert server.metric("workspace_growths_total", phase="locked") > 0
    (rank,) = server.status["workspace"]
    assert rank["is_locked"]
    assert rank["growths"] == {"warmup": 0, "sealed": 0, "locked": 0}
    (slot,) = rank["slots"]
    assert slot["reserved_bytes"] >= slot["high_water_bytes"] >= 1024 * len(LONG_PROMPT)


@pytest.mark.parametrize("prompt", ["hold fast", "The quick brown fox", "a" * 200])
def test_tokens_are_those_of_the_first_runner(
    server: Server, greedy_reference: Greedy, prompt: str
) -> None:
    """Both give what transformers generates from the same weights; see `test_openai`."""
    options = {"max_tokens": 24, "return_token_ids": True, "ignore_eos": True}
    answer = server.completion(prompt, **options).json()
    assert answer["choices"][0]["token_ids"] == greedy_reference(prompt, 24)


def test_a_seed_repeats_an_answer_to_a_prompt_of_several_steps(server: Server) -> None:
    """This runner draws by the position in the answer, and takes nothing back."""
    options = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    answers = [server.completion(LONG_PROMPT, seed=seed, **options) for seed in (7, 7, 8)]
    first, again, other = (answer.json()["choices"][0]["text"] for answer in answers)
    assert first == again
    assert first != other


def test_steps_are_counted(server: Server) -> None:
    """One for each token of an answer, and one more for each further part of the prompt."""
    names = ("engine_steps_total", "engine_scheduled_tokens_total")
    before = [server.metric(name) for name in names]
    prompt = LONG_PROMPT[::-1]
    assert server.completion(prompt, max_tokens=8, ignore_eos=True).status_code == 200
    steps, tokens = (server.metric(name) - was for name, was in zip(names, before, strict=True))
    assert steps >= len(prompt) // STEP_TOKENS + 8
    assert tokens >= len(prompt) + 7


def test_a_killed_worker_costs_no_answer(server: Server) -> None:
    """The next engine has this runner too, and gives the same tokens.

    A stream with a seed goes on with the tokens that it would have had.
    """
    options = {"max_tokens": 24, "ignore_eos": True}
    expected = server.completion(LONG_PROMPT, **options).json()["choices"][0]["text"]
    (whole,) = whole_streams(server, [SEEDED])
    starts = server.metric("engine_starts_total")
    worker = _worker_of(server)
    with ThreadPoolExecutor(1) as client, streams(server, [SEEDED]) as (streamed,):
        assert streamed.has_begun.wait(READY_DEADLINE_SECONDS)
        worker.suspend()  # so that it has the request, and no answer, when it is killed
        patience = 2 * READY_DEADLINE_SECONDS
        asking = client.submit(server.completion, LONG_PROMPT, timeout=patience, **options)
        server.until(lambda: server.sent == 2, "both requests")
        worker.kill()
        answer = asking.result()
    assert answer.json()["choices"][0]["text"] == expected
    assert not streamed.error
    assert streamed.tokens == whole.tokens
    assert streamed.text == whole.text
    assert server.metric("requests_replayed_total") == 1
    assert server.metric("requests_continued_total") == 1
    assert server.metric("engine_deaths_total", cause="worker_exit") == 1
    assert server.metric("engine_starts_total") == starts + 1
    assert server.log.count(USED) == starts + 1


def _worker_of(server: Server) -> psutil.Process:
    found = descendants(server.process.pid)
    return next(process for process in found if "VLLM::Worker" in title_of(process))
