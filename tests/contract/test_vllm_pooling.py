"""What one request of a pooling model takes of the front end: vLLM's processors, no engine."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import PoolingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
from vllm.entrypoints.pooling.scoring.io_processor import ScoringIOProcessors
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest
from vllm.entrypoints.pooling.typing import PoolingServeContext
from vllm.exceptions import VLLMValidationError
from vllm.renderers import renderer_from_config
from vllm.renderers.chat_utils import ChatTemplateConfig

import tiny_models
from holdfast.patches.pooling import (
    MAX_COMPARED_TOKENS,
    MAX_COPIED_CHARACTERS,
    MAX_SCORED_VALUES,
    MAX_TOKEN_VALUES,
    RENDERED_AT_ONCE,
    check_comparisons,
    check_values,
    most_values,
    share_rendering,
)
from holdfast.request_context import REQUEST, RequestContext, current_request

DEADLINE_SECONDS = 60
DIMENSIONS = 128


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """That of a model that embeds."""
    model = tiny_models.make_embedding(tmp_path_factory.mktemp("models") / "model")
    return EngineArgs(model=str(model), enforce_eager=True).create_engine_config()


@pytest.fixture(scope="module")
def renderer(config: Any) -> Any:
    """What its server renders prompts with."""
    return renderer_from_config(config)


@pytest.fixture(autouse=True)
def shared() -> None:
    """With the bounds, applied twice as two engines would."""
    share_rendering()
    share_rendering()


def processor_of(name: str, config: Any, renderer: Any) -> Any:
    """What vLLM prepares and renders such scores with."""
    templates = ChatTemplateConfig(chat_template=None, chat_template_content_format="auto")
    return ScoringIOProcessors[name](config, renderer, templates)


def asked(documents: list[str], query: str = "hold", **options: Any) -> Any:
    """The context of a request to rank these."""
    return PoolingServeContext(
        request=RerankRequest(query=query, documents=documents, **options),
        model_name="m",
        request_id="a",
        pooling_params=PoolingParams(task="classify"),
        lora_request=None,
        priorities=None,
        prompt_extras=None,
    )


def serving_of(config: Any) -> Any:
    """vLLM's class, with the part of it that prepares a request."""
    kind: Any = type("Serving", (PoolingBaseServing,), {})
    kind.__abstractmethods__ = frozenset()
    serving = object.__new__(kind)
    serving.model_config = config.model_config
    return serving


def prepare(config: Any, processor: Any, context: Any) -> None:
    """Have vLLM prepare the request, as one of the key `a`."""

    async def scene() -> None:
        REQUEST.set(RequestContext(key="a"))
        async with asyncio.timeout(DEADLINE_SECONDS):
            await serving_of(config)._preprocessing(processor, context)

    asyncio.run(scene())


@pytest.mark.parametrize("name", ["bi-encoder", "late-interaction"])
def test_scores_are_prepared_off_the_event_loop(
    config: Any, renderer: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM truncates each text there, and decodes images; the key of the request is known."""
    processor = processor_of(name, config, renderer)
    seen: list[tuple[threading.Thread, str]] = []
    truncate = processor._truncate_scoring_data

    def seeing(*args: Any) -> Any:
        seen.append((threading.current_thread(), current_request().key))
        return truncate(*args)

    monkeypatch.setattr(processor, "_truncate_scoring_data", seeing)
    context = asked(["hold fast", "on"], max_tokens_per_doc=1)
    prepare(config, processor, context)
    assert len(context.engine_inputs) == 3
    ((thread, key),) = seen
    assert thread is not threading.main_thread()
    assert key == "a"


def test_a_request_leaves_others_their_turn_in_the_rendering_thread(config: Any) -> None:
    """It is given a few prompts of a request at a time."""
    waiting: list[Any] = []
    most = [0]

    async def render_async(request: Any) -> Any:
        waiting.append(request)
        most[0] = max(most[0], len(waiting))
        await asyncio.sleep(0)
        waiting.remove(request)
        return {"prompts": {"type": "token", "prompt_token_ids": [request]}}

    processor: Any = SimpleNamespace(
        get_request_factory_online=lambda _: list(range(100)), render_async=render_async
    )
    context = asked([])
    prepare(config, processor, context)
    rendered = [one["prompts"]["prompt_token_ids"] for one in context.engine_inputs]
    assert rendered == [[number] for number in range(100)]
    assert most == [RENDERED_AT_ONCE]


def test_nothing_more_is_rendered_of_a_request_that_failed(config: Any) -> None:
    """What waits for the thread is cancelled."""
    given: list[int] = []
    cancelled: list[int] = []

    async def render_async(request: int) -> Any:
        given.append(request)
        if request == 1:
            raise VLLMValidationError("on purpose")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(request)
            raise

    processor: Any = SimpleNamespace(
        get_request_factory_online=lambda _: list(range(100)), render_async=render_async
    )
    with pytest.raises(VLLMValidationError, match="on purpose"):
        prepare(config, processor, asked([]))
    assert given == [*range(RENDERED_AT_ONCE)]
    assert cancelled == [one for one in given if one != 1]


def test_a_request_without_prompts_is_refused(config: Any) -> None:
    """As vLLM does."""
    processor: Any = SimpleNamespace(get_request_factory_online=lambda _: [], render_async=None)
    with pytest.raises(ValueError, match="at least one prompt"):
        prepare(config, processor, asked([]))


@pytest.mark.parametrize("where", ["query", "instruction"])
def test_a_long_query_is_tokenized_for_few_documents(
    config: Any, renderer: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM does so with each; the prompts are refused before the first is rendered."""
    processor = processor_of("cross-encoder", config, renderer)
    rendered: list[Any] = []

    async def render_async(request: Any) -> Any:
        rendered.append(request)
        return {"prompts": {"type": "token", "prompt_token_ids": [1]}}

    monkeypatch.setattr(processor, "render_async", render_async)
    text = "x" * (MAX_COPIED_CHARACTERS // 8)
    given = {"query": text} if where == "query" else {"query": "", "instruction": text}
    with pytest.raises(VLLMValidationError, match=r"at most [78] documents"):
        prepare(config, processor, asked(["hold"] * 9, **given))
    assert rendered == []
    prepare(config, processor, asked(["hold"] * 7, **given))
    assert len(rendered) == 7


def test_a_query_of_usual_length_ranks_as_many_documents_as_before(
    config: Any, renderer: Any
) -> None:
    """Through vLLM's own code."""
    context = asked(["hold fast"] * 50)
    prepare(config, processor_of("cross-encoder", config, renderer), context)
    assert len(context.engine_inputs) == 50


def model(**config: Any) -> Any:
    """The configuration of a model."""
    return SimpleNamespace(hf_config=SimpleNamespace(**config), embedding_size=8 * DIMENSIONS)


@pytest.mark.parametrize(
    ("task", "made", "given", "each"),
    [
        ("token_embed", {"colbert_dim": DIMENSIONS}, {}, DIMENSIONS),
        ("token_embed", {}, {}, 8 * DIMENSIONS),
        ("token_embed", {}, {"dimensions": 64}, 64),
        ("token_classify", {"num_labels": 9}, {}, 9),
    ],
)
def test_what_is_made_of_each_token_is_bounded(
    task: Any, made: dict[str, Any], given: dict[str, Any], each: int
) -> None:
    """vLLM makes a number of Python's and JSON of each."""
    params = PoolingParams(task=task, **given)
    half = MAX_TOKEN_VALUES // each // 2
    check_values([half, half], params, model(**made), MAX_TOKEN_VALUES)
    check_values([9 * half], params, model(**made), MAX_TOKEN_VALUES)
    with pytest.raises(VLLMValidationError, match="fewer prompts"):
        check_values([half, half + 1], params, model(**made), MAX_TOKEN_VALUES)


@pytest.mark.parametrize(("task", "is_refused"), [("embed", False), ("token_embed", True)])
def test_only_what_is_made_of_each_token_counts(
    config: Any, task: Any, *, is_refused: bool
) -> None:
    """A whole prompt has one embedding, however long it is."""

    async def render_async(_: Any) -> Any:
        tokens = range(MAX_TOKEN_VALUES)
        return {"prompts": {"type": "token", "prompt_token_ids": tokens}}

    processor: Any = SimpleNamespace(
        get_request_factory_online=lambda _: [1, 2], render_async=render_async
    )
    context = asked([])
    context.pooling_params = PoolingParams(task=task)
    if is_refused:
        with pytest.raises(VLLMValidationError, match="fewer prompts"):
            prepare(config, processor, context)
    else:
        prepare(config, processor, context)


@pytest.mark.parametrize(
    ("kind", "encoding", "most"),
    [
        ("late-interaction", "float", MAX_SCORED_VALUES),
        (None, "float", MAX_TOKEN_VALUES),
        (None, "base64", MAX_SCORED_VALUES),
        (None, "bytes_only", MAX_SCORED_VALUES),
    ],
)
def test_scores_and_bytes_are_made_of_more_numbers_than_json(
    config: Any, renderer: Any, kind: Any, encoding: str, most: int
) -> None:
    """Nothing of Python's is made of those."""
    processor = processor_of(kind, config, renderer) if kind else None
    assert most_values(processor, SimpleNamespace(encoding_format=encoding)) == most


@pytest.mark.parametrize(
    ("lengths", "queries"),
    [
        ([2, MAX_COMPARED_TOKENS // 4, MAX_COMPARED_TOKENS // 4], 1),
        ([1 << 13, 1 << 13, 1 << 14, 1 << 14], 2),
    ],
)
def test_the_tokens_that_scores_compare_are_bounded(
    config: Any, renderer: Any, lengths: list[int], queries: int
) -> None:
    """In the thread that renders the prompts of others."""
    processor = processor_of("late-interaction", config, renderer)
    check_comparisons(lengths, queries, processor)
    with pytest.raises(VLLMValidationError, match="pairs of tokens"):
        check_comparisons([*lengths[:-1], lengths[-1] + 1], queries, processor)
    check_comparisons(
        lengths * 9, queries, processor_of("jina-reranking-scoring", config, renderer)
    )
