"""What is rendered on the loop, and what vLLM's renderer hands to its thread as ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.renderers import base, renderer_from_config
from vllm.renderers.params import ChatParams, TokenizeParams

from holdfast.demo.files import ensure_demo_model
from holdfast.patches.rendering import (
    CHARACTERS_PER_TURN,
    LONG_CHARACTERS,
    MAX_CHARACTERS,
    MAX_MESSAGES,
    await_one_without_a_task,
    render_short_prompts_at_once,
)
from holdfast.patches.request_bodies import bound_prompts

Value = TypeVar("Value")
LONG = "x" * (MAX_CHARACTERS + 1)
HANDED_OVER: list[list[Any]] = []
"""What each renderer that is looked at has handed over."""
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A renderer as vLLM makes it."""
    model = ensure_demo_model(tmp_path_factory.mktemp("models"))
    config = EngineArgs(model=str(model)).create_engine_config()
    return renderer_from_config(config)


def noted(renderer: Any) -> list[Any]:
    """What it will hand to the thread that all share."""
    handed_over: list[Any] = []
    submit = renderer._executor.submit

    def note(function: Any, *arguments: Any) -> Any:
        handed_over.append(function)
        return submit(function, *arguments)

    renderer._executor.submit = note
    return handed_over


@pytest.fixture(scope="module")
def renderer(stock: Any) -> Any:
    """One that renders short prompts at once, and notes what it hands to its thread."""
    made = renderer_from_config(stock.config)
    HANDED_OVER.append(noted(made))
    render_short_prompts_at_once(made, trusts_templates=False)
    render_short_prompts_at_once(made, trusts_templates=False)
    return made


def run(work: Coroutine[Any, Any, Value]) -> tuple[Value, int]:
    """Its result, and how often the thread was needed for it."""
    [handed_over] = HANDED_OVER
    handed_over.clear()
    result = asyncio.run(work)
    return result, len(handed_over)


async def tokens(renderer: Any, *prompts: str) -> list[list[int]]:
    """Of all prompts, which come together."""
    given = [{"prompt": prompt} for prompt in prompts]
    rendered = await renderer.tokenize_prompts_async(given, TokenizeParams(max_total_tokens=None))
    return [list(one["prompt_token_ids"]) for one in rendered]


async def chat(renderer: Any, messages: list[Any], **options: Any) -> str:
    """The text that a template makes of a conversation."""
    parameters = ChatParams(chat_template_kwargs={"tokenize": False, **options})
    _, prompt = await renderer.render_messages_async(messages, parameters)
    return str(prompt["prompt"])


@pytest.mark.parametrize(("prompt", "handed_over"), [("hold fast", 0), ("", 0), (LONG, 1)])
def test_only_a_long_prompt_is_handed_over(
    renderer: Any, stock: Any, prompt: str, handed_over: int
) -> None:
    """And the tokens are those of the renderer as it was."""
    expected = asyncio.run(tokens(stock, prompt))
    assert run(tokens(renderer, prompt)) == (expected, handed_over)


def test_of_many_at_once_the_rest_is_handed_over(renderer: Any, stock: Any) -> None:
    """The loop is kept for no longer than a few of the longest take."""
    prompts = ["y" * MAX_CHARACTERS] * 30
    found, handed_over = run(tokens(renderer, *prompts))
    assert found == asyncio.run(tokens(stock, *prompts))
    assert handed_over == 30 - CHARACTERS_PER_TURN // MAX_CHARACTERS - 1


def test_too_many_prompts_are_refused_before_any_is_rendered(stock: Any) -> None:
    """As many as a request may have are rendered as ever."""
    bounded = renderer_from_config(stock.config)
    handed_over = noted(bounded)
    bound_prompts(bounded, 3)
    bound_prompts(bounded, 2)
    given = [{"prompt": "hold fast"}] * 4
    assert len(asyncio.run(bounded.render_cmpl_async(given[:3]))) == 3
    handed_over.clear()
    with pytest.raises(VLLMValidationError, match="4 prompts"):
        asyncio.run(bounded.render_cmpl_async(given))
    assert handed_over == []


def test_the_next_turn_begins_anew(renderer: Any) -> None:
    """Prompts that come one after the other are all short."""

    async def in_turn() -> None:
        for _ in range(40):
            await tokens(renderer, "y" * MAX_CHARACTERS)
            await asyncio.sleep(0)

    assert run(in_turn())[1] == 0


@pytest.mark.parametrize(
    ("messages", "options", "handed_over"),
    [
        ([{"role": "user", "content": "hold"}], {}, 0),
        ([{"role": "user", "content": "hold"}], {"enable_thinking": True}, 0),
        ([{"role": "user", "content": LONG}], {}, 1),
        ([{"role": "user", "content": "hold"}] * (MAX_MESSAGES + 1), {}, 1),
        ([{"role": "assistant", "content": "", "tool_calls": [CALL]}], {}, 1),
        ([{"role": "user" * MAX_CHARACTERS, "content": ""}], {}, 1),
        ([{"role": "user", "content": "hold"}], {"documents": [{"text": "a"}]}, 1),
        ([{"role": "user", "content": "hold"}], {"rounds": 10**9}, 1),
        ([{"role": "user", "content": "hold"}], {"chat_template": "{{ messages[0].role }}"}, 1),
    ],
)
def test_only_a_plain_chat_is_not_handed_over(
    renderer: Any, stock: Any, messages: list[Any], options: dict[str, Any], handed_over: int
) -> None:
    """Whatever a template could be kept busy with goes to the thread, which vLLM gives up."""
    expected = asyncio.run(chat(stock, messages, **options))
    assert run(chat(renderer, messages, **options)) == (expected, handed_over)


def test_with_the_template_of_the_server_a_plain_chat_is_not_handed_over(stock: Any) -> None:
    """Its operator has chosen that one."""
    template = "{{ messages[0].content }}"
    made = renderer_from_config(stock.config)
    handed_over = noted(made)
    render_short_prompts_at_once(made, trusts_templates=False, own_template=template)
    messages = [{"role": "user", "content": "hold"}]
    assert asyncio.run(chat(made, messages, chat_template=template)) == "hold"
    assert handed_over == []


def test_where_clients_send_templates_all_are_handed_over(stock: Any) -> None:
    """Nothing bounds what a template of theirs does."""
    made = renderer_from_config(stock.config)
    handed_over = noted(made)
    render_short_prompts_at_once(made, trusts_templates=True)
    asyncio.run(chat(made, [{"role": "user", "content": "hold"}]))
    assert len(handed_over) == 1


@pytest.mark.parametrize("characters", [MAX_CHARACTERS, LONG_CHARACTERS + 1], ids=["shared", "own"])
def test_a_template_that_does_not_end_is_given_up(
    stock: Any, monkeypatch: pytest.MonkeyPatch, characters: int
) -> None:
    """Nothing can interrupt its thread, so what comes after it gets another one."""
    monkeypatch.setenv("VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT", "0.2")
    made, end = renderer_from_config(stock.config), threading.Event()
    render_short_prompts_at_once(made, trusts_templates=True)
    messages = [{"role": "user", "content": "x" * characters}]

    async def rendered(template: str) -> str:
        options = {"tokenize": False, "wait": end.wait}
        parameters = ChatParams(chat_template=template, chat_template_kwargs=options)
        _, prompt = await made.render_messages_async(messages, parameters)
        return str(prompt["prompt"])

    async def scene() -> None:
        with pytest.raises(TimeoutError, match="Chat template rendering timed out"):
            await rendered("{{ wait(60) }}")
        monkeypatch.setenv("VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT", "30")
        assert await rendered("{{ messages[0].role }}") == "user"
        assert not end.is_set()

    try:
        asyncio.run(scene())
    finally:
        end.set()


def test_a_renderer_of_another_kind_stays_as_it_is() -> None:
    """Its tokenizer may not be used by two threads."""
    other = object()
    render_short_prompts_at_once(other, trusts_templates=False)
    assert not hasattr(other, "_tokenize_prompt_async")


def engine_input(rendered: tuple[Any, list[Any]]) -> list[int]:
    """The tokens of the one conversation."""
    return list(rendered[1][0]["prompt_token_ids"])


async def turns(renderer: Any, message: str) -> tuple[list[int], int]:
    """The tokens of a chat of one message, and the turns of the loop that it took."""
    loop, taken, is_done = asyncio.get_running_loop(), 0, False

    def count() -> None:
        nonlocal taken
        if not is_done:
            taken += 1
            loop.call_soon(count)

    loop.call_soon(count)
    rendered = await renderer.render_chat_async(
        [[{"role": "user", "content": message}]],
        ChatParams(chat_template_kwargs={"tokenize": False}),
    )
    is_done = True
    return engine_input(rendered), taken


@pytest.fixture
def _one_without_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "asyncio", asyncio)
    await_one_without_a_task()
    await_one_without_a_task()


@pytest.mark.usefixtures("_one_without_a_task")
def test_a_short_chat_takes_no_turn_of_the_loop(renderer: Any) -> None:
    """Its tokens are vLLM's, with whose renderer it takes many turns."""
    ours, taken = asyncio.run(turns(renderer, "hold"))
    assert taken == 0
    assert ours == asyncio.run(turns(renderer, "hold"))[0]


def test_vllm_takes_turns_for_a_short_chat(
    stock: Any, renderer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it does not, there is nothing left to fix."""
    monkeypatch.setattr(base, "asyncio", asyncio)
    tokens_of_stock, taken = asyncio.run(turns(stock, "hold"))
    assert taken > 1
    assert tokens_of_stock == asyncio.run(turns(renderer, "hold"))[0]


@pytest.mark.usefixtures("_one_without_a_task")
def test_several_prompts_are_still_prepared_side_by_side(renderer: Any) -> None:
    """One of them may have to wait for the thread."""
    prompts = [LONG, "hold", "fast"]
    found, handed_over = run(tokens(renderer, *prompts))
    assert [len(one) > 0 for one in found] == [True] * len(prompts)
    assert handed_over == 1
