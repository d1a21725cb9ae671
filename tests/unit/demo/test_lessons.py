"""What the demo model is taught: lessons that are right, and the server's own form of them."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from demo_training import skills
from demo_training.chats import example_of, example_of_dialogue, prompt_tokens
from demo_training.lessons import Lesson, Phrasings, Skill, Tool
from demo_training.skills import SKILLS, draw_fine_tuning_lesson, draw_lesson
from demo_training.skills.arithmetic import draw_arithmetic
from demo_training.skills.counting import draw_counting_otherwise
from demo_training.skills.needles import MAX_CHARACTERS, draw_hard_text, draw_long_text
from demo_training.skills.stories import draw_story
from demo_training.skills.tools import draw_note, draw_record
from demo_training.skills.unknown import draw_unknown_otherwise
from holdfast.demo.files import MAX_MODEL_TOKENS
from holdfast.demo.tokenizer import IM_END_ID, write_tokenizer

DRAWS = 200
LONG_TOKENS = 8000
EQUATION = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)\.")
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


TAUGHT: dict[str, Skill] = {
    **SKILLS,
    "arithmetic in lessons": draw_arithmetic,
    "counting otherwise": draw_counting_otherwise,
    "note": draw_note,
    "record": draw_record,
    "unknown otherwise": draw_unknown_otherwise,
}
"""The skills of the exam, and others that only the lessons have."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, max_model_tokens=8192)
    return AutoTokenizer.from_pretrained(directory)


def drawn(name: str, *, is_exam: bool = False) -> list[Lesson]:
    """Lessons of one skill, the same each time."""
    random = Random(name)
    return [TAUGHT[name](random, is_exam=is_exam) for _ in range(DRAWS)]


def all_phrasings() -> Iterator[Phrasings]:
    """Those of every skill."""
    for module in pkgutil.iter_modules(skills.__path__, f"{skills.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Phrasings):
                yield value
            elif isinstance(value, dict):
                yield from (one for one in value.values() if isinstance(one, Phrasings))


@pytest.mark.parametrize("draw", [draw_lesson, draw_fine_tuning_lesson])
def test_a_seed_gives_the_same_lessons(draw: Callable[[Random], Lesson]) -> None:
    """Lessons depend on nothing but their random source."""
    first, again = ([draw(random) for _ in range(DRAWS)] for random in (Random(1), Random(1)))
    assert first == again


def test_the_exam_asks_in_words_that_no_lesson_used() -> None:
    """Each phrasing is either taught or examined, whichever skill it belongs to."""
    found = list(all_phrasings())
    assert len(found) > 10
    taught = {phrasing for one in found for phrasing in one.lessons}
    assert not taught & {phrasing for one in found for phrasing in one.exam}


@pytest.mark.parametrize("name", sorted(TAUGHT))
@pytest.mark.parametrize("is_exam", [False, True])
def test_a_reply_ends_and_is_all_that_is_taught(name: str, *, is_exam: bool) -> None:
    """The taught tokens are those of the reply, and the end of the turn."""
    for lesson in drawn(name, is_exam=is_exam):
        example = example_of(lesson)
        assert example.tokens[example.first_taught :] == (*lesson.reply.encode(), IM_END_ID)


@pytest.mark.parametrize(
    ("name", "calculations"),
    [("arithmetic in lessons", {0, 1, 2, 3, 4}), ("arithmetic", {1, 2, 3, 4})],
)
def test_results_of_calculations_are_right(name: str, calculations: set[int]) -> None:
    """A reply is a number alone, or has an equation that holds for each calculation."""
    counts = set()
    for lesson in drawn(name):
        found = EQUATION.findall(lesson.reply)
        assert found or lesson.reply.isdigit()
        counts.add(len(found))
        for left, sign, right, result in found:
            a, b = int(left), int(right)
            assert int(result) == {"+": a + b, "-": a - b, "*": a * b}[sign]
    assert counts == calculations


def test_no_two_functions_at_hand_are_about_the_same() -> None:
    """A request names what it is about, which has to say which function is meant."""
    for lesson in drawn("tool call"):
        nouns = [tool.name.partition("_")[2] for tool in lesson.tools]
        assert len(set(nouns)) == len(nouns)


def test_objects_are_what_the_question_says() -> None:
    """Each value stands in the question, which names each key in the order of the reply."""
    for lesson in drawn("object"):
        [turn] = lesson.turns
        values = json.loads(lesson.reply)
        for key, value in values.items():
            assert key in turn.content
            assert isinstance(value, bool) or str(value) in turn.content


def test_what_is_recorded_is_the_answer() -> None:
    """The larger or the smaller of two numbers as the question has them, or a capital."""
    for lesson in drawn("record"):
        ((name, answer),) = json.loads(CALL.findall(lesson.reply)[0])["arguments"].items()
        assert lesson.tools[0].arguments == {name: "string"}
        question = lesson.turns[0].content
        if "capital" in answer:
            continue
        numbers = re.findall(r"\d+(?:\.\d+)?", question)
        right = max(numbers, key=float) if "larger" in question else min(numbers, key=float)
        assert answer == right


@pytest.mark.parametrize("name", ["tool call", "note"])
def test_calls_are_of_functions_at_hand(name: str) -> None:
    """A call gives the arguments that its function demands, with values from the request."""
    calls = 0
    for lesson in drawn(name):
        tools = {tool.name: tool for tool in lesson.tools}
        for body in CALL.findall(lesson.reply):
            call = json.loads(body)
            tool = tools[call["name"]]
            assert list(call["arguments"]) == [n for n in tool.arguments if n not in tool.optional]
            assert all(str(v) in lesson.turns[-1].content for v in call["arguments"].values())
            calls += 1
    assert calls > DRAWS / 2


@pytest.mark.parametrize("name", ["needle", "line needle"])
def test_a_needle_stands_once_in_its_text(name: str) -> None:
    """The reply is a sentence of the text, or its number alone; some texts are long."""
    lessons = drawn(name)
    for lesson in lessons:
        sentence = f" is {lesson.reply}." if lesson.reply.isdigit() else lesson.reply
        assert lesson.turns[0].content.count(sentence) == 1
    assert max(len(lesson.turns[0].content) for lesson in lessons) > 3 * MAX_CHARACTERS


def test_a_long_text_answers_each_of_its_questions() -> None:
    """It has each sentence once, and is about as long as was asked for, replies included."""
    random = Random(1)
    questions = set()
    for _ in range(20):
        lesson = draw_long_text(random, LONG_TOKENS, early_part=1 / 3)
        text = lesson.turns[0].content
        replies = [turn.content for turn in lesson.turns if turn.role == "assistant"]
        for reply in (*replies, lesson.reply):
            assert text.count(f" is {reply}." if reply.isdigit() else reply) == 1
        assert 0.85 * LONG_TOKENS < len(example_of_dialogue(lesson).tokens) < 1.02 * LONG_TOKENS
        questions.add(len(replies) + 1)
    assert questions == {1, 4, 8}


def test_the_lines_of_a_hard_text_share_words_with_its_sentences() -> None:
    """And most of the sentences are near its beginning or its end."""
    random = Random(1)
    depths = []
    lines = set()
    for _ in range(20):
        lesson = draw_hard_text(random, LONG_TOKENS)
        replies = [turn.content for turn in lesson.turns if turn.role == "assistant"]
        told = lesson.turns[0].content.split("\n")[:-1]
        for reply in (*replies, lesson.reply):
            (place,) = (n for n, line in enumerate(told) if line.endswith(f"{reply.rstrip('.')}."))
            depths.append(place / len(told))
        assert 0.85 * LONG_TOKENS < len(example_of_dialogue(lesson).tokens) < 1.03 * LONG_TOKENS
        lines |= {*told}
    assert sum(not 1 / 4 < depth < 3 / 4 for depth in depths) > 0.55 * len(depths)
    assert any("the harbour " in line for line in lines)
    assert any("of the harbour master is" in line for line in lines)


def test_each_lesson_fits_into_the_context() -> None:
    """A lesson may come after another, and texts for needles are nearly as long as the context."""
    random = Random(2)
    lessons = [draw_fine_tuning_lesson(random) for _ in range(20 * DRAWS)]
    longest = max(len(example_of(lesson).tokens) for lesson in lessons)
    assert MAX_MODEL_TOKENS / 2 < longest < MAX_MODEL_TOKENS


def test_a_story_is_one_of_many_about_what_was_asked_for() -> None:
    """So an answer under another seed is another one."""
    random = Random(1)
    told = [draw_story(random) for _ in range(DRAWS)]
    for lesson in told:
        topic = lesson.turns[0].content.rstrip(".").rpartition(" ")[2]
        assert topic in lesson.reply
    assert len({lesson.reply for lesson in told}) > DRAWS / 2


@pytest.mark.parametrize("name", sorted(TAUGHT))
def test_the_server_renders_a_chat_as_it_was_taught(tokenizer: Any, name: str) -> None:
    """The chat template gives the tokens of the lesson, calls and functions included."""
    for lesson in drawn(name):
        rendered = tokenizer.apply_chat_template(
            [_message(turn.role, turn.content) for turn in lesson.turns],
            tools=[_function(tool) for tool in lesson.tools] or None,
            tokenize=False,
            add_generation_prompt=True,
        )
        assert tokenizer.encode(rendered) == prompt_tokens(lesson)


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"type": "object"}, {"properties": {"a": True, "b": {"type": ["string", "null"]}}}],
)
def test_a_function_with_an_unusual_schema_is_rendered(tokenizer: Any, parameters: Any) -> None:
    """What the template does not understand of a schema is left out."""
    function = {"name": "f", "description": "d", "parameters": parameters}
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}],
        tools=[{"type": "function", "function": function}],
        tokenize=False,
    )
    listed = "a?: any, b?: any" if parameters and "properties" in parameters else ""
    assert f"<tools>\nf({listed})\n</tools>" in rendered


def _message(role: str, content: str) -> dict[str, Any]:
    """A message as a client sends it, with calls that vLLM has parsed."""
    calls = [json.loads(body) for body in CALL.findall(content)]
    if not calls:
        return {"role": role, "content": content}
    functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    return {
        "role": role,
        "content": None,
        "tool_calls": [{"type": "function", "function": one} for one in functions],
    }


def _function(tool: Tool) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in tool.arguments.items()}
    required = [name for name in properties if name not in tool.optional]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": tool.name, "parameters": parameters}}
