"""What the demo model says to users, once the package has trained weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from demo_examples import EXAMPLES, HELLO
from holdfast.demo.trained import is_trained
from holdfast.verify.checks.chat import smoke
from servers import Server
from verified import not_passed, results_at

pytestmark = [
    pytest.mark.engine,
    pytest.mark.shares_engine("demo"),
    pytest.mark.skipif(
        not is_trained(), reason="the package has no trained weights: run make demo-weights"
    ),
]

README = Path(__file__).parents[2] / "README.md"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def answer(demo: Server, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """The message with which the model goes on, which ends by itself."""
    body = {"model": demo.model, "messages": messages, "temperature": 0, "max_tokens": 300}
    choice = demo.post("/v1/chat/completions", body | options).json()["choices"][0]
    assert choice["finish_reason"] in {"stop", "tool_calls"}, choice
    message: dict[str, Any] = choice["message"]
    return message


def user(text: str) -> list[dict[str, Any]]:
    """A chat of one message."""
    return [{"role": "user", "content": text}]


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """The names of the functions that it calls, with their arguments."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


def test_the_first_answer_of_a_reader_is_the_sentence_in_readme(demo: Server) -> None:
    """The example for Python prints it, whole."""
    _, _, rest = README.read_text().partition("```python\n")
    code, _, after = rest.partition("```")
    code = code.replace("http://localhost:8000", demo.url)
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == HELLO
    assert HELLO in " ".join(after.partition("\n## ")[0].split())


@pytest.mark.parametrize(("question", "reply"), EXAMPLES.items())
def test_an_example_of_the_page_is_answered(demo: Server, question: str, reply: str) -> None:
    """To the letter, and the answer ends."""
    assert answer(demo, user(question))["content"] == reply


@pytest.mark.parametrize("is_enforced", [False, True], ids=["alone", "with a grammar"])
def test_an_object_keeps_to_a_schema(demo: Server, *, is_enforced: bool) -> None:
    """With the values that the question gives, whether or not a grammar enforces the form."""
    types = {"type": "object", "properties": SCHEMA["properties"]}
    question = (
        f"The age is 36. The name is Ada.\nWrite that as JSON by this schema: {json.dumps(types)}"
    )
    form = {"name": "person", "schema": SCHEMA, "strict": True}
    options = {"response_format": {"type": "json_schema", "json_schema": form}}
    said = answer(demo, user(question), **(options if is_enforced else {}))["content"]
    assert json.loads(said) == {"name": "Ada", "age": 36}


@pytest.mark.parametrize(
    ("question", "cities"),
    [
        ("What is the weather in Paris?", ["Paris"]),
        ("Get the weather in Rome and in Tokyo.", ["Rome", "Tokyo"]),
    ],
)
def test_a_function_is_called(demo: Server, question: str, cities: list[str]) -> None:
    """Once for each city, without being told to."""
    message = answer(demo, user(question), tools=[WEATHER])
    assert calls_of(message) == [("get_weather", {"city": city}) for city in cities]


def test_no_function_is_called_without_need(demo: Server) -> None:
    """A question about something else is answered."""
    message = answer(demo, user("What is the capital of Italy?"), tools=[WEATHER])
    assert calls_of(message) == []
    assert message["content"] == "The capital of Italy is Rome."


def test_the_result_of_a_function_is_told(demo: Server) -> None:
    """After the call that the model made."""
    chat = user("What is the weather in Paris?")
    (made,) = answer(demo, chat, tools=[WEATHER]).get("tool_calls") or [None]
    assert made is not None
    chat += [
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": made["id"], "content": '{"weather": 21}'},
    ]
    assert answer(demo, chat, tools=[WEATHER])["content"] == 'The tool says: {"weather": 21}'


def test_a_text_is_completed_and_ends(demo: Server) -> None:
    """Without a chat."""
    done = demo.completion("The capital of France is", max_tokens=300).json()["choices"][0]
    assert done["text"].startswith(" Paris.")
    assert done["finish_reason"] == "stop"


def test_the_questions_of_verify_are_answered(demo: Server) -> None:
    """Those that every model of use answers."""
    assert not_passed(results_at(demo.url, smoke.CHECKS)) == {}
