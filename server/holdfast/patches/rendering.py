"""Short prompts are rendered where they come in: two hand-overs to a thread cost more than they do.

vLLM hands each chat to a thread twice, for its template and for its tokens (`BaseRenderer`, 0.32).
Under load the thread has to wait for the interpreter each time, for up to a switch interval, and
the loop for it: a tenth of the time to the first token at 16 clients. What could keep the loop
for long is handed over as before: long prompts, many at once, templates and values of a client.
What is very long is handed to a thread of its own, or everybody would wait for it.

It also makes a task of each step, to run those of several prompts side by side. A request with one
prompt, as nearly all are, waits through twelve turns of the loop for that, while the engine waits
for the request: its steps are awaited one after the other.
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

LONGEST_CHARACTERS = 2048
"""Of one prompt, or of one chat: tokenized in a millisecond, or three of rare characters."""
MOST_MESSAGES = 16
CHARACTERS_A_TURN = 8 * LONGEST_CHARACTERS
"""Of all that is rendered within one turn of the loop."""
LONG_CHARACTERS = 64 * 1024
"""Of all prompts of a request: from here on they keep a thread for too long for others to wait."""

_MARK = "holdfast_turn"
_IS_LONG: ContextVar[bool] = ContextVar("is_long", default=False)
"""Whether all prompts of the request together are very long, though none may be."""


def render_short_prompts_at_once(renderer: Any, *, trusts_templates: bool) -> None:
    """Have a renderer of Hugging Face tokenizers do so; calling it again changes nothing.

    Its tokenizer lends each thread a copy, so that the loop may be one of them.
    `trusts_templates` says that a client may send a template, which nothing bounds.
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
        if _are_plain(options) and turn.takes(_characters(conversation)):
            return _Rendered(hf.safe_apply_chat_template(model, tokenizer, conversation, **options))
        return apply_elsewhere(model, tokenizer, conversation, **options)

    async def within_time(prompt: _Rendered | Awaitable[Any]) -> Any:
        return prompt.prompt if isinstance(prompt, _Rendered) else await bounded(prompt)

    renderer._tokenize_prompt_async = tokenize  # noqa: SLF001 - as above
    if not trusts_templates:
        renderer._apply_chat_template_async = apply  # noqa: SLF001 - as above
        renderer._render_with_timeout = within_time  # noqa: SLF001 - as above


def _give_long_prompts_a_thread(renderer: Any) -> None:
    """Have what is very long wait for its like alone."""
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
    """Have vLLM's renderers await a single step as it is; calling it again changes nothing."""
    base.asyncio = SimpleNamespace(**{**vars(asyncio), "gather": _gather})


async def _gather(*steps: Awaitable[Any]) -> list[Any]:
    """What `asyncio.gather` returns."""
    if len(steps) == 1:
        return [await steps[0]]
    return await asyncio.gather(*steps)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A prompt that is there already, for which no timer needs to run."""

    prompt: Any


class _Turn:
    """What was rendered since the loop last looked at anything else."""

    def __init__(self) -> None:
        self._characters = 0

    def takes(self, characters: int) -> bool:
        """Whether so many more may be rendered now; then they count."""
        if characters > LONGEST_CHARACTERS or self._characters > CHARACTERS_A_TURN:
            return False
        if not self._characters:
            asyncio.get_running_loop().call_soon(self._begin)
        self._characters += characters or 1
        return True

    def _begin(self) -> None:
        self._characters = 0


def _are_plain(options: Mapping[str, Any]) -> bool:
    """Whether no template can be kept busy by a value: no tools, no documents, no number."""
    return all(value is None or isinstance(value, bool | str) for value in options.values())


def _characters(conversation: Sequence[Mapping[str, Any]]) -> int:
    """The text of all messages; more than is taken, where it is not text alone, or many."""
    if len(conversation) > MOST_MESSAGES:
        return LONGEST_CHARACTERS + 1
    characters = 0
    for message in conversation:
        # Whatever else it has, such as calls of tools, may be of any size, and kept in a loop.
        is_plain = message.keys() <= {"role", "content"}
        if not is_plain or not all(isinstance(text, str) for text in message.values()):
            return LONGEST_CHARACTERS + 1
        characters += sum(map(len, message.values()))
    return characters
