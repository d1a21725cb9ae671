"""Bounds the texts that vLLM's front end tokenizes, whatever route they come by.

vLLM 0.32 counts the characters of a prompt before it tokenizes it, but not everywhere: `/tokenize`,
`bad_words`, scores and truncated inputs reach the tokenizer unchecked. A text of 30 MB takes it
90 s and 8 GB. So the tokenizer itself has the bound: it refuses a text that cannot be a prompt, and
cuts a text that will be truncated, before it tokenizes.

The number of tokens of a text is known only once it is tokenized. A long text is counted in pieces,
and only up to the bound, so it costs at most twice as much as the longest prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from vllm.entrypoints.generate.generative_scoring.serving import ServingGenerativeScoring
from vllm.exceptions import VLLMValidationError

from holdfast.patches.patch import is_replaced, original, replace

try:
    from vllm.renderers.chat_utils import chat_message
except ImportError:  # one module in 0.32
    from vllm.renderers import chat_utils as chat_message

CONTEXTS_PER_TEXT = 4
"""How many contexts long a text may be: clients ask by how much a text is too long."""
CHARACTERS_PER_TOKEN = 32
"""More than any text has on average, although tokenizers have single tokens of 128 spaces."""
PIECE_CHARACTERS = 16 * 1024
LOOP_CHARACTERS = 64 * 1024
"""The longest text to tokenize on the event loop, which takes 60 ms at worst."""

MAX_COPIED_TOKENS = 1 << 24
"""Tokens of a query in all copies for its items, of 8 bytes each."""
CHARACTERS_PER_COPIED_TOKEN = 2
"""Fewer than most texts have."""

_BORDER_TOKENS = 128
"""How many tokens more than the whole two pieces may have, because a word was cut."""
_MARGIN = 1.25
_MEDIA_KINDS = ("image", "audio", "video", "input_image", "input_audio", "input_video")
_MEDIA_KINDS_END = ("_url", "_embeds")


def bound_tokenizer(renderer: Any) -> None:
    """Bound the tokenizer of `renderer`, which all of the front end uses; idempotent."""
    tokenizer = renderer.tokenizer
    if tokenizer is None or hasattr(tokenizer, "holdfast_bounds"):
        return
    kind = type(tokenizer)
    methods = {name: value for name, value in vars(_Bounded).items() if callable(value)}
    # `_Bounded` is not a base: with a second one, a class that implements a protocol, as that of
    # Mistral's tokenizer, has another layout, which no object can change to. The name stays, since
    # `/tokenizer_info` reports it.
    bounded: Any = type(kind.__name__, (kind,), methods)
    bounded.holdfast_class = bounded
    tokenizer.__class__ = bounded
    tokenizer.holdfast_bounds = _Bounds(
        lambda: int(renderer.model_config.max_model_len), int(tokenizer.max_chars_per_token)
    )


def bound_tool_calls(renderer: Any) -> None:
    """Refuse arguments of tool calls that are too long for a prompt; idempotent.

    vLLM 0.32 parses them, JSON within the JSON of a chat, on the event loop.
    """
    if renderer.tokenizer is None or is_replaced(chat_message, "_postprocess_messages"):
        return
    as_vllm = original(chat_message, "_postprocess_messages")

    def postprocess_messages(messages: list[Any]) -> None:
        most = renderer.tokenizer.holdfast_bounds.max_characters
        if has_more_text_than(most, [messages]):
            raise _refused(f"{most} characters", "in one chat")
        try:
            as_vllm(messages)
        except RecursionError as error:
            raise VLLMValidationError(
                "The arguments of a tool call are nested too deeply.", parameter="tool_calls"
            ) from error

    replace(chat_message, "_postprocess_messages", postprocess_messages)


def score_in_a_thread(most: float) -> None:
    """Tokenize the texts of `/generative_scoring` in a thread; idempotent.

    vLLM 0.32 tokenizes them in a coroutine that never awaits, which blocks the event loop. It also
    copies the query for each item before it counts them: 2 MB of items take 100 GB. So more items
    than `most` are refused, and fewer if the query is long.
    """
    as_vllm = original(ServingGenerativeScoring, "_build_prompts")

    async def build_prompts(self: Any, request: Any, *args: Any, **options: Any) -> Any:
        tokens = len(request.query)
        if isinstance(request.query, str):
            tokens //= CHARACTERS_PER_COPIED_TOKEN
        allowed = min(most, MAX_COPIED_TOKENS // max(1, tokens))
        if len(request.items) > allowed:
            raise VLLMValidationError(
                f"The request has {len(request.items)} items; with a query of this length, at most "
                f"{allowed:g} are allowed.",
                parameter="items",
            )
        return await asyncio.to_thread(lambda: result_of(as_vllm(self, request, *args, **options)))

    replace(ServingGenerativeScoring, "_build_prompts", build_prompts)


def result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never awaits."""
    try:
        coroutine.send(None)
    except StopIteration as returned:
        return returned.value
    raise RuntimeError("vLLM awaits something where it builds prompts: do not use a thread")


def characters_in(values: list[Any]) -> int:
    """Return how many characters all texts in `values` have."""
    return sum(len(value) for value in _parts(values) if isinstance(value, str))


def has_more_text_than(characters: int, values: list[Any]) -> bool:
    """Whether all texts in `values` have more characters; stops counting as soon as it is sure."""
    for value in _parts(values):
        characters -= len(value) if isinstance(value, str) else 1
        if characters < 0:
            return True
    return False


class _Bounds:
    """The current bounds of a text: the context may be limited to the length that is proven."""

    def __init__(self, context_tokens: Callable[[], int], characters_per_token: int) -> None:
        self._context_tokens = context_tokens
        self._characters_per_token = min(characters_per_token, CHARACTERS_PER_TOKEN)

    @property
    def context_tokens(self) -> int:
        return self._context_tokens()

    @property
    def max_tokens(self) -> int:
        return CONTEXTS_PER_TEXT * self.context_tokens

    @property
    def max_characters(self) -> int:
        return self.context_tokens * self._characters_per_token

    def is_short(self, text: str) -> bool:
        """Whether a text needs no count: it has at most 4 tokens per character."""
        return len(text) <= self.context_tokens

    @staticmethod
    def check_loop(text: str) -> None:
        """Refuse a text that would block the event loop, if this is the loop's thread."""
        if len(text) > LOOP_CHARACTERS and asyncio._get_running_loop() is not None:  # noqa: SLF001 - public, but named so
            raise _refused(f"{LOOP_CHARACTERS} characters", "in one parameter")


class _Bounded:
    """The methods of a subclass of a tokenizer's class: they pass on what is within the bounds."""

    holdfast_bounds: _Bounds
    holdfast_class: type
    """The subclass."""

    def __call__(self, text: Any = None, text_pair: Any = None, **options: Any) -> Any:
        tokenize = partial(self._as_vllm, "__call__", **options)
        kept = options.get("max_length") if options.get("truncation") else None
        # Offsets of tokens count from the left, so the left must not be cut off then.
        if kept is None or (options.get("return_offsets_mapping") and self._cuts_left()):
            return tokenize(*_present(self._checked(text), self._checked(text_pair)))
        cut = (self._cut(text, kept), self._cut(text_pair, kept))
        tokens = tokenize(*_present(*cut))
        if cut != (text, text_pair) and len(tokens["input_ids"]) < kept:
            return tokenize(*_present(self._checked(text), self._checked(text_pair)))
        return tokens

    def encode(self, text: Any, *args: Any, **options: Any) -> Any:
        return self._as_vllm("encode", self._checked(text), *args, **options)

    def decode(self, token_ids: Any, *args: Any, **options: Any) -> Any:
        most = self.holdfast_bounds.max_tokens
        if isinstance(token_ids, Sequence) and len(token_ids) > most:
            raise _refused(f"{most} tokens", "to decode")
        return self._as_vllm("decode", token_ids, *args, **options)

    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        # Hugging Face names the chat `conversation`, tokenizers of vLLM's own name it `messages`,
        # and the renderers of DeepSeek give it to them under both names (`tokenizers.deepseek_v4`).
        chat = args[0] if args else options.get("conversation", options.get("messages"))
        given = [chat, options.get("tools"), options.get("documents")]
        texts = [value for value in _parts(given) if isinstance(value, str)]
        self.holdfast_check_characters(texts)
        if options.get("tokenize", True):
            self._checked("".join(texts))
        return self._as_vllm("apply_chat_template", *args, **options)

    def holdfast_check_prompt(self, texts: list[str]) -> None:
        """Refuse texts that together are too long for a prompt, without tokenizing all of them."""
        self.holdfast_check_characters(texts)
        whole, most = "".join(texts), self.holdfast_bounds.context_tokens
        if len(whole) > most and self._characters_of(whole, most) < len(whole):
            raise _refused(f"{most} tokens", "in one chat")

    def holdfast_check_characters(self, texts: list[str]) -> None:
        """Refuse texts that together have too many characters for a prompt."""
        if sum(map(len, texts)) > (most := self.holdfast_bounds.max_characters):
            raise _refused(f"{most} characters", "in one chat")

    def _as_vllm(self, method: str, *args: Any, **options: Any) -> Any:
        return call_native(getattr(super(self.holdfast_class, self), method), *args, **options)

    def _cuts_left(self) -> bool:
        return getattr(self, "truncation_side", "right") == "left"

    def _checked(self, text: Any) -> Any:
        """Return a text, or several, unchanged.

        Raises:
            VLLMValidationError: one is too long.
        """
        for one in text if isinstance(text, list) else [text]:
            if isinstance(one, str):
                self._check(one)
        return text

    def _check(self, text: str) -> None:
        bounds = self.holdfast_bounds
        if not bounds.is_short(text):
            if len(text) > bounds.max_characters:
                raise _refused(f"{bounds.max_characters} characters", "in one text")
            if self._characters_of(text, bounds.max_tokens) < len(text):
                raise _refused(f"{bounds.max_tokens} tokens", "in one text")
        bounds.check_loop(text)

    def _cut(self, text: Any, tokens: int) -> Any:
        """Return a part of a text with more than this many tokens, from the side that is kept."""
        bounds = self.holdfast_bounds
        if not isinstance(text, str) or bounds.is_short(text):
            return self._checked(text)
        bounds.check_loop(text)
        is_left = self._cuts_left()
        most = bounds.max_characters
        part = text[-most:] if is_left else text[:most]
        characters = self._characters_of(part, tokens, is_from_right=is_left)
        if characters == len(part) < len(text):
            raise _refused(f"{most} characters", "in one text")
        return part[-characters:] if is_left else part[:characters]

    def _characters_of(self, text: str, tokens: int, *, is_from_right: bool = False) -> int:
        """Return a number of characters that surely have more tokens; at most all of them."""
        counted, characters = 0, 0
        for piece in _pieces(text, is_from_right=is_from_right):
            found = self._as_vllm("__call__", piece, add_special_tokens=False)
            counted += max(0, len(found["input_ids"]) - _BORDER_TOKENS)
            characters += len(piece)
            if counted > tokens * _MARGIN:
                break
        return characters


def _parts(values: list[Any]) -> Iterator[Any]:
    """Yield every nested value except media, which are not in the prompt."""
    while values:
        value = values.pop()
        yield value
        if isinstance(value, Mapping):
            kind = str(value.get("type", ""))
            if not kind.startswith(_MEDIA_KINDS) and not kind.endswith(_MEDIA_KINDS_END):
                values.extend(value.values())
        elif isinstance(value, Sequence) and not isinstance(value, str):
            values.extend(value)


def _pieces(text: str, *, is_from_right: bool) -> Iterator[str]:
    for start in range(0, len(text), PIECE_CHARACTERS):
        if is_from_right:
            end = len(text) - start
            yield text[max(0, end - PIECE_CHARACTERS) : end]
        else:
            yield text[start : start + PIECE_CHARACTERS]


def _present(*texts: Any) -> tuple[Any, ...]:
    """Drop the second text of a pair if it is None."""
    return texts if texts[1] is not None else texts[:1]


def call_native(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the function's result; report a panic of native code as the text's fault.

    pyo3 derives PanicException from BaseException and does not export it:
    https://docs.rs/pyo3/latest/pyo3/panic/struct.PanicException.html
    """
    try:
        return function(*args, **options)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise VLLMValidationError(
            "The tokenizer cannot read this text.", parameter="input_text"
        ) from error


def _refused(most: str, where: str) -> VLLMValidationError:
    return VLLMValidationError(
        f"The input has more than {most} {where}, the most that this model accepts. Please "
        "reduce the length of the input.",
        parameter="input_text",
    )
