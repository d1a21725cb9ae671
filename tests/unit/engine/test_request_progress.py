"""How far requests are can be seen without asking the engine, and nothing that they say."""

from __future__ import annotations

import asyncio

from holdfast.engine.replay import ReplayManager
from holdfast.engine.requests.request_progress import RequestRow
from holdfast.request_context import RequestContext
from replay_harness import ReplayHarness, run_scene
from scripted_llm import PlainOutputs, ScriptedLLM

MANY = 100


def rows(harness: ReplayHarness, limit: int = MANY) -> list[RequestRow]:
    """The rows of all requests."""
    return list(harness.requests.progress.rows(limit)[0])


def reach(harness: ReplayHarness, **tokens: int) -> None:
    """Have the ranks record this many tokens of prompt and answer for requests."""
    harness.requests.progress.reached_tokens = lambda: tokens


def test_a_prompt_is_followed_through_the_engine() -> None:
    """Held before there is one, queued before its first step, and then by its tokens."""

    async def scene(harness: ReplayHarness) -> None:
        context = RequestContext(key="team-a", received_seconds=5.0)
        call = harness.call("long", context=context, tokens=100)
        await harness.until_held(1)
        (held,) = rows(harness)
        assert (held.stage, held.prompt_tokens, held.prefilled_tokens) == ("held", 100, None)
        harness.start(ScriptedLLM()).hold()
        await harness.llm.until_received(1)
        stages = []
        for tokens in ({}, {"long": 64}, {"long": 100}, {"long": 107}):
            reach(harness, **tokens)
            (row,) = rows(harness)
            stages.append((row.stage, row.prefilled_tokens, row.output_tokens))
        assert stages == [
            ("queued", None, 0),
            ("prefill", 64, 0),
            ("decode", 100, 0),
            ("decode", 100, 7),
        ]
        assert (row.key, row.received_seconds, row.generation) == ("team-a", 5.0, 1)
        harness.llm.release()
        await call
        assert rows(harness) == []

    run_scene(scene)


def test_a_request_that_waits_between_two_steps_keeps_its_tokens() -> None:
    """Until its engine is dead: the next one computes the prompt again."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        call = harness.call("a", tokens=10)
        await harness.llm.until_received(1)
        reach(harness, a=4)
        assert rows(harness)[0].prefilled_tokens == 4
        reach(harness)
        assert rows(harness)[0].prefilled_tokens == 4
        harness.bury()
        await harness.until_held(1)
        assert rows(harness)[0].stage == "held"
        harness.start().hold()
        await harness.llm.until_received(1)
        (row,) = rows(harness)
        assert (row.stage, row.prefilled_tokens) == ("queued", None)
        assert (row.generation, row.replays) == (2, 1)
        harness.llm.release()
        await call

    run_scene(scene)


class WithChildren(PlainOutputs):
    """Names the answers of one request as vLLM does."""

    def request_ids(self, internal_id: str) -> tuple[str, ...]:
        return (internal_id, internal_id.rpartition("_")[2])


def test_several_answers_of_one_request_are_one_row() -> None:
    """They share the prompt, and each has tokens of its own."""

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(WithChildren())
        harness.start().hold()
        call = harness.call("a", tokens=10)
        await harness.llm.until_received(1)
        harness.requests.progress.reached_tokens = lambda: {"0_a": 12, "1_a": 15}
        (row,) = rows(harness)
        assert (row.stage, row.prefilled_tokens, row.output_tokens) == ("decode", 10, 7)
        harness.llm.release()
        await call

    run_scene(scene)


def test_several_prompts_of_one_request_are_one_row() -> None:
    """As a batch of completions is."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        context = RequestContext()
        calls = [harness.call(name, context=context, tokens=10) for name in "ab"]
        await harness.llm.until_received(2)
        reach(harness, a=10, b=3)
        (row,) = rows(harness)
        assert (row.stage, row.prompt_tokens, row.prefilled_tokens) == ("decode", 20, 13)
        harness.llm.release()
        await asyncio.gather(*calls)

    run_scene(scene)


def test_the_oldest_requests_are_shown_and_the_probe_is_not() -> None:
    """The others are counted."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start().hold()
        names = ["probe", "a", "b", "c"]
        calls = [
            harness.call(name, context=RequestContext(number=number, is_probe=name == "probe"))
            for number, name in enumerate(names)
        ]
        await harness.llm.until_received(len(names))
        shown, left_out = harness.requests.progress.rows(2)
        assert left_out == 1
        assert [row.number for row in shown] == [1, 2]
        harness.llm.release()
        await asyncio.gather(*calls)

    run_scene(scene)


def test_what_clients_were_sent_is_counted() -> None:
    """Without the probe; the first token of an answer in one piece has no time of its own."""

    async def scene(harness: ReplayHarness) -> None:
        harness.start(ScriptedLLM(answers=3))
        traffic = harness.requests.traffic
        await harness.call("probe", context=RequestContext(is_probe=True, received_seconds=0.0))
        await harness.call("a", context=RequestContext(received_seconds=0.0))
        whole = RequestContext(received_seconds=0.0)
        await harness.call("b", context=whole, is_answer_streamed=False)
        assert (traffic.prompt_tokens, traffic.output_tokens) == (2, 6)
        assert len(traffic.take_first_tokens()) == 1
        assert traffic.take_first_tokens() == ()

    run_scene(scene)


def test_the_time_of_a_first_token_includes_every_wait() -> None:
    """From the receipt of the whole request, on a later engine too."""

    async def scene(harness: ReplayHarness) -> None:
        harness.requests = ReplayManager(PlainOutputs(), clock=lambda: 12.5)
        call = harness.call("a", context=RequestContext(received_seconds=10.0))
        await harness.until_held(1)
        harness.start()
        await call
        assert harness.requests.traffic.take_first_tokens() == (2.5,)

    run_scene(scene)
