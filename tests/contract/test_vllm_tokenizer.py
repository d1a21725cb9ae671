"""No text keeps vLLM's tokenizer for long, whatever route it comes by."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.generate.generative_scoring.serving import ServingGenerativeScoring
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers import renderer_from_config
from vllm.renderers.params import ChatParams, TokenizeParams
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

import tiny_models
from holdfast.demo.files import ensure_demo_model
from holdfast.engine.launch.arguments import make_arg_parser
from holdfast.engine.model.facts import renders_chats
from holdfast.patches.parameters import bound_parameters
from holdfast.patches.rendering import LONG_CHARACTERS, render_short_prompts_at_once
from holdfast.patches.tokenizer import (
    CONTEXTS_PER_TEXT,
    LOOP_CHARACTERS,
    MAX_COPIED_TOKENS,
    bound_tokenizer,
    bound_tool_calls,
    score_in_a_thread,
)

CONTEXT_TOKENS = 2048
MOST_ITEMS = 2048
OWN_MODES = ("hf", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k3", "mistral")
"""Those whose files we have, which Kimi-Audio and Inkling want, or whose package (Cohere)."""
DEADLINE_SECONDS = 60
GIANT = "x" * (8 << 20)
"""Some 8 s, and a GiB, to a tokenizer that takes it as it is."""
GIANT_CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "f", "arguments": json.dumps({"a": GIANT})},
}


def made(tmp_path_factory: pytest.TempPathFactory, tokenizer_mode: Any = "auto") -> Any:
    """A renderer as vLLM makes it."""
    make = tiny_models.make_mixtral if tokenizer_mode == "mistral" else ensure_demo_model
    model = make(tmp_path_factory.mktemp("models") / "model")
    arguments = EngineArgs(
        model=str(model), max_model_len=CONTEXT_TOKENS, tokenizer_mode=tokenizer_mode
    )
    return renderer_from_config(arguments.create_engine_config())


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Without a bound."""
    return made(tmp_path_factory)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With them, applied twice as two engines would."""
    renderer = made(tmp_path_factory)
    name = type(renderer.tokenizer).__name__
    bound_tokenizer(renderer)
    bound_tokenizer(renderer)
    bound_tool_calls(renderer)
    bound_tool_calls(renderer)
    bound_parameters()
    bound_parameters()
    score_in_a_thread(MOST_ITEMS)
    score_in_a_thread(MOST_ITEMS)
    assert type(renderer.tokenizer).__name__ == name
    return renderer


async def tokenized(renderer: Any, text: str, parameters: TokenizeParams) -> list[int]:
    """The tokens of one prompt, as all routes that generate come by them."""
    prompt = await renderer.tokenize_prompt_async({"prompt": text}, parameters)
    return list(prompt["prompt_token_ids"])


def limited(**options: Any) -> TokenizeParams:
    """What routes that generate ask for."""
    return TokenizeParams(max_total_tokens=CONTEXT_TOKENS, **options)


def unlimited(renderer: Any) -> TokenizeParams:
    """What `/tokenize` asks for."""
    request = TokenizeCompletionRequest(prompt="")
    return request.build_tok_params(renderer.model_config)


ENTRIES: dict[str, Callable[[Any], Coroutine[Any, Any, Any]]] = {
    "/tokenize": lambda one: tokenized(one, GIANT, unlimited(one)),
    "a completion": lambda one: tokenized(one, GIANT, limited()),
    "a chat": lambda one: one.render_chat_async(
        [[{"role": "user", "content": GIANT}]], ChatParams(), limited()
    ),
    "calls of tools in a chat": lambda one: one.render_chat_async(
        [[{"role": "assistant", "content": "", "tool_calls": [GIANT_CALL]}]],
        ChatParams(),
        limited(),
    ),
    "a template that tokenizes": lambda one: asyncio.to_thread(
        one.tokenizer.apply_chat_template, [{"role": "user", "content": GIANT}], tokenize=True
    ),
    "the first of a pair": lambda one: asyncio.to_thread(one.tokenizer, text=GIANT, text_pair="a"),
    "the second of a pair": lambda one: asyncio.to_thread(one.tokenizer, text="a", text_pair=GIANT),
    "one of several": lambda one: asyncio.to_thread(one.tokenizer, ["a", GIANT]),
    "a score": lambda one: asyncio.to_thread(one.tokenizer.encode, GIANT, add_special_tokens=False),
    "/detokenize": lambda one: one.tokenize_prompt_async(
        {"prompt_token_ids": [1] * (CONTEXTS_PER_TEXT * CONTEXT_TOKENS + 1)},
        DetokenizeRequest(tokens=[]).build_tok_params(one.model_config),
    ),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_giant_text_is_the_fault_of_the_client(renderer: Any, entry: str) -> None:
    """It is refused before the tokenizer has it, at every entry to it."""
    with pytest.raises(VLLMValidationError):
        asyncio.run(ENTRIES[entry](renderer))


def test_no_tensor_of_a_client_is_unpickled_by_default(renderer: Any) -> None:
    """Not even decoded: the operator has to say so (`--enable-prompt-embeds`)."""
    with pytest.raises(VLLMValidationError, match="--enable-prompt-embeds"):
        asyncio.run(renderer.render_prompts_async([b"not base64 at all"]))


def test_a_template_of_a_client_is_refused_by_default() -> None:
    """It could keep a thread busy without end: the operator has to allow it."""
    parser = make_arg_parser(FlexibleArgumentParser())
    assert parser.parse_args(["--model", "m"]).trust_request_chat_template is False


DEEP, WIDE = "[" * 100_000, json.dumps([{}] * (1 << 20))


@pytest.mark.parametrize("arguments", [DEEP, WIDE], ids=["deep", "wide"])
def test_arguments_of_a_tool_are_bounded_before_they_are_read(
    renderer: Any, arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are JSON within JSON, which the bounds of a body do not see."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    if arguments is DEEP:  # in a model that could take as many tokens
        monkeypatch.setattr(renderer.model_config, "max_model_len", 1 << 20)
    with pytest.raises(VLLMValidationError):
        asyncio.run(
            renderer.render_chat_async(
                [[{"role": "assistant", "content": "", "tool_calls": [call]}]],
                ChatParams(),
                TokenizeParams(max_total_tokens=None),
            )
        )


@pytest.mark.usefixtures("renderer")
def test_bad_words_are_refused_before_they_are_tokenized() -> None:
    """vLLM tokenizes them on the loop, and counts afterwards."""
    seen: list[str] = []

    class Seeing:
        """A tokenizer that notes what it is given."""

        max_token_id = 10

        def encode(self, text: str, **_options: Any) -> list[int]:
            """One token."""
            seen.append(text)
            return [1]

    with pytest.raises(VLLMValidationError):
        SamplingParams(bad_words=["ok", GIANT]).update_from_tokenizer(Seeing())
    assert not seen
    SamplingParams(bad_words=["ok"]).update_from_tokenizer(Seeing())
    assert seen


def test_on_the_loop_less_is_taken_than_in_a_thread(renderer: Any) -> None:
    """What vLLM tokenizes there keeps everybody."""
    renderer.model_config.max_model_len *= 16
    text = "x" * (LOOP_CHARACTERS + 1)

    async def on_the_loop() -> Any:
        return renderer.tokenizer(text)

    try:
        with pytest.raises(VLLMValidationError):
            asyncio.run(on_the_loop())
        assert len(renderer.tokenizer(text)["input_ids"]) >= len(text)
    finally:
        renderer.model_config.max_model_len = CONTEXT_TOKENS


def test_texts_to_score_are_tokenized_in_a_thread() -> None:
    """vLLM does so on the loop, for as many as a body has."""
    threads: list[threading.Thread] = []

    class Seeing:
        """A tokenizer that notes who calls it."""

        def encode(self, _text: str, **_options: Any) -> list[int]:
            """One token."""
            threads.append(threading.current_thread())
            return [7]

    class Request:
        """A request to score two texts."""

        query, items, item_first = "hold", ["fast", "on"], False
        add_special_tokens, cache_salt = True, None

    score_in_a_thread(MOST_ITEMS)
    serving = object.__new__(ServingGenerativeScoring)
    prompts, counts = asyncio.run(serving._build_prompts(Request(), Seeing(), 100))
    assert (len(prompts), counts) == (2, [2, 2])
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("query", "items", "allowed"),
    [("a", 2049, 2048), ("a " * MAX_COPIED_TOKENS, 2, 1), ([1] * (MAX_COPIED_TOKENS // 4), 5, 4)],
)
def test_texts_to_score_are_counted_before_the_query_is_copied(
    query: Any, items: int, allowed: int
) -> None:
    """vLLM copies it for each of them."""
    score_in_a_thread(MOST_ITEMS)
    serving = object.__new__(ServingGenerativeScoring)
    request: Any = SimpleNamespace(query=query, items=["a"] * items)
    with pytest.raises(VLLMValidationError, match=f"at most {allowed} are allowed"):
        asyncio.run(serving._build_prompts(request, None, 100))


@pytest.mark.parametrize("characters", [0, 5, CONTEXT_TOKENS - 2, 3 * CONTEXT_TOKENS])
def test_what_may_be_a_prompt_has_the_tokens_that_it_had(
    renderer: Any, stock: Any, characters: int
) -> None:
    """Counted in pieces or not."""
    text = ("hold fast " * characters)[:characters]
    parameters = unlimited(stock)
    ours = asyncio.run(tokenized(renderer, text, parameters))
    assert ours == asyncio.run(tokenized(stock, text, parameters))


@pytest.mark.parametrize("mode", OWN_MODES)
def test_a_chat_has_the_tokens_that_it_had(
    tmp_path_factory: pytest.TempPathFactory, mode: str
) -> None:
    """Whatever tokenizer of vLLM's it is, and a giant chat is refused."""
    renderer = made(tmp_path_factory, mode)
    chat = [{"role": "user", "content": "hold fast"}]

    def tokens(messages: list[Any]) -> list[int]:
        rendering = renderer.render_chat_async([messages], ChatParams(), limited())
        _, [prompt] = asyncio.run(rendering)
        return list(prompt["prompt_token_ids"])

    as_vllm = tokens(chat)
    bound_tokenizer(renderer)
    assert tokens(chat) == as_vllm
    assert renders_chats(renderer)
    with pytest.raises(VLLMValidationError):
        tokens([{"role": "user", "content": GIANT}])


@pytest.mark.parametrize("side", ["left", "right", None])
@pytest.mark.parametrize("kept", [1, 100, CONTEXT_TOKENS - 1])
def test_what_is_truncated_has_the_tokens_that_it_had(
    renderer: Any, stock: Any, side: Any, kept: int
) -> None:
    """Though only the part that is kept is looked at."""
    text = "".join(f"line {number}\n" for number in range(800))
    parameters = limited(truncate_prompt_tokens=kept, truncation_side=side)
    ours = asyncio.run(tokenized(renderer, text, parameters))
    assert ours == asyncio.run(tokenized(stock, text, parameters))
    assert len(ours) == kept


def test_of_what_is_truncated_the_rest_is_not_tokenized(renderer: Any) -> None:
    """A giant text that is cut costs what the kept part costs."""
    kept = asyncio.run(tokenized(renderer, GIANT, limited(truncate_prompt_tokens=10)))
    assert len(kept) == 10


def test_a_panic_of_native_code_is_the_fault_of_the_text(renderer: Any) -> None:
    """It is derived from BaseException, which no handler of an application catches."""

    class PanicException(BaseException):
        """What pyo3 raises, which exports no class."""

    class Panicking:
        """A tokenizer that does."""

        max_chars_per_token = 4

        def __call__(self, _text: str, **_options: Any) -> Any:
            """Never returns."""
            raise PanicException("index out of bounds")

        def encode(self, text: str) -> Any:
            """As above."""
            return self(text)

    class Renderer:
        """Lends it."""

        model_config = renderer.model_config

        def __init__(self) -> None:
            self.tokenizer: Any = Panicking()

    made = Renderer()
    bound_tokenizer(made)
    for call in (made.tokenizer, made.tokenizer.encode):
        with pytest.raises(VLLMValidationError, match="cannot read"):
            call("text")


@pytest.mark.parametrize(
    "prompts", [["x" * (LONG_CHARACTERS + 1)], ["x" * LONG_CHARACTERS] * 2], ids=["long", "many"]
)
def test_a_short_prompt_does_not_wait_for_a_long_request(stock: Any, prompts: list[str]) -> None:
    """While one is tokenized, others are, and chats are rendered."""
    stock.model_config.max_model_len = 1 << 20
    render_short_prompts_at_once(stock, trusts_templates=True)
    is_free, is_taken = threading.Event(), threading.Event()
    original = type(stock.tokenizer).__call__

    def waiting(self: Any, text: Any, *args: Any, **options: Any) -> Any:
        if text in prompts:
            is_taken.set()
            assert is_free.wait(DEADLINE_SECONDS)
        return original(self, text, *args, **options)

    async def both() -> list[int]:
        given = [{"prompt": prompt} for prompt in prompts]
        first = asyncio.create_task(stock.tokenize_prompts_async(given, unlimited(stock)))
        await asyncio.to_thread(is_taken.wait, DEADLINE_SECONDS)
        async with asyncio.timeout(DEADLINE_SECONDS):
            [short] = await stock.tokenize_prompts_async(
                [{"prompt": "y" * LONG_CHARACTERS}], unlimited(stock)
            )
        is_free.set()
        await first
        return list(short["prompt_token_ids"])

    type(stock.tokenizer).__call__ = waiting
    try:
        assert len(asyncio.run(both())) >= LONG_CHARACTERS
    finally:
        is_free.set()
        type(stock.tokenizer).__call__ = original
        stock.model_config.max_model_len = CONTEXT_TOKENS
