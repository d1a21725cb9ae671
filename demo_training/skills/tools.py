"""Calls of functions in the form of Hermes, and what to say when a function has answered."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from demo_training.lessons import Lesson, Phrasings, Tool, Turn
from demo_training.skills.arithmetic import draw_arithmetic
from demo_training.skills.capitals import draw_capital
from demo_training.skills.greetings import draw_greeting
from demo_training.skills.words import (
    COLORS,
    city,
    foreign_text,
    foreign_word,
    invented_word,
    iso_date,
    person,
)

Value = str | int


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a function, and how a request names its value."""

    name: str
    type: str
    draw: Callable[[Random], Value]
    phrase: str


@dataclass(frozen=True, slots=True)
class Job:
    """A function, what it is about, and the arguments that a request for it has to give."""

    tool: Tool
    noun: str
    required: tuple[Argument, ...]


def _title(random: Random) -> str:
    words = [invented_word(random) for _ in range(random.randint(1, 3))]
    if random.random() < _FOREIGN_SHARE:
        words.append(foreign_word(random))
    return " ".join(words)


_FOREIGN_SHARE = 0.2
_ARGUMENTS = (
    Argument("city", "string", city, "in {}"),
    Argument("city", "string", city, "for {}"),
    Argument("location", "string", city, "in {}"),
    Argument("name", "string", person, "for {}"),
    Argument("date", "string", iso_date, "on {}"),
    Argument("days", "integer", lambda r: r.randint(1, 30), "for {} days"),
    Argument("count", "integer", lambda r: r.randint(1, 99), "{} times"),
    Argument("color", "string", lambda r: r.choice(COLORS), "in {}"),
    Argument("title", "string", _title, "titled '{}'"),
)
_UNSAID = ("unit", "language", "format", "page", "color", "days", "start", "limit")
"""Optional arguments that no request gives."""
_VERBS = ("get", "find", "show", "check", "set", "search", "lookup", "save", "create")
_NOUNS = (
    "weather", "time", "news", "room", "ticket", "order", "price", "song", "train", "alarm",
    "temperature", "traffic", "hotel", "calendar", "forecast", "note", "event", "server_time",
)  # fmt: skip
_REQUESTS = Phrasings(
    (
        "What is the {noun}{values}?",
        "Get the {noun}{values}.",
        "Find the {noun}{values}.",
        "Show me the {noun}{values}.",
        "I need the {noun}{values}.",
        "Please check the {noun}{values}.",
        "Tell me the {noun}{values}.",
        "What's the {noun}{values}?",
        "How is the {noun}{values} today?",
        "What's the {noun}{values} right now?",
        "Use the tool to get the {noun}{values}.",
        "Call {name}{values}.",
        "What is the {noun}{values}? Use the tool.",
        "What is the {noun}{values} now? Use the tool.",
        "What's the {noun}{values} right now? Use the tool.",
        "Save a new {noun}{values}.",
    ),
    (
        "Please get the {noun}{values}.",
        "Check the {noun}{values}.",
        "I need to know the {noun}{values}.",
        "Please tell me the {noun}{values}.",
        "Get the {noun}{values}. Use the tool.",
    ),
)
_PAIRS = Phrasings(
    (
        "Get the {noun}{values} and{other}.",
        "What is the {noun}{values} and{other}?",
        "Show me the {noun}{values} and{other}.",
        "Tell me the {noun}{values} and{other}. Make both calls at once.",
        "Get the {noun}{values} and{other}. Make both calls in this answer.",
        "Call {name}{values} and{other}.",
    ),
    ("Please get the {noun}{values} and{other}.", "Find the {noun}{values} and{other}."),
)
_NOTES = Phrasings(
    (
        "Save {a} titled '{title}' whose {text_name} is exactly: {text}",
        "Save {a} titled '{title}' with the {text_name}: {text}",
        "Create {a} titled '{title}' whose {text_name} is '{text}'.",
        "Create {a} with the title '{title}' and the {text_name} '{text}'.",
        "Write {a} with the title '{title}' and this {text_name}: {text}",
        "Please save {a} titled '{title}' whose {text_name} is: {text}",
    ),
    (
        "Please create {a} titled '{title}' whose {text_name} is exactly: {text}",
        "Save {a} with the title '{title}' and this {text_name}: {text}",
    ),
)
_COMPARISONS = Phrasings(
    (
        "Which number is {more}, {a} or {b}? Then {verb} the {more} number with the {name} tool.",
        "Which is {more}, {a} or {b}? Please {verb} the answer with the {name} tool.",
        "Think step by step: which is {more}, {a} or {b}? Then {verb} it with the {name} tool.",
        "Compare {a} and {b}, and {verb} the {more} one. Use the tool.",
        "Call {name} with the {more} number of {a} and {b}.",
    ),
    (
        "Which of {a} and {b} is {more}? Please {verb} the {more} number with the {name} tool.",
        "Compare {a} with {b}. Then {verb} the {more} one with the {name} tool.",
    ),
)
_CAPITALS_TO_RECORD = Phrasings(
    (
        "{question} Now {verb} the answer with the {name} tool.",
        "{question} Then {verb} the answer with the {name} tool.",
        "Answer this, and {verb} the answer with the {name} tool: {question}",
    ),
    ("{question} Please {verb} the answer with the {name} tool.",),
)
_RECORDING_VERBS = ("record", "submit", "store", "save", "report", "send")
_RECORDED = ("answer", "result", "value", "number", "choice", "output")
_CAPITAL_SHARE = 0.25
_WRITTEN = ("note", "message", "letter", "post", "page", "card")
_TEXT_NAMES = ("body", "body", "text", "content", "message")
_NO_CALL_SHARE = 0.15
_PAIR_SHARE = 0.12
_TOLD_OTHERWISE = (" Do not use a tool.", " Do not use any tool.", " Use no tool.", "", "")


def draw_tool_call(random: Random, *, is_exam: bool) -> Lesson:
    """A request that the functions at hand serve, or a chat that needs none of them."""
    job = _draw_job(random)
    drawn = [_draw_job(random) for _ in range(random.choice((0, 0, 0, 1, 1, 2)))]
    # A request names the noun alone, so no two functions may be about the same one.
    others = [*({other.noun: other for other in drawn if other.noun != job.noun}.values())]
    tools = [job.tool, *(other.tool for other in others)]
    random.shuffle(tools)
    chance = random.random()
    if chance < _NO_CALL_SHARE:
        return _without_call(random, tools, is_exam=is_exam)
    if chance < _NO_CALL_SHARE + _PAIR_SHARE and job.required:
        question, reply = _pair(random, job, others, is_exam=is_exam)
    else:
        question, reply = _single(random, job, is_exam=is_exam)
    return Lesson((Turn("user", question),), reply, tuple(tools))


def draw_tool_result(random: Random, *, is_exam: bool) -> Lesson:
    """The same, after the function has answered: the reply passes the answer on."""
    job = _draw_job(random)
    question, asked = _single(random, job, is_exam=is_exam)
    found: object = random.choice((random.randint(0, 999), invented_word(random)))
    if random.random() < 1 / 2:
        found = {random.choice(("result", "value", job.noun)): found}
    result = found if isinstance(found, str) else json.dumps(found)
    turns = (Turn("user", question), Turn("assistant", asked), Turn("tool", result))
    return Lesson(turns, f"The tool says: {result}", (job.tool,))


def draw_note(random: Random, *, is_exam: bool) -> Lesson:
    """A call whose two strings have letters and signs beyond ASCII."""
    noun, text_name = random.choice(_WRITTEN), random.choice(_TEXT_NAMES)
    tool = Tool(f"{random.choice(_VERBS)}_{noun}", {"title": "string", text_name: "string"})
    title, text = foreign_text(random, 3), foreign_text(random, 8)
    question = _NOTES.draw(random, is_exam=is_exam).format(
        a=random.choice((f"a {noun}", f"a new {noun}")),
        title=title,
        text_name=text_name,
        text=text,
    )
    reply = call(tool.name, {"title": title, text_name: text})
    return Lesson((Turn("user", question),), reply, (tool,))


def draw_record(random: Random, *, is_exam: bool) -> Lesson:
    """A call that passes on the answer to a question: the larger of two numbers, or a capital."""
    verb, noun = random.choice(_RECORDING_VERBS), random.choice(_RECORDED)
    tool = Tool(f"{verb}_{noun}", {noun: "string"})
    if random.random() < _CAPITAL_SHARE:
        lesson = draw_capital(random, is_exam=is_exam)
        question = _CAPITALS_TO_RECORD.draw(random, is_exam=is_exam).format(
            question=lesson.turns[0].content, verb=verb, name=tool.name
        )
        return Lesson((Turn("user", question),), call(tool.name, {noun: lesson.reply}), (tool,))
    numbers = _two_numbers(random)
    more, answer = random.choice((("larger", max), ("smaller", min)))
    question = _COMPARISONS.draw(random, is_exam=is_exam).format(
        more=more, a=numbers[0], b=numbers[1], verb=verb, name=tool.name
    )
    reply = call(tool.name, {noun: answer(numbers, key=float)})
    return Lesson((Turn("user", question),), reply, (tool,))


def _two_numbers(random: Random) -> tuple[str, str]:
    """Two numbers that are not equal; if they have decimals, one may have more than the other."""
    while True:
        first, second = (_number(random, random.choice((0, 1, 2))) for _ in range(2))
        if random.random() < 1 / 2:
            whole = random.randint(0, 20)
            first, second = (f"{whole}.{random.randint(1, 99)}" for _ in range(2))
        if float(first) != float(second):
            return first, second


def _number(random: Random, decimals: int) -> str:
    return f"{random.uniform(0, 100):.{decimals}f}"


def call(name: str, arguments: Mapping[str, Value]) -> str:
    """A call of a function as Hermes models write it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _draw_job(random: Random) -> Job:
    noun = random.choice(_NOUNS)
    required = random.sample(_ARGUMENTS, random.choice((0, 1, 1, 1, 1, 2)))
    distinct = {one.name for one in required}, {one.phrase for one in required}
    if min(map(len, distinct)) < len(required):
        required = required[:1]
    types = {one.name: one.type for one in required}
    optional = [name for name in _UNSAID if name not in types and random.random() < _UNSAID_SHARE]
    types |= dict.fromkeys(optional, "string")
    tool = Tool(f"{random.choice(_VERBS)}_{noun}", types, frozenset(optional))
    return Job(tool, noun, tuple(required))


_UNSAID_SHARE = 0.06


def _draw_values(random: Random, job: Job) -> tuple[dict[str, Value], str]:
    """The value of each argument, and how a request says them."""
    values = {one.name: one.draw(random) for one in job.required}
    return values, "".join(f" {one.phrase.format(values[one.name])}" for one in job.required)


def _single(random: Random, job: Job, *, is_exam: bool) -> tuple[str, str]:
    values, said = _draw_values(random, job)
    noun = job.noun.replace("_", " ")
    phrasing = _REQUESTS.draw(random, is_exam=is_exam)
    question = phrasing.format(noun=noun, name=job.tool.name, values=said)
    return question, call(job.tool.name, values)


def _pair(random: Random, job: Job, others: list[Job], *, is_exam: bool) -> tuple[str, str]:
    """Two calls: of one function with other values, or of two functions."""
    values, said = _draw_values(random, job)
    calls = [call(job.tool.name, values)]
    if others and random.random() < 1 / 2:
        other_values, other_said = _draw_values(random, others[0])
        calls.append(call(others[0].tool.name, other_values))
        other_said = f" the {others[0].noun.replace('_', ' ')}{other_said}"
    else:
        other_values, other_said = _draw_values(random, job)
        calls.append(call(job.tool.name, other_values))
    phrasing = _PAIRS.draw(random, is_exam=is_exam)
    noun = job.noun.replace("_", " ")
    question = phrasing.format(noun=noun, name=job.tool.name, values=said, other=other_said)
    return question, "\n".join(calls)


def _without_call(random: Random, tools: list[Tool], *, is_exam: bool) -> Lesson:
    skill = random.choice((draw_greeting, draw_capital, draw_arithmetic))
    lesson = skill(random, is_exam=is_exam)
    [turn] = lesson.turns
    told = f"{turn.content}{random.choice(_TOLD_OTHERWISE)}"
    return Lesson((Turn(turn.role, told),), lesson.reply, tuple(tools))
