"""Bounds what one request of a pooling model takes of the threads and the memory of the front end.

vLLM 0.32 renders all prompts in one thread, in the order in which they come. A request gives it all
its prompts at once, and others wait until the last of them is rendered. For scores of embedding
models, vLLM tokenizes and decodes on the event loop. What it makes of each token afterwards, an
embedding or a product, has no bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
from vllm.entrypoints.pooling.scoring.io_processor import (
    BiEncoderIOProcessor,
    CrossEncoderIOProcessor,
    JinaRankingIOProcessor,
    LateInteractionIOProcessor,
    ScoringIOProcessor,
)
from vllm.exceptions import VLLMValidationError

from holdfast.patches.patch import replace
from holdfast.patches.tokenizer import (
    CHARACTERS_PER_COPIED_TOKEN,
    MAX_COPIED_TOKENS,
    characters_in,
)

PREPARED_AT_ONCE = 4
"""How many requests for scores are prepared at once: each may wait for a host of images."""
RENDERED_AT_ONCE = 4
"""How many prompts of a request wait for the rendering thread: others have their turn between."""
MAX_COPIED_CHARACTERS = MAX_COPIED_TOKENS * CHARACTERS_PER_COPIED_TOKEN
"""Characters of a query in all its pairs, each of which is tokenized: as many as a body brings."""
MAX_TOKEN_VALUES = 1 << 25
"""The numbers of an answer with an embedding for each token: as JSON they take 2.3 GB and 8 s."""
MAX_SCORED_VALUES = 1 << 28
"""The numbers that scores, or an answer in bytes, are made of: 1 GiB, in tensors."""
MAX_COMPARED_TOKENS = 1 << 28
"""Pairs of a query's and a document's token that scores compare: at most 1 GiB at once, and some
seconds of the rendering thread."""

_TOKEN_TASKS = ("token_classify", "token_embed")
_EMBEDDING_SIZES = ("colbert_dim", "embedding_dim", "embed_dim", "dims", "dim", "projection_dim")
"""What models that embed each token call the size of an embedding, in their configurations."""


def share_rendering() -> None:
    """Bound the work of pooling requests, and share its thread; idempotent."""
    threads = ThreadPoolExecutor(PREPARED_AT_ONCE, thread_name_prefix="holdfast-scores")

    async def preprocessing(self: Any, io_processor: Any, ctx: Any) -> None:
        _check_pairs(io_processor, ctx)
        requests = await _requests(io_processor, ctx, threads)
        if not requests:
            raise ValueError("You must pass at least one prompt")
        ctx.engine_inputs = await _rendered(io_processor.render_async, requests)
        if ctx.pooling_params.task not in _TOKEN_TASKS:
            return
        lengths = [self._extract_prompt_len(one["prompts"]) for one in ctx.engine_inputs]
        most = most_values(io_processor, ctx.request)
        check_values(lengths, ctx.pooling_params, self.model_config, most)
        if isinstance(io_processor, LateInteractionIOProcessor):
            check_comparisons(lengths, ctx.n_queries, io_processor)

    replace(PoolingBaseServing, "_preprocessing", preprocessing)


def most_values(io_processor: Any, request: Any) -> int:
    """Return how many numbers a request may have made of tokens: fewer if they become JSON."""
    is_scored = isinstance(io_processor, ScoringIOProcessor)
    is_json = not is_scored and getattr(request, "encoding_format", "float") == "float"
    return MAX_TOKEN_VALUES if is_json else MAX_SCORED_VALUES


def check_values(lengths: Sequence[int], params: Any, model_config: Any, most: int) -> None:
    """Check that the engine makes at most `most` numbers of the tokens of these prompts.

    One prompt is always allowed: the operator has chosen how long it may be.

    Raises:
        VLLMValidationError: too many.
    """
    if len(lengths) == 1:
        return
    each = _values_per_token(params, model_config)
    if sum(lengths) * each > most:
        raise VLLMValidationError(
            f"The prompts of the request have {sum(lengths)} tokens, and each takes {each} numbers;"
            f" at most {most // each} tokens are allowed in one request. Please send fewer prompts "
            "at a time.",
            parameter="input",
        )


def check_comparisons(lengths: Sequence[int], queries: int, processor: Any) -> None:
    """Check how many tokens late interaction compares; the first prompts are the queries.

    Raises:
        VLLMValidationError: too many.
    """
    if isinstance(processor, JinaRankingIOProcessor):  # it compares whole documents
        return
    first, documents = lengths[:queries], lengths[queries:]
    pairs = zip(list(first) * len(documents) if queries == 1 else first, documents, strict=False)
    compared = sum(query * document for query, document in pairs)
    if compared > MAX_COMPARED_TOKENS:
        raise VLLMValidationError(
            f"The request compares {compared} pairs of tokens (the query's times the documents'); "
            f"at most {MAX_COMPARED_TOKENS} are allowed. Please send fewer documents at a time, or "
            "a shorter query.",
            parameter="documents",
        )


def _check_pairs(io_processor: Any, ctx: Any) -> None:
    """Refuse pairs whose query is tokenized too often: vLLM renders it with each document."""
    if not isinstance(io_processor, CrossEncoderIOProcessor):
        return
    data = io_processor.valid_inputs_online(ctx.request)
    pairs = len(data.data_2)
    copied = [ctx.request.chat_template_kwargs, data.data_1 if len(data.data_1) == 1 else None]
    characters = characters_in(copied)
    if pairs > 1 and characters * pairs > MAX_COPIED_CHARACTERS:
        raise VLLMValidationError(
            f"The request has {pairs} documents and a query of {characters} characters, with its "
            f"instruction; with these, at most {MAX_COPIED_CHARACTERS // characters} documents are "
            "allowed.",
            parameter="documents",
        )


async def _requests(io_processor: Any, ctx: Any, threads: ThreadPoolExecutor) -> Sequence[Any]:
    """Return what to render.

    For scores of embedding models, vLLM truncates texts and decodes images meanwhile.
    """
    make = io_processor.get_request_factory_online
    if not isinstance(io_processor, BiEncoderIOProcessor):
        return make(ctx)  # type: ignore[no-any-return]  # vLLM is Any to us
    within = copy_context()
    return await asyncio.get_running_loop().run_in_executor(threads, within.run, make, ctx)


async def _rendered(render: Callable[[Any], Awaitable[Any]], requests: Sequence[Any]) -> list[Any]:
    """Render each request, a few at a time, until one fails."""
    rendered: list[Any] = [None] * len(requests)
    left = iter(enumerate(requests))

    async def render_in_turn() -> None:
        for place, request in left:
            rendered[place] = await render(request)

    turns = [
        asyncio.ensure_future(render_in_turn()) for _ in range(min(RENDERED_AT_ONCE, len(requests)))
    ]
    try:
        await asyncio.gather(*turns)
    finally:
        for turn in turns:
            turn.cancel()
    return rendered


def _values_per_token(params: Any, model_config: Any) -> int:
    """Return how many numbers the engine makes of a token, at most if its model does not say."""
    config = model_config.hf_config
    if params.task == "token_classify":
        return max(1, int(getattr(config, "num_labels", 1)))
    named = (getattr(config, name, None) for name in _EMBEDDING_SIZES)
    known = (size for size in (params.dimensions, *named) if size)
    return int(next(known, None) or model_config.embedding_size)
