"""What parameters a request may bring, before vLLM copies them or its engine fails on them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.entrypoints.generate.beam_search import online
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.pooling.base import io_processor
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.engine import logprobs

from holdfast.engine.requests.arrivals import safe_request_id
from holdfast.patches import media_names
from holdfast.patches.media_names import own_media_names, own_name
from holdfast.patches.parameters import (
    MAX_ANSWER_LOGPROBS,
    MAX_BYTES,
    MAX_ENTRIES,
    MAX_PROMPT_COPIES_TOKENS,
    MAX_PROMPT_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    bound_batches,
    bound_length_penalty,
    bound_parameters,
    bound_request_ids,
    check_prompt_copies,
    check_prompt_logprobs,
    keep_token_texts,
    limit_answer_logprobs,
)
from holdfast.patches.responses import bound_responses
from holdfast.request_context import REQUEST, RequestContext, current_request

MOST_CHATS = 3
LARGE = "A" * (MAX_BYTES // 64)
CHAT = [{"role": "user", "content": "x"}]


@pytest.fixture(autouse=True)
def bounded() -> None:
    """With the bounds, applied twice as two engines would."""
    for _ in range(2):
        bound_parameters()
        bound_batches(MOST_CHATS)
        bound_request_ids(safe_request_id)
        bound_length_penalty()
        keep_token_texts()
        own_media_names()


@pytest.fixture
def context() -> Iterator[RequestContext]:
    """That of the request that brings the parameters."""
    context = RequestContext(key="a")
    token = REQUEST.set(context)
    yield context
    REQUEST.reset(token)


class Tokenizer:
    """One token for each character; notes what it decodes."""

    max_token_id = 1 << 20

    def __init__(self) -> None:
        self.decoded: list[int] = []

    def encode(self, text: str, **_options: Any) -> list[int]:
        return list(map(ord, text))

    def decode(self, token_ids: list[int]) -> str:
        self.decoded += token_ids
        return f"<{token_ids[0]}>"


def test_entries_are_bounded_by_the_buffers_of_the_v2_runner() -> None:
    """Its worker raises on more, which ends the engine."""
    source = Path(vllm.__file__).parent / "v1/worker/gpu/sample/logit_bias.py"
    found = dict(re.findall(r"^MAX_NUM_(\w+) = (\d+)$", source.read_text(), re.MULTILINE))
    assert {name: int(value) for name, value in found.items()} == {
        "ALLOWED_TOKEN_IDS": MAX_ENTRIES,
        "LOGIT_BIAS_TOKENS": MAX_ENTRIES,
        "STOP_TOKEN_IDS": MAX_STOP_TOKEN_IDS,
    }


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"allowed_token_ids": list(range(1025))}, "allowed_token_ids"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
        ({"stop_token_ids": list(range(1025))}, "stop_token_ids"),
        ({"seed": 2**63 - 1, "n": 2}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"extra_args": {"kv_transfer_params": {"x": "\ud800"}}}, "encoding"),
        ({"extra_args": {"x": 2**64}}, "encoding"),
        ({"stop": ["\ud800"]}, "encoding"),
        ({"stop": ["x"] * 5}, "5 strings"),
        ({"stop": [LARGE], "n": 128}, "bytes"),
        ({"extra_args": {"x": LARGE}, "n": 128}, "bytes"),
        ({"structured_outputs": StructuredOutputsParams(regex=LARGE), "n": 128}, "bytes"),
        ({"repetition_detection": RepetitionDetectionParams(10**9, 2000, 2)}, "max_pattern_size"),
        ({"repetition_detection": RepetitionDetectionParams(1, 1, 10**6)}, "max_pattern_size"),
        ({"repetition_detection": RepetitionDetectionParams(1000, 993, 3)}, "max_pattern_size"),
    ],
)
def test_parameters_beyond_a_bound_are_refused(given: dict[str, Any], name: str) -> None:
    """Before anything is made of them for each sequence."""
    with pytest.raises(VLLMValidationError, match=name):
        SamplingParams(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"allowed_token_ids": list(range(1024))},
        {"logit_bias": dict.fromkeys(range(1024), 1.0)},
        {"stop_token_ids": list(range(1024))},
        {"structured_outputs": StructuredOutputsParams(json={"type": "object"}), "n": 16},
        {"seed": 2**63 - 2, "n": 2},
        {"stop": [LARGE]},
        {"extra_args": {"kv_transfer_params": {"remote_block_ids": list(range(10_000))}}},
        {"repetition_detection": RepetitionDetectionParams(20, 3, 4)},
        {"repetition_detection": RepetitionDetectionParams(1000, 996, 3)},
        {"stop": ["a", "b", "c", "d"]},
    ],
)
def test_parameters_within_the_bounds_are_taken(given: dict[str, Any]) -> None:
    """They reach the engine as they are."""
    taken = SamplingParams(**given)
    assert all(getattr(taken, name) == value for name, value in given.items())


def test_each_prompt_of_a_request_counts(context: RequestContext) -> None:
    """Each gets all parameters."""
    SamplingParams(stop=[LARGE])
    context.prompts = 65
    with pytest.raises(VLLMValidationError, match="65 sequences"):
        SamplingParams(stop=[LARGE])


def test_the_tokens_of_bad_words_are_counted() -> None:
    """vLLM counts the words, and its V2 runner raises on too many tokens."""
    SamplingParams(bad_words=["x" * 600]).update_from_tokenizer(Tokenizer())
    with pytest.raises(VLLMValidationError, match="1200 tokens"):
        SamplingParams(bad_words=["x" * 600, "y" * 600]).update_from_tokenizer(Tokenizer())


def test_the_ends_of_the_model_are_stop_tokens_too() -> None:
    """The V2 runner has room for all together, if an answer has a minimum length."""
    for min_tokens in (0, 1):
        given = SamplingParams(stop_token_ids=list(range(128)), min_tokens=min_tokens)
        if min_tokens:
            with pytest.raises(VLLMValidationError, match="stop_token_ids"):
                given.update_from_generation_config({"eos_token_id": [500, 501]}, 500)
        else:
            given.update_from_generation_config({"eos_token_id": [500, 501]}, 500)


@pytest.mark.parametrize(
    ("chats", "given", "refusal"),
    [
        (MOST_CHATS + 1, {}, "4 chats"),
        (MOST_CHATS, {"vllm_xargs": {"x": "A" * MAX_BYTES}}, "bytes"),
        (MOST_CHATS, {"junk": [{}] * (MAX_BYTES // 2)}, "bytes"),
        (MOST_CHATS, {"logit_bias": dict.fromkeys(map(str, range(MAX_BYTES // 16)), 1)}, "bytes"),
    ],
)
def test_a_batch_is_bounded_before_its_first_chat(
    context: RequestContext, chats: int, given: dict[str, Any], refusal: str
) -> None:
    """vLLM copies and validates all of it for each chat."""
    batch = BatchChatCompletionRequest(messages=[CHAT] * chats, **given)
    with pytest.raises(VLLMValidationError, match=refusal):
        asyncio.run(OpenAIServingChatBatch.create_batch_chat_completion(None, batch))
    assert context.prompts == (1 if chats > MOST_CHATS else MOST_CHATS)


def test_a_batch_within_the_bounds_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, context: RequestContext
) -> None:
    """With the number of its chats."""
    seen: list[Any] = []

    async def create(_self: Any, request: Any, *_: Any) -> None:
        seen.append(request)

    monkeypatch.setattr(OpenAIServingChatBatch, "create_batch_chat_completion", create)
    bound_batches(MOST_CHATS)
    batch = BatchChatCompletionRequest(messages=[CHAT] * MOST_CHATS, logit_bias={"7": 1})
    asyncio.run(OpenAIServingChatBatch.create_batch_chat_completion(None, batch))
    assert seen == [batch]
    assert context.prompts == MOST_CHATS


def test_a_long_name_of_a_request_is_shortened() -> None:
    """Each event of a stream repeats it."""
    named = BaseServing._base_request_id
    assert named(None, "mine") == "mine"
    assert len(named(None, "x" * 100_000)) == len(safe_request_id("x" * 100_000))
    assert named(None)
    asked: Any = SimpleNamespace(headers={"X-Request-Id": "header"})
    assert named(asked, "mine") == "header"


def test_the_text_of_a_token_is_decoded_once() -> None:
    """However many positions name it."""
    tokenizer = Tokenizer()
    assert logprobs.convert_ids_list_to_tokens(tokenizer, [5, 6, 5]) == ["<5>", "<6>", "<5>"]
    assert logprobs.convert_ids_list_to_tokens(tokenizer, [6, 7]) == ["<6>", "<7>"]
    assert logprobs.convert_ids_list_to_tokens(tokenizer, []) == []
    assert tokenizer.decoded == [5, 6, 7]


@pytest.mark.parametrize("penalty", [-10_000.0, 33.0, float("nan")])
def test_a_length_has_a_power_that_a_float_holds(penalty: float) -> None:
    """vLLM divides by it."""
    with pytest.raises(VLLMValidationError, match="length_penalty"):
        online.create_sort_beams_key_function(2, penalty)
    rank = online.create_sort_beams_key_function(2, -32.0)
    assert rank(SimpleNamespace(tokens=[1] * 100_000, cum_logprob=-1.0)) < 0


def test_log_probs_of_a_prompt_are_bounded(context: RequestContext) -> None:
    """The event loop makes an object of each, for each answer."""
    tokens = MAX_PROMPT_LOGPROBS // 21
    check_prompt_logprobs(SamplingParams(), "a", MAX_PROMPT_LOGPROBS + 1, lambda: 10**5)
    check_prompt_logprobs(SamplingParams(prompt_logprobs=20), "a", tokens, lambda: 10**5)
    for asked, answers in ((21, 1), (-1, 1), (20, 2)):
        parameters = SamplingParams(prompt_logprobs=asked, n=answers)
        context.prompt_logprobs.clear()
        with pytest.raises(VLLMValidationError, match="log-probs"):
            check_prompt_logprobs(parameters, "a", tokens, lambda: 10**5)


def test_the_log_probs_of_all_prompts_are_added_up(context: RequestContext) -> None:
    """Long prompts and short ones; one that goes to another engine counts once."""
    context.prompts = 64
    parameters = SamplingParams(prompt_logprobs=20)
    for number in range(63):
        check_prompt_logprobs(parameters, f"a-{number}", 1, lambda: 10**5)
    for _ in range(2):
        check_prompt_logprobs(parameters, "a-63", MAX_PROMPT_LOGPROBS // 21 - 63, lambda: 10**5)
    with pytest.raises(VLLMValidationError, match="log-probs"):
        check_prompt_logprobs(parameters, "a-64", 1, lambda: 10**5)


@pytest.mark.parametrize(
    ("asked", "answers", "kind", "most"),
    [
        (20, 1, RequestOutputKind.FINAL_ONLY, MAX_ANSWER_LOGPROBS // 21),
        (20, 8, RequestOutputKind.FINAL_ONLY, MAX_ANSWER_LOGPROBS // (8 * 21)),
        (-1, 1, RequestOutputKind.FINAL_ONLY, 10),
        (20, 1, RequestOutputKind.DELTA, None),
        (None, 8, RequestOutputKind.FINAL_ONLY, None),
    ],
)
def test_an_answer_with_log_probs_ends_before_it_stops_the_event_loop(
    asked: int | None, answers: int, kind: RequestOutputKind, most: int | None
) -> None:
    """All of it is made in one turn, unless it is a stream."""

    def vocabulary() -> int:
        return MAX_ANSWER_LOGPROBS // 10 - 1

    for tokens in (1, 10**6):
        given = SamplingParams(n=answers, logprobs=asked, output_kind=kind, max_tokens=tokens)
        limited = limit_answer_logprobs(given, vocabulary, lambda: False)
        assert limited.max_tokens == (tokens if most is None else min(tokens, most))
        assert given.max_tokens == tokens


def test_chosen_log_probs_are_counted() -> None:
    """Such a request has no `logprobs`."""
    given = SamplingParams(
        logprob_token_ids=list(range(99)),
        output_kind=RequestOutputKind.FINAL_ONLY,
        max_tokens=10**6,
    )
    limited = limit_answer_logprobs(given, lambda: 0, lambda: False)
    assert limited.max_tokens == MAX_ANSWER_LOGPROBS // 100


def test_an_answer_that_a_client_wants_longer_is_refused() -> None:
    """It would end before that without a word."""
    given = SamplingParams(
        n=2, logprobs=20, output_kind=RequestOutputKind.FINAL_ONLY, max_tokens=10**6
    )
    with pytest.raises(VLLMValidationError, match="smaller max_tokens"):
        limit_answer_logprobs(given, lambda: 0, lambda: True)
    given.max_tokens = MAX_ANSWER_LOGPROBS // 42
    assert limit_answer_logprobs(given, lambda: 0, lambda: True) is given


def test_the_copies_of_a_prompt_are_bounded() -> None:
    """EngineCore has an object for each of their tokens."""
    check_prompt_copies(128, MAX_PROMPT_COPIES_TOKENS // 128)
    with pytest.raises(VLLMValidationError, match="128 answers to a prompt"):
        check_prompt_copies(128, MAX_PROMPT_COPIES_TOKENS // 128 + 1)


def test_prompts_of_pooling_models_are_rendered_in_the_context_of_their_request() -> None:
    """In a thread, which has none of its own."""

    async def scene() -> list[str]:
        with ThreadPoolExecutor(1) as pool:
            key = io_processor.make_async(lambda: current_request().key, executor=pool)
            found = [await key()]
            for name in ("a", "b"):
                REQUEST.set(RequestContext(key=name))
                found.append(await key())
        return found

    assert asyncio.run(scene()) == ["", "a", "b"]


def responded(monkeypatch: pytest.MonkeyPatch, **given: Any) -> list[Any]:
    """The requests that vLLM answers, of one that brings this."""
    reached: list[Any] = []
    monkeypatch.setattr(
        OpenAIServingResponses, "create_responses", lambda _, request: reached.append(request)
    )
    bound_responses(safe_request_id)
    request = ResponsesRequest(model="m", input="x", **given)
    serving: Any = None
    OpenAIServingResponses.create_responses(serving, request)
    return reached


def test_the_name_of_a_response_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the ID of the response, and of what is stored of it."""
    [request] = responded(monkeypatch, request_id="x" * 100_000)
    assert request.request_id == safe_request_id("x" * 100_000)


@pytest.mark.parametrize("store", [False, "false", "off", "0", "no"])
def test_no_response_is_kept_unasked(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    """vLLM keeps each one in the background, however its `store` was read as False."""
    with pytest.raises(VLLMValidationError, match="background can only be used when") as refused:
        responded(monkeypatch, store=store, background=True)
    assert refused.value.parameter == "background"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"store": "false"},
        {"store": "false", "background": False},
        {"store": "false", "background": None},
        {"store": "true", "background": True},
        {"background": "true"},
    ],
)
def test_other_responses_reach_vllm(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    """It refuses `store` in the background itself, unless its variable allows it."""
    assert len(responded(monkeypatch, **given)) == 1


def test_a_key_names_media_of_its_own(
    monkeypatch: pytest.MonkeyPatch, context: RequestContext
) -> None:
    """vLLM takes the name for the hash of the image, in caches that all keys share."""
    chat: Any = media_names.chat_message  # type: ignore[attr-defined]  # the site
    (name,) = (one for one in media_names._PARSE if hasattr(chat, one))
    seen: list[Any] = []
    stand_in: Any = lambda part, *_, **__: seen.append(part)  # noqa: E731 - it is a value here
    monkeypatch.setattr(chat, name, stand_in)
    own_media_names()
    parse = getattr(chat, name)
    image = {"type": "image_url", "image_url": None, "uuid": "invoice-1"}
    parse(image, None)
    context.key = "b"
    parse(image, None)
    parse({"type": "text", "text": "x"}, None)
    parse("text", None)
    first, second, *others = seen
    assert {**first, "uuid": ""} == {**second, "uuid": ""} == {**image, "uuid": ""}
    assert len({first["uuid"], second["uuid"], image["uuid"]}) == len(seen) - 1
    assert first["uuid"] == own_name("invoice-1", "a")
    assert others == [{"type": "text", "text": "x"}, "text"]
