"""Renders short prompts on the event loop: handing them to a thread costs more than the work.

vLLM hands each chat to a thread twice, for its template and for its tokens (`BaseRenderer`, 0.32).
Under load the thread waits for the interpreter's lock each time, for up to a switch interval, and
the loop waits for the thread: a tenth of the time to first token at 16 clients. Whatever could
block the loop still goes to a thread: long prompts, many at once, and a client's templates and
values. Very long prompts have a thread of their own, so that others do not wait for them.

vLLM also makes each step a task, to run the steps of several prompts concurrently. Nearly all
requests have one prompt, and such a request spends twelve iterations of the loop on that while the
engine waits, so its steps are awaited one after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.renderers import base, hf
from vllm.utils.async_utils import make_async

from holdfast.patches.tokenizer import has_more_text_than

MAX_CHARACTERS = 2048
"""The longest prompt or chat to render on the loop: 1 ms of tokenizing, 3 ms if it is exotic."""
MAX_MESSAGES = 16
CHARACTERS_PER_TURN = 8 * MAX_CHARACTERS
"""The most text to render in one iteration of the loop."""
LONG_CHARACTERS = 64 * 1024
"""The text of a request's prompts from which they occupy a thread for too long to share it."""

_MARK = "holdfast_turn"
_IS_LONG: ContextVar[bool] = ContextVar("is_long", default=False)
"""Whether the prompts of the request are very long together, even if none is."""


def render_short_prompts_at_once(
    renderer: Any, *, trusts_templates: bool, own_template: str | None = None
) -> None:
    """Make a Hugging Face renderer do so; idempotent.

    Its tokenizer lends each thread a copy, so the loop's thread can use one too. With
    `trusts_templates`, clients may send templates, which nothing bounds, so chats go to a thread,
    as does any other template than that of the model or `own_template`.
    """
    if not isinstance(renderer, hf.HfRenderer) or hasattr(renderer, _MARK):
        return
    turn = _Turn()
    setattr(renderer, _MARK, turn)
    _give_long_prompts_a_thread(renderer)
    tokenize_elsewhere = renderer._tokenize_prompt_async  # noqa: SLF001 - there is no other way in
    apply_elsewhere = renderer._apply_chat_template_async  # noqa: SLF001 - as above
    bounded = renderer._render_with_timeout  # noqa: SLF001 - as above

    async def tokenize(prompt: Any, parameters: Any) -> Any:
        if turn.takes(len(prompt["prompt"])):
            return renderer._tokenize_prompt(prompt, parameters)  # noqa: SLF001 - as above
        return await tokenize_elsewhere(prompt, parameters)

    def apply(model: Any, tokenizer: Any, conversation: Any, **options: Any) -> Any:
        is_own = options.get("chat_template") in (None, own_template)  # a client may send a list
        if is_own and _are_plain(options) and turn.takes(_characters(conversation)):
            return _Rendered(hf.safe_apply_chat_template(model, tokenizer, conversation, **options))
        return apply_elsewhere(model, tokenizer, conversation, **options)

    async def within_time(prompt: _Rendered | Awaitable[Any]) -> Any:
        return prompt.prompt if isinstance(prompt, _Rendered) else await bounded(prompt)

    renderer._tokenize_prompt_async = tokenize  # noqa: SLF001 - as above
    if not trusts_templates:
        renderer._apply_chat_template_async = apply  # noqa: SLF001 - as above
        renderer._render_with_timeout = within_time  # noqa: SLF001 - as above


def _give_long_prompts_a_thread(renderer: Any) -> None:
    """Give very long prompts a thread of their own, in which they wait only for each other."""
    tokenize_among_others = renderer._tokenize_prompt_async  # noqa: SLF001 - there is no other way in
    tokenize_one_by_one = renderer.tokenize_prompts_async
    apply_among_others = renderer._apply_chat_template_async  # noqa: SLF001 - as above
    replace_among_others = renderer._replace_executor  # noqa: SLF001 - as above
    thread = base._SwappableExecutor(max_workers=1)  # noqa: SLF001 - vLLM replaces a stuck thread of it
    tokenize_alone = make_async(renderer._tokenize_prompt, executor=thread)  # noqa: SLF001 - as above
    apply_alone = make_async(hf.safe_apply_chat_template, executor=thread)

    async def tokenize_all(prompts: Sequence[Any], parameters: Any) -> Any:
        texts = [one["prompt"] for one in prompts if isinstance(one.get("prompt"), str)]
        is_long = _IS_LONG.set(sum(map(len, texts)) > LONG_CHARACTERS)
        try:
            return await tokenize_one_by_one(prompts, parameters)
        finally:
            _IS_LONG.reset(is_long)

    def tokenize(prompt: Any, parameters: Any) -> Any:
        is_long = _IS_LONG.get() or len(prompt["prompt"]) > LONG_CHARACTERS
        return (tokenize_alone if is_long else tokenize_among_others)(prompt, parameters)

    def apply(model: Any, tokenizer: Any, conversation: Any, **options: Any) -> Any:
        is_long = has_more_text_than(LONG_CHARACTERS, [conversation, options.get("tools")])
        chosen = apply_alone if is_long else apply_among_others
        return chosen(model, tokenizer, conversation, **options)

    def replace() -> None:
        replace_among_others()
        thread.replace_inner()

    renderer.tokenize_prompts_async = tokenize_all
    renderer._tokenize_prompt_async = tokenize  # noqa: SLF001 - as above
    renderer._apply_chat_template_async = apply  # noqa: SLF001 - as above
    renderer._replace_executor = replace  # noqa: SLF001 - as above


def await_one_without_a_task() -> None:
    """Make vLLM's renderers await a single step directly; idempotent."""
    base.asyncio = SimpleNamespace(**{**vars(asyncio), "gather": _gather})


async def _gather(*steps: Awaitable[Any]) -> list[Any]:
    """Return what `asyncio.gather` returns."""
    if len(steps) == 1:
        return [await steps[0]]
    return await asyncio.gather(*steps)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A prompt that is rendered already, so that it needs no timeout."""

    prompt: Any


class _Turn:
    """Counts what was rendered in this iteration of the loop."""

    def __init__(self) -> None:
        self._characters = 0

    def takes(self, characters: int) -> bool:
        """Whether this many characters may be rendered now; if so, count them."""
        if characters > MAX_CHARACTERS or self._characters > CHARACTERS_PER_TURN:
            return False
        if not self._characters:
            asyncio.get_running_loop().call_soon(self._begin)
        self._characters += characters or 1
        return True

    def _begin(self) -> None:
        self._characters = 0


def _are_plain(options: Mapping[str, Any]) -> bool:
    """Whether no option can keep a template busy: no tools, no documents, no numbers."""
    return all(value is None or isinstance(value, bool | str) for value in options.values())


def _characters(conversation: Sequence[Mapping[str, Any]]) -> int:
    """Count the text of all messages; return too many for the loop unless all are plain text."""
    if len(conversation) > MAX_MESSAGES:
        return MAX_CHARACTERS + 1
    characters = 0
    for message in conversation:
        # Anything else, such as tool calls, may have any size and keep a template's loop busy.
        is_plain = message.keys() <= {"role", "content"}
        if not is_plain or not all(isinstance(text, str) for text in message.values()):
            return MAX_CHARACTERS + 1
        characters += sum(map(len, message.values()))
    return characters
