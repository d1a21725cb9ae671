"""Bounds what OpenAI's Harmony library renders, which is every chat and response of gpt-oss.

vLLM 0.32 builds these prompts on the event loop, past its own renderer and tokenizer. The library's
native code holds the interpreter's lock, also in a thread, and takes time quadratic in the length
of a word or of any other run of one kind of character: minutes for a megabyte. So it gets only what
can be a prompt and has no such run. All other work on a prompt is done in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any
from unicodedata import category

import regex
from openai_harmony import HarmonyError
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.renderers import online_renderer
from vllm.renderers.online_renderer import OnlineRenderer

from holdfast.patches.patch import is_replaced, original, replace
from holdfast.patches.tokenizer import call_native, result_of

MAX_SQUARED_BYTES = 1 << 28
"""The sum of the squared lengths of all long runs: 0.12 s, and 16 KiB if it is only one."""
LONG_RUN_CHARACTERS = 128
"""The length from which a run counts. Shorter ones take no longer than the rest of a text."""
THREADS = 2
"""So a short chat does not wait for a long one."""

_UNSURE = r"\U00010000-\U0010FFFF" + "".join(
    character for character in map(chr, range(0x10000)) if category(character) == "Cn"
)
"""Characters that the library's version of Unicode may know as another kind."""
_RUNS = regex.compile(
    rf"[\p{{L}}\p{{M}}{_UNSURE}]{{{LONG_RUN_CHARACTERS},}}"
    rf"|(?:[^\p{{White_Space}}\p{{L}}\p{{N}}]|[{_UNSURE}]){{{LONG_RUN_CHARACTERS},}}"
    rf"|\p{{White_Space}}{{{LONG_RUN_CHARACTERS},}}"
)
"""The runs that the library's pattern (`o200k_harmony`) can take for one word."""

CheckFormat = Callable[[Any], Awaitable[None]]
"""Tries the output format that a request asks for, before a parser compiles it."""


def bound_harmony(renderer: Any, check_format: CheckFormat) -> None:
    """Bound what the library gets, with the tokenizer of `renderer`; idempotent."""
    if renderer.tokenizer is None or is_replaced(online_renderer, "render_for_completion"):
        return
    render_as_vllm = original(online_renderer, "render_for_completion")

    def render_for_completion(messages: list[Any]) -> Any:
        texts = list(_texts([message.to_dict() for message in messages]))
        renderer.tokenizer.holdfast_check_prompt(texts)
        _check_runs(texts)
        try:
            return call_native(render_as_vllm, messages)
        except HarmonyError as error:
            raise VLLMValidationError(
                "The messages cannot be rendered: a name in them may contain a special token.",
                parameter="messages",
            ) from error

    replace(online_renderer, "render_for_completion", render_for_completion)
    _render_in_threads(renderer, check_format)


def _render_in_threads(renderer: Any, check_format: CheckFormat) -> None:
    chat_as_vllm = original(OnlineRenderer, "render_chat")
    respond_as_vllm = original(OnlineRenderer, "render_responses")
    render_batch_as_vllm = original(OpenAIServingChatBatch, "render_batch_chat_request")
    threads = ThreadPoolExecutor(THREADS, thread_name_prefix="holdfast-harmony")

    async def render(as_vllm: Callable[..., Any], self: Any, request: Any, **options: Any) -> Any:
        if not self.use_harmony:
            return await as_vllm(self, request, **options)
        await check_format(request)

        def in_thread() -> Any:
            # vLLM writes each tool, with its schema, a dozen times into a grammar.
            tools = [tool.model_dump_json() for tool in request.tools or ()]
            renderer.tokenizer.holdfast_check_characters(tools)
            return result_of(as_vllm(self, request, **options))

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, partial(copy_context().run, in_thread))

    async def render_chat(self: Any, request: Any, **options: Any) -> Any:
        return await render(chat_as_vllm, self, request, **options)

    async def render_responses(self: Any, request: Any, **options: Any) -> Any:
        return await render(respond_as_vllm, self, request, **options)

    async def render_batch_chat_request(self: Any, request: Any) -> Any:
        if not self.online_renderer.use_harmony:
            return await render_batch_as_vllm(self, request)
        return await _render_batch(self, request)

    replace(OnlineRenderer, "render_chat", render_chat)
    replace(OnlineRenderer, "render_responses", render_responses)
    replace(OpenAIServingChatBatch, "render_batch_chat_request", render_batch_chat_request)


async def _render_batch(serving: Any, request: Any) -> Any:
    """Do what vLLM does for a batch of conversations, each of them as a chat."""
    error = await serving._check_model(request)  # noqa: SLF001 - there is no other way in
    if error is not None:
        return error
    serving._preflight()  # noqa: SLF001 - as above
    requests, conversations, prompts = [], [], []
    for messages in request.messages:
        single = request.to_chat_completion_request(messages)
        rendered = await serving.online_renderer.render_chat(single)
        if isinstance(rendered, ErrorResponse):
            return rendered
        conversation, [prompt] = rendered
        requests.append(single)
        conversations.append(conversation)
        prompts.append(prompt)
    return requests, conversations, prompts


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value, and the keys of its mappings, which are rendered, too."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            left += one.keys()
            left += one.values()
        elif isinstance(one, Sequence):
            left += one


def _check_runs(texts: list[str]) -> None:
    squared_bytes = 0
    for text in texts:
        # With `concurrent`, it does not hold the interpreter's lock.
        for run in _RUNS.finditer(text, concurrent=True):
            squared_bytes += len(run[0].encode("utf-8", "surrogatepass")) ** 2
            if squared_bytes > MAX_SQUARED_BYTES:
                raise VLLMValidationError(
                    "A text has too many letters, signs or spaces in a row: the longest word may "
                    f"have {MAX_SQUARED_BYTES**0.5:.0f} bytes. Please break it up.",
                    parameter="messages",
                )
