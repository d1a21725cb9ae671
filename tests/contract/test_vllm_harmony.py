"""No chat or response for gpt-oss keeps the event loop for long: the real library renders them."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import pytest
from openai_harmony import HarmonyEncoding
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers import online_renderer, renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer

from holdfast.demo.files import ensure_demo_model
from holdfast.engine.grammars.checker import GrammarChecker
from holdfast.engine.grammars.requests import check_format
from holdfast.patches.harmony import MAX_SQUARED_BYTES, bound_harmony
from holdfast.patches.tokenizer import bound_tokenizer

CONTEXT_TOKENS = 2048
LONG_CONTEXT_TOKENS = 131072
"""That of gpt-oss."""
GIANT = "hold fast " * (1 << 20)
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
RENDER = "render_conversation_for_completion"
PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hold"},
    {"role": "assistant", "content": "fast"},
    {"role": "user", "content": [{"type": "text", "text": "on"}]},
]


class Serving(OpenAIServingChatBatch):  # type: ignore[misc]  # vLLM is Any to us
    """vLLM's route for batches, without an engine."""

    def __init__(self, renderer: OnlineRenderer) -> None:
        self.online_renderer = renderer

    async def _check_model(self, _request: Any) -> None:
        """Any will do."""

    def _preflight(self) -> None:
        """There is no engine."""


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A renderer as vLLM makes it for gpt-oss, with another tokenizer, which it does not use."""
    model = ensure_demo_model(tmp_path_factory.mktemp("models"))
    arguments = EngineArgs(model=str(model), max_model_len=CONTEXT_TOKENS)
    config = arguments.create_engine_config()
    tokens = renderer_from_config(config)
    config.model_config.hf_config.model_type = "gpt_oss"
    return OnlineRenderer(
        config.model_config,
        tokens,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        tool_parser="openai",
    )


class Refusing(GrammarChecker):
    """Accepts no format."""

    def __init__(self) -> None:
        """It needs no workers."""

    async def check(self, constraint: Any) -> None:
        raise VLLMValidationError(f"refused: {constraint.grammar}")


@pytest.fixture
def renderer(stock: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Bounded, twice as two engines would."""
    sites: tuple[tuple[Any, str], ...] = (
        (online_renderer, "render_for_completion"),
        (OnlineRenderer, "render_chat"),
        (OnlineRenderer, "render_responses"),
        (OpenAIServingChatBatch, "render_batch_chat_request"),
    )
    for owner, name in sites:  # put back later
        monkeypatch.setattr(owner, name, getattr(owner, name))

    bound_tokenizer(stock.renderer)
    for _ in range(2):
        bound_harmony(stock.renderer, partial(check_format, Refusing()))
    yield stock
    stock.model_config.max_model_len = CONTEXT_TOKENS


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Those that called the native code."""
    found: list[threading.Thread] = []
    native = getattr(HarmonyEncoding, RENDER)

    def noted(*args: Any, **options: Any) -> Any:
        found.append(threading.current_thread())
        return native(*args, **options)

    monkeypatch.setattr(HarmonyEncoding, RENDER, noted)
    return found


def chat(renderer: Any, messages: Any, **options: Any) -> Coroutine[Any, Any, Any]:
    request = ChatCompletionRequest(messages=messages, **options)
    return tokens_of(renderer.render_chat(request))


def respond(renderer: Any, **options: Any) -> Coroutine[Any, Any, Any]:
    return tokens_of(renderer.render_responses(ResponsesRequest(**options)))


def batch(renderer: Any, *conversations: Any, **options: Any) -> Coroutine[Any, Any, Any]:
    request = BatchChatCompletionRequest(messages=list(conversations), **options)
    return tokens_of(Serving(renderer).render_batch_chat_request(request))


async def tokens_of(rendering: Coroutine[Any, Any, Any]) -> Any:
    """Of one prompt, or of a batch; an error stays as it is."""
    rendered = await rendering
    if isinstance(rendered, tuple):
        return [one["prompt_token_ids"] for one in rendered[-1]]
    one = getattr(rendered, "engine_input", None)
    return rendered if one is None else one["prompt_token_ids"]


def calling(name: str, arguments: str) -> list[dict[str, Any]]:
    """A conversation with a call of a tool."""
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": "hold"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]


def tools(**changed: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": TOOL | changed}]


Entry = Callable[[Any, str], Coroutine[Any, Any, Any]]
ENTRIES: dict[str, Entry] = {
    "a chat": lambda one, text: chat(one, [{"role": "user", "content": text}]),
    "parts of a chat": lambda one, text: chat(
        one, [{"role": "user", "content": [{"type": "text", "text": text}]}]
    ),
    "a system message": lambda one, text: chat(one, [{"role": "system", "content": text}]),
    "arguments of a call": lambda one, text: chat(one, calling("f", json.dumps({"a": text}))),
    "a name": lambda one, text: chat(one, calling(text, "{}")),
    "a description": lambda one, text: chat(one, PLAIN, tools=tools(description=text)),
    "a key of a schema": lambda one, text: chat(
        one, PLAIN, tools=tools(parameters={"type": "object", "properties": {text: {}}})
    ),
    "a response": lambda one, text: respond(one, input=text),
    "items of a response": lambda one, text: respond(
        one, input=[{"role": "user", "content": text}]
    ),
    "instructions": lambda one, text: respond(one, input="hold", instructions=text),
    "a batch": lambda one, text: batch(one, PLAIN, [{"role": "user", "content": text}]),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_giant_text_never_reaches_native_code(
    renderer: Any, threads: list[Any], entry: str
) -> None:
    """It is the fault of the client, whatever it is a part of."""
    with pytest.raises(VLLMValidationError, match="reduce the length"):
        asyncio.run(ENTRIES[entry](renderer, GIANT))
    assert len(threads) == (entry == "a batch")


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_text_is_rendered_in_a_thread(renderer: Any, threads: list[Any], entry: str) -> None:
    """However short it is."""
    assert asyncio.run(ENTRIES[entry](renderer, "fast"))
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_prompt_has_the_tokens_that_it_had(
    stock: Any, entry: str, request: pytest.FixtureRequest
) -> None:
    """Those of vLLM."""
    expected = asyncio.run(ENTRIES[entry](stock, "fast"))
    renderer = request.getfixturevalue("renderer")
    assert asyncio.run(ENTRIES[entry](renderer, "fast")) == expected


LONGEST = int(MAX_SQUARED_BYTES**0.5)
RUNS = {
    "letters": "x" * (2 * LONGEST),
    "marks": "x\u0301" * LONGEST,
    "signs": "(" * (2 * LONGEST),
    "spaces": " " * (2 * LONGEST),
    "lines": "\n" * (2 * LONGEST),
    "many": ("x" * (LONGEST // 4) + " ") * 32,
    # The library's Unicode does not know this letter, and takes it for a sign.
    "a letter of Unicode 17": "(\U0001df33" * LONGEST,
    "a separator that Python takes for a space": "(\x1c" * LONGEST,
}


@pytest.mark.parametrize("run", RUNS)
def test_a_run_that_takes_quadratic_time_is_refused(
    renderer: Any, threads: list[Any], run: str
) -> None:
    """Of whatever it is, in a context that has room for it."""
    renderer.model_config.max_model_len = LONG_CONTEXT_TOKENS
    with pytest.raises(VLLMValidationError, match="in a row"):
        asyncio.run(ENTRIES["a chat"](renderer, RUNS[run]))
    assert threads == []


def honest() -> dict[str, str]:
    """Long texts of many kinds, of about as many tokens as a context has."""
    bytes_of = random.Random(7).randbytes
    return {
        "words": "The quick brown fox jumps over the lazy dog. " * 2000,
        "Chinese": "敏捷的棕色狐狸跳过了那条懒狗，然后它就跑进了森林里再也没有回来。" * 1500,  # noqa: RUF001 - Chinese
        "Thai": "สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจแล้ววิ่งหนีเข้าไปในป่า " * 800,
        "base64": base64.b64encode(bytes_of(60_000)).decode(),
        "hex": bytes_of(30_000).hex(),
        "code": "    if (a[i] != NULL) { return foo(bar, &baz[3]); }\n" * 2000,
        "a table": ("name" + " " * 200 + "|" + "-" * 200 + "\n") * 200,
        "emoji": "👍 great 🎉🎉🎉\n" * 3000,
        "a gene": "ACGT" * 3000,
    }


@pytest.mark.parametrize("kind", honest())
def test_an_honest_text_is_rendered(renderer: Any, kind: str) -> None:
    """Whatever language it is in."""
    renderer.model_config.max_model_len = LONG_CONTEXT_TOKENS
    assert asyncio.run(ENTRIES["a chat"](renderer, honest()[kind]))


def test_what_a_tool_says_is_bounded_too(renderer: Any, threads: list[Any]) -> None:
    """It is rendered for the next turn of a response, past the request."""
    messages = online_renderer.parse_chat_inputs_to_harmony_messages(
        [{"role": "user", "content": GIANT}]
    )
    with pytest.raises(VLLMValidationError, match="reduce the length"):
        renderer.render_responses_harmony_messages(messages, cache_salt=None)
    assert threads == []


def test_a_panic_of_native_code_is_the_fault_of_the_text(
    renderer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No handler of an application catches what pyo3 raises."""

    class PanicException(BaseException):
        """Derived as that of pyo3, which exports no class."""

    def panic(*_args: Any, **_options: Any) -> Any:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(HarmonyEncoding, RENDER, panic)
    for entry in ("a chat", "a response", "a batch"):
        with pytest.raises(VLLMValidationError, match="cannot read"):
            asyncio.run(ENTRIES[entry](renderer, "fast"))


def test_a_name_that_cannot_be_rendered_is_the_fault_of_the_client(renderer: Any) -> None:
    """The library raises a RuntimeError, which vLLM answers with 500."""
    with pytest.raises(VLLMValidationError, match="special token"):
        asyncio.run(chat(renderer, calling("<|end|>", "{}")))


LARK = {"structured_outputs": {"grammar": "start: /((a{1000}){1000}){1000}/"}}
"""Keeps xgrammar for minutes."""


@pytest.mark.parametrize("entry", ["a chat", "a response", "a batch"])
def test_a_format_is_tried_before_a_parser_compiles_it(
    renderer: Any, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    """With tools and without: vLLM converts it in the front end."""
    is_parsed = threading.Event()
    monkeypatch.setattr(OnlineRenderer, "adjust_harmony_request", lambda *_args: is_parsed.set())
    requests: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "a chat": lambda: chat(renderer, PLAIN, **LARK),
        "a response": lambda: respond(renderer, input="hold", **LARK),
        "a batch": lambda: batch(renderer, PLAIN, **LARK),
    }
    with pytest.raises(VLLMValidationError, match="refused: start"):
        asyncio.run(requests[entry]())
    assert not is_parsed.is_set()
