"""A case for each keyword that limits a value: a schema with it, and a value that it accepts.

JSON Schema has them in its vocabularies Applicator, Validation and Unevaluated; `$ref` is one more.
https://json-schema.org/draft/2020-12/json-schema-validation
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Schema = Mapping[str, Any]
SchemaAndValue = tuple[Schema, Any]
"""A schema and a value that it accepts."""

_WORDS = ("amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "harbor")
_MAX_JOINED = 3


@dataclass(frozen=True, slots=True)
class Case:
    """The parameters of a function, and arguments that they accept."""

    name: str
    parameters: Schema
    arguments: Mapping[str, Any]


def _words(rng: random.Random, count: int) -> list[str]:
    return rng.sample(_WORDS, count)


def _text(rng: random.Random) -> SchemaAndValue:
    return {"type": "string", "maxLength": 16}, rng.choice(_WORDS)


def _text_of_a_length(rng: random.Random) -> SchemaAndValue:
    return {"type": "string", "minLength": 4, "maxLength": 8}, rng.choice(_WORDS)


def _pattern(rng: random.Random) -> SchemaAndValue:
    return {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, f"QX-{rng.randint(100, 999)}"


def _date(rng: random.Random) -> SchemaAndValue:
    return {"type": "string", "format": "date"}, f"2024-0{rng.randint(1, 9)}-1{rng.randint(0, 9)}"


def _date_time(rng: random.Random) -> SchemaAndValue:
    return {"type": "string", "format": "date-time"}, f"2024-05-1{rng.randint(0, 9)}T12:30:00Z"


def _email(rng: random.Random) -> SchemaAndValue:
    return {"type": "string", "format": "email"}, f"{rng.choice(_WORDS)}@example.org"


def _uuid(rng: random.Random) -> SchemaAndValue:
    digits = f"{rng.getrandbits(128):032x}"
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return {"type": "string", "format": "uuid"}, "-".join(parts)


def _unusual_text(rng: random.Random) -> SchemaAndValue:
    said = ("na\u00efve \u5317\u4eac", 'a "quoted" \\ text', "\U0001f642", "two\nlines", "")
    return {"type": "string", "enum": [*said]}, rng.choice(said)


def _integer(rng: random.Random) -> SchemaAndValue:
    return {"type": "integer", "minimum": -999, "maximum": 999}, rng.randint(-999, 999)


def _open_range(rng: random.Random) -> SchemaAndValue:
    schema = {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100}
    return schema, rng.randint(1, 99)


def _multiple(rng: random.Random) -> SchemaAndValue:
    return {"type": "integer", "enum": [5, 10, 15, 20], "multipleOf": 5}, 5 * rng.randint(1, 4)


def _number(rng: random.Random) -> SchemaAndValue:
    return {"type": "number", "minimum": 0, "maximum": 10}, rng.randint(0, 40) / 4


def _boolean(rng: random.Random) -> SchemaAndValue:
    return {"type": "boolean"}, rng.random() < 0.5


def _null(_rng: random.Random) -> SchemaAndValue:
    return {"type": "null"}, None


def _enum(rng: random.Random) -> SchemaAndValue:
    words = _words(rng, 4)
    return {"type": "string", "enum": words}, rng.choice(words)


def _enum_of_kinds(rng: random.Random) -> SchemaAndValue:
    kinds = [rng.randint(1, 99), rng.choice(_WORDS), True, None]
    return {"enum": kinds}, rng.choice(kinds)


def _const(rng: random.Random) -> SchemaAndValue:
    word = rng.choice(_WORDS)
    return {"const": word}, word


def _kinds(rng: random.Random) -> SchemaAndValue:
    return {"type": ["integer", "null"], "maximum": 9999, "minimum": 0}, rng.choice([None, 7])


def _items(rng: random.Random) -> SchemaAndValue:
    schema = {"type": "array", "items": {"type": "string", "enum": [*_WORDS]}, "maxItems": 4}
    return schema, _words(rng, 3)


def _count_of_items(rng: random.Random) -> SchemaAndValue:
    item = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "array", "items": item, "minItems": 2, "maxItems": 3}
    return schema, [rng.randint(0, 99) for _ in range(2)]


def _unique_items(rng: random.Random) -> SchemaAndValue:
    schema, words = _items(rng)
    return {**schema, "uniqueItems": True}, words


def _contains(rng: random.Random) -> SchemaAndValue:
    item = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "array", "items": item, "maxItems": 3, "contains": {"minimum": 50}}
    return schema, [rng.randint(0, 49), rng.randint(50, 99)]


def _count_of_contained(rng: random.Random) -> SchemaAndValue:
    schema, (small, great) = _contains(rng)
    return {**schema, "minContains": 2, "maxContains": 2}, [great, small, 99]


def _prefix(rng: random.Random) -> SchemaAndValue:
    prefix = [{"type": "string", "maxLength": 8}, {"type": "boolean"}]
    limits = {"minItems": 2, "maxItems": 2}
    schema = {"type": "array", "prefixItems": prefix, "items": False, **limits}
    return schema, [rng.choice(_WORDS), True]


def _unevaluated_items(rng: random.Random) -> SchemaAndValue:
    schema, value = _prefix(rng)
    return {**{k: v for k, v in schema.items() if k != "items"}, "unevaluatedItems": False}, value


def _rows(rng: random.Random) -> SchemaAndValue:
    row = {"type": "array", "items": {"enum": [0, 1]}, "minItems": 2, "maxItems": 2}
    schema = {"type": "array", "items": row, "minItems": 2, "maxItems": 2}
    return schema, [[rng.randint(0, 1) for _ in range(2)] for _ in range(2)]


def _closed_object(rng: random.Random) -> SchemaAndValue:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "boolean"}, "y": {"type": "boolean"}},
        "required": ["x", "y"],
        "additionalProperties": False,
    }
    return schema, {"x": rng.random() < 0.5, "y": rng.random() < 0.5}


def _two_flags(rng: random.Random) -> tuple[Schema, str, str]:
    """An object with two properties that it may have or not, and their names."""
    one, other = _words(rng, 2)
    flags = {one: {"type": "boolean"}, other: {"type": "boolean"}}
    return {"type": "object", "properties": flags, "additionalProperties": False}, one, other


def _optional(rng: random.Random) -> SchemaAndValue:
    schema, must, _ = _two_flags(rng)
    return {**schema, "required": [must]}, {must: True}


def _further_properties(rng: random.Random) -> SchemaAndValue:
    schema = {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3}
    return schema, {rng.choice(_WORDS): True}


def _count_of_properties(rng: random.Random) -> SchemaAndValue:
    schema, _ = _further_properties(rng)
    return {**schema, "minProperties": 2}, dict.fromkeys(_words(rng, 2), True)


def _properties_by_pattern(rng: random.Random) -> SchemaAndValue:
    named = {"^[a-z]+$": {"type": "boolean"}}
    closed = {"additionalProperties": False, "maxProperties": 3}
    return {"type": "object", "patternProperties": named, **closed}, {rng.choice(_WORDS): True}


def _property_names(rng: random.Random) -> SchemaAndValue:
    schema, value = _further_properties(rng)
    return {**schema, "propertyNames": {"enum": [*_WORDS]}}, value


def _dependent_required(rng: random.Random) -> SchemaAndValue:
    schema, one, other = _two_flags(rng)
    return {**schema, "dependentRequired": {one: [other]}}, {one: True, other: False}


def _dependent_schemas(rng: random.Random) -> SchemaAndValue:
    schema, one, other = _two_flags(rng)
    then = {"properties": {other: {"const": False}}}
    return {**schema, "dependentSchemas": {one: then}}, {one: True, other: False}


def _conditional(rng: random.Random) -> SchemaAndValue:
    schema, one, other = _two_flags(rng)
    branches = {
        "if": {"properties": {one: {"const": True}}, "required": [one]},
        "then": {"required": [other]},
        "else": {"properties": {other: False}},
    }
    is_on = rng.random() < 0.5
    return {**schema, **branches}, {one: True, other: True} if is_on else {one: False}


def _unevaluated_properties(rng: random.Random) -> SchemaAndValue:
    schema, one, other = _two_flags(rng)
    part = {"properties": schema["properties"], "required": [one, other]}
    closed = {"type": "object", "allOf": [part], "unevaluatedProperties": False}
    return closed, {one: True, other: rng.random() < 0.5}


def _no_properties(_rng: random.Random) -> SchemaAndValue:
    return {"type": "object", "properties": {}, "additionalProperties": False}, {}


def _deep_object(rng: random.Random) -> SchemaAndValue:
    schema, value = _enum(rng)
    for name in _words(rng, 4):
        closed = {"required": [name], "additionalProperties": False}
        schema = {"type": "object", "properties": {name: schema}, **closed}
        value = {name: value}
    return schema, value


def _any_of(rng: random.Random) -> SchemaAndValue:
    one, other = _enum(rng), _open_range(rng)
    return {"anyOf": [one[0], other[0]]}, rng.choice([one[1], other[1]])


def _one_of(rng: random.Random) -> SchemaAndValue:
    one, other = _boolean(rng), _enum(rng)
    return {"oneOf": [one[0], other[0]]}, rng.choice([one[1], other[1]])


def _all_of(rng: random.Random) -> SchemaAndValue:
    whole = {"type": "integer", "minimum": 10, "maximum": 99}
    return {"allOf": [whole]}, rng.randint(10, 99)


def _not(rng: random.Random) -> SchemaAndValue:
    refused, taken = _words(rng, 2)
    return {"type": "string", "maxLength": 16, "not": {"const": refused}}, taken


def _referred(rng: random.Random) -> SchemaAndValue:
    schema, value = _closed_object(rng)
    return {"$ref": "#/$defs/point", "$defs": {"point": schema}}, value


MAKERS: Mapping[str, Callable[[random.Random], SchemaAndValue]] = MappingProxyType(
    {
        "string": _text,
        "minLength": _text_of_a_length,
        "pattern": _pattern,
        "format date": _date,
        "format date-time": _date_time,
        "format email": _email,
        "format uuid": _uuid,
        "escapes": _unusual_text,
        "integer": _integer,
        "exclusiveMinimum": _open_range,
        "multipleOf": _multiple,
        "number": _number,
        "boolean": _boolean,
        "null": _null,
        "enum": _enum,
        "const": _const,
        "several types": _kinds,
        "items": _items,
        "minItems": _count_of_items,
        "prefixItems": _prefix,
        "arrays in an array": _rows,
        "required": _closed_object,
        "optional": _optional,
        "additionalProperties": _further_properties,
        "no properties": _no_properties,
        "nested objects": _deep_object,
        "anyOf": _any_of,
        "oneOf": _one_of,
        "allOf": _all_of,
        "$ref": _referred,
        # Schemas of functions have these less often than the first 30, which are all of `standard`.
        "enum of several types": _enum_of_kinds,
        "uniqueItems": _unique_items,
        "contains": _contains,
        "minContains": _count_of_contained,
        "unevaluatedItems": _unevaluated_items,
        "minProperties": _count_of_properties,
        "patternProperties": _properties_by_pattern,
        "propertyNames": _property_names,
        "dependentRequired": _dependent_required,
        "dependentSchemas": _dependent_schemas,
        "if": _conditional,
        "unevaluatedProperties": _unevaluated_properties,
        "not": _not,
    }
)


def cases(count: int, seed: int = 0) -> tuple[Case, ...]:
    """The same cases each time: one for each maker, then functions with the keywords of several."""
    names = list(MAKERS)
    made = [_case(name, (name,), seed) for name in names[:count]]
    rng = random.Random(seed)  # noqa: S311 - the same cases each time
    for number in range(count - len(made)):
        joined = tuple(rng.sample(names, rng.randint(2, _MAX_JOINED)))
        made.append(_case(f"{' and '.join(joined)} ({number})", joined, f"{seed} {number}"))
    return tuple(made)


def _case(name: str, keywords: tuple[str, ...], seed: object) -> Case:
    rng = random.Random(f"{name} {seed}")  # noqa: S311 - as above
    properties: dict[str, Schema] = {}
    arguments: dict[str, Any] = {}
    definitions: dict[str, Schema] = {}
    for number, keyword in enumerate(keywords, start=1):
        schema, arguments[f"value_{number}"] = MAKERS[keyword](rng)
        definitions |= schema.get("$defs", {})
        properties[f"value_{number}"] = {k: v for k, v in schema.items() if k != "$defs"}
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    if definitions:
        parameters["$defs"] = definitions  # `#` is the whole of the parameters
    return Case(name, parameters, arguments)
