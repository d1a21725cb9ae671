"""What a beam search of vLLM is to a request: one prompt, and one stay in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.inputs.engine import tokens_input
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import BeamSearchParams

from holdfast.engine.proxy import EngineProxy
from holdfast.patches.beam_search import mark_beam_searches
from holdfast.request_context import REQUEST, RequestContext

BEAMS, TOKENS = 2, 3
STEPS = 1 + BEAMS * (TOKENS - 1)
"""A search begins with one beam."""


class Engine:
    """It makes one token of each prompt, and has a few more that are less likely."""

    vllm_config: Any = None
    renderer = vllm_config
    model_config = SimpleNamespace(max_model_len=64)
    input_processor = SimpleNamespace(resolve_watermarking=lambda _: False)

    def __init__(self) -> None:
        self.steps = 0

    async def generate(self, *, prompt: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(0)
        self.steps += 1
        scores: Any = [{token: Logprob(-token, token) for token in range(1, 2 * BEAMS + 1)}]
        made = CompletionOutput(0, "", [1], None, scores, finish_reason="length")
        yield RequestOutput(
            request_id, None, prompt["prompt_token_ids"], None, [made], finished=True
        )


class Serving(BeamSearchOnlineMixin):  # type: ignore[misc]  # vLLM is Any to us
    """A route of vLLM, without what is above its beam search."""

    def __init__(self, proxy: EngineProxy) -> None:
        tokenizer = SimpleNamespace(eos_token_id=0, decode=lambda *_, **_options: "")
        self.renderer: Any = SimpleNamespace(get_tokenizer=lambda: tokenizer)
        self.engine_client = proxy

    async def search(self, prompt: list[int]) -> int:
        """Return how many answers there are."""
        parameters = BeamSearchParams(beam_width=BEAMS, max_tokens=TOKENS)
        outputs = self.beam_search(tokens_input(prompt), "beam", parameters)
        return sum([len(output.outputs) async for output in outputs])


def searched(*prompts: list[int]) -> tuple[RequestContext, EngineProxy, list[int]]:
    """The context of a request with these prompts, and after which steps its engine was done."""
    mark_beam_searches()
    done: list[int] = []

    async def scene() -> tuple[RequestContext, EngineProxy, list[int]]:
        proxy, engine = EngineProxy(), Engine()
        context = RequestContext(engine_is_done=lambda: done.append(engine.steps))
        REQUEST.set(context)
        proxy.use(engine)
        proxy.requests.engine_started(engine, 1)
        proxy.requests.open()
        serving = Serving(proxy)
        answers = await asyncio.gather(*(serving.search(prompt) for prompt in prompts))
        assert answers == [BEAMS] * len(prompts)
        return context, proxy, done

    return asyncio.run(scene())


def test_a_beam_search_is_charged_its_prompt_once() -> None:
    """It is one request to the engine too, though vLLM makes one of each beam and token."""
    context, proxy, _ = searched([5, 6, 7])
    assert (context.prompt_tokens, context.output_tokens) == (3, STEPS)
    assert proxy.requests.given == 1


def test_each_prompt_of_a_beam_search_is_charged() -> None:
    """They are searched side by side."""
    context, proxy, _ = searched([5, 6, 7], [8, 9])
    assert (context.prompt_tokens, context.output_tokens) == (5, 2 * STEPS)
    assert proxy.requests.given == 2


def test_a_beam_search_keeps_its_capacity_to_its_end() -> None:
    """Or it would wait for a whole answer of another request before each of its tokens."""
    assert searched([5, 6, 7], [8, 9])[2] == [2 * STEPS]
