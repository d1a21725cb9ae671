"""JSON objects by a schema: what a text says, under the names that the question gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo_training.lessons import Lesson, Phrasings, ask
from demo_training.skills.words import COLORS, THINGS, city, iso_date, person


@dataclass(frozen=True, slots=True)
class Property:
    """One key of an object: its JSON type, and how a text gives its value."""

    name: str
    type: str
    draw: Callable[[Random], str | int | bool]
    said: Callable[[str | int | bool], str] = str

    def clause(self, value: str | int | bool) -> str:
        """What the text says about the value."""
        return self.said(value)


PROPERTIES = (
    Property("name", "string", person, lambda v: f"The name is {v}"),
    Property("city", "string", city, lambda v: f"The city is {v}"),
    Property("color", "string", lambda r: r.choice(COLORS), lambda v: f"The color is {v}"),
    Property("item", "string", lambda r: r.choice(THINGS), lambda v: f"The item is {v}"),
    Property("date", "string", iso_date, lambda v: f"The date is {v}"),
    Property("age", "integer", lambda r: r.randint(1, 99), lambda v: f"The age is {v}"),
    Property("count", "integer", lambda r: r.randint(0, 500), lambda v: f"The count is {v}"),
    Property("price", "integer", lambda r: r.randint(1, 900), lambda v: f"The price is {v}"),
    Property(
        "is_open",
        "boolean",
        lambda r: r.random() < 1 / 2,
        lambda v: "It is open" if v else "It is closed",
    ),
)
_BY_NAMES = Phrasings(
    (
        "Answer in JSON with {keys}. {text}",
        "{text} Write that as JSON with {keys}.",
        "Give me a JSON object with {keys}. {text}",
        "Make JSON with the keys {keys}: {text}",
        "{text} Reply with a JSON object that has {keys}.",
    ),
    (
        "{text} Give me a JSON object with {keys}.",
        "Write JSON with the keys {keys}: {text}",
        "{text} Answer in JSON with {keys}.",
    ),
)
_BY_SCHEMA = Phrasings(
    (
        "Answer in JSON by this schema: {schema}\n{text}",
        "{text}\nWrite that as JSON by this schema: {schema}",
    ),
    ("{text}\nAnswer in JSON by this schema: {schema}",),
)
_GIVEN = Phrasings(
    (
        "Return only this JSON object: {}",
        "Reply with this JSON: {}",
        "Answer with exactly this JSON object: {}",
        "Answer with the JSON object {} and nothing else.",
    ),
    ("Reply with only this JSON object: {}", "Return this JSON: {}"),
)
_SCHEMA_SHARE = 0.3
_GIVEN_SHARE = 0.1


def draw_object(random: Random, *, is_exam: bool) -> Lesson:
    """Up to three values that a text gives, under the keys and in the order of the question."""
    wanted = random.sample(PROPERTIES, random.choice((1, 2, 2, 3)))
    values = {one.name: one.draw(random) for one in wanted}
    if random.random() < _GIVEN_SHARE:
        separators = random.choice(((",", ":"), (", ", ": ")))
        given = json.dumps(values, separators=separators)
        return ask(_GIVEN.draw(random, is_exam=is_exam).format(given), json.dumps(values))
    clauses = [one.clause(values[one.name]) for one in wanted]
    random.shuffle(clauses)
    text = " ".join(f"{clause}." for clause in clauses)
    if random.random() < _SCHEMA_SHARE:
        types = {one.name: {"type": one.type} for one in wanted}
        schema = json.dumps({"type": "object", "properties": types})
        question = _BY_SCHEMA.draw(random, is_exam=is_exam).format(schema=schema, text=text)
    else:
        keys = _listed([one.name for one in wanted])
        question = _BY_NAMES.draw(random, is_exam=is_exam).format(keys=keys, text=text)
    return ask(question, json.dumps(values))


def _listed(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
