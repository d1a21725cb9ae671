"""Answers that go on in another engine, under vLLM's Scheduler: with drafts and pipelines too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_paths.scheduled_engine import SAMPLED, ScheduledEngine
from gpu_paths.scheduler_settings import METHODS, Setting, configured, decoder_configuration
from holdfast.patches.continued import resume_answers

PROMPT = [3] * 50
MAX_TOKENS = 40
DEADLINE_SECONDS = 60.0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's configuration of a model with a decoder alone."""
    with decoder_configuration(tmp_path_factory.mktemp("continued")) as found:
        yield found


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an EngineCore; what is put in the place of vLLM's code is taken back."""
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    for owner, name in (
        (Request, "from_engine_core_request"),
        (StructuredOutputManager, "_create_grammar"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    resume_answers()


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("pipeline_stages", [1, 2])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sent_tokens", [1, 17])
def test_an_answer_goes_on_where_it_was(
    base: Any, sent_tokens: int, method: str, *, is_async: bool, pipeline_stages: int
) -> None:
    """What was sent is read with the prompt, in one step, and counts as a part of the answer."""
    setting = Setting(
        method, is_async=is_async, pipeline_stages=pipeline_stages, has_prefix_caching=False
    )

    async def run() -> tuple[str, int, int]:
        async with ScheduledEngine(*configured(base, setting)) as engine:
            sent = [SAMPLED] * sent_tokens
            request = engine.submit(PROMPT, MAX_TOKENS, engine=0, sent=sent)
            async with asyncio.timeout(DEADLINE_SECONDS):
                await request.until_made(MAX_TOKENS + 1)
            first, *_ = engine.ranks()[0].recent_steps
            return request.ended, request.made_tokens, first.scheduled_tokens

    whole = len(PROMPT) + sent_tokens
    assert asyncio.run(run()) == ("length", MAX_TOKENS - sent_tokens, whole)
