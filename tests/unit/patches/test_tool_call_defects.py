"""What counts as broken in a tool call, and what a client's schema cannot do to the judgement."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.labels import ToolCallDefect
from holdfast.patches.tool_call_defects import MAX_ITEMS, defect_of, schemas_of

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": ["array", "null"]},
        "deep": {"type": "object"},
        "is_short": {"type": "boolean"},
        "code": {"type": "string", "nullable": True},
    },
    "required": ["city"],
    "additionalProperties": False,
}


def judged(arguments: Any, schema: Any = WEATHER) -> ToolCallDefect | None:
    """The defect of a call with these arguments, as text or as what is written as JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return defect_of("weather", text, {"weather": schema})


@pytest.mark.parametrize(
    "arguments",
    [
        {"city": "Bonn"},
        {"city": "", "days": 3, "share": 1, "unit": "C", "tags": [], "deep": {}, "is_short": True},
        {"city": "Bonn", "days": 3.0, "share": 0.5, "tags": None, "code": None},
    ],
)
def test_a_call_that_keeps_its_schema_is_not_broken(arguments: Any) -> None:
    """Each type is recognised; 3.0 is an integer, as in JSON Schema."""
    assert judged(arguments) is None


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        [],
        "3",
        {"city": 7},
        {"city": None},
        {"city": "Bonn", "days": 1.5},
        {"city": "Bonn", "days": True},
        {"city": "Bonn", "share": "1"},
        {"city": "Bonn", "unit": "K"},
        {"city": "Bonn", "tags": {}},
        {"city": "Bonn", "is_short": 1},
        {"city": "Bonn", "country": "DE"},
    ],
)
def test_a_call_that_breaks_its_schema_is(arguments: Any) -> None:
    """A missing or unknown argument, a wrong type, a value that is not in the list."""
    assert judged(arguments) == "schema_mismatch"


@pytest.mark.parametrize(
    "text", ["", "{", '{"city": "Bonn"', "{'city': 1}", '{"city": NaN}', "[" * 100_000]
)
def test_arguments_that_are_not_json_are_broken(text: str) -> None:
    """Cut, quoted as in Python, with a constant that JSON lacks, or deeper than a parser goes."""
    assert judged(text) == "invalid_json"


def test_a_name_that_the_request_lacks_is_broken() -> None:
    """Whatever the arguments are."""
    assert defect_of("wether", "{", {"weather": WEATHER}) == "unknown_name"
    assert defect_of("wether", "{}", {"weather": WEATHER}, is_cut=True) == "unknown_name"


def test_a_cut_call_is_not_called_broken() -> None:
    """The client's own limit or stop string ended it."""
    assert defect_of("weather", '{"ci', {"weather": WEATHER}, is_cut=True) is None


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "nothing", "properties": {"city": {"type": "nothing"}}},
        {"required": "city", "properties": []},
        {"required": [[]], "properties": {"city": {"type": [7, {}]}}},
        {"properties": {"city": 7}},
        {"$ref": "#"},
        {"properties": {"city": {"$ref": "#/properties/city", "pattern": "(a+)+$"}}},
        {"additionalProperties": False, "properties": {}, "patternProperties": {"(a+)+$": {}}},
    ],
)
def test_a_schema_that_is_wrong_or_hostile_breaks_no_call(schema: Any) -> None:
    """References are not followed, patterns are not run, and what makes no sense is kept."""
    assert judged({"city": "a" * 10_000 + "b"}, schema) is None


def test_only_the_beginning_of_a_long_list_is_read() -> None:
    """The work for each of thousands of calls does not depend on the schema's length."""
    names = [f"argument-{number}" for number in range(MAX_ITEMS + 1)]
    given = dict.fromkeys(names[:-1], 1)
    assert judged(given, {"required": names}) is None
    assert judged(dict(list(given.items())[1:]), {"required": names}) == "schema_mismatch"
    assert judged({"a": "none of them"}, {"properties": {"a": {"enum": names}}}) is None


def test_both_forms_of_a_function_are_read() -> None:
    """A chat's function is nested, that of `/v1/responses` is not; one may have no schema."""
    function = SimpleNamespace(name="weather", parameters=WEATHER)
    tools = [
        SimpleNamespace(type="function", function=function),
        SimpleNamespace(type="function", name="now", parameters=None),
    ]
    schemas = schemas_of(tools)
    assert schemas == {"weather": WEATHER, "now": {}}
    assert defect_of("now", "{}", schemas) is None


def test_names_are_not_judged_where_vllm_gives_some_itself() -> None:
    """Only whether the arguments are JSON is."""
    tools = [SimpleNamespace(type="web_search_preview")]
    assert schemas_of(tools) is None
    assert defect_of("browser.search", "[]", None) is None
    assert defect_of("browser.search", "[", None) == "invalid_json"
