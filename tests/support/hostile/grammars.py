"""Grammars that are deep, slow or huge; each varies its names, so that none is remembered.

Those with rules and alternatives are just small enough to be tried, and slow only after a literal.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

from hostile.target import Outcomes, Target, told

DEEP = 40_000
PROPERTIES = 3000
RULES = 12_000
ALTERNATIVES = 6000
CHOICES = 24_000
LITERAL = "an answer that begins as usual: "
TOKENS = 64
"""Enough to leave the literal behind."""
AMBIGUOUS_TOKENS = 1000
MAX_BYTES = 512 << 10
"""What is larger is refused unread."""


async def deep_pattern(target: Target) -> Outcomes:
    """A pattern nested so deep that what reads it by recursion runs out of stack."""
    opener, closer = target.chosen.choice((("(", ")"), ("(?:", ")"), ("", "*")))
    pattern = opener * DEEP + "a" + closer * DEEP
    schemas: tuple[Mapping[str, Any], ...] = (
        {"type": "object", "properties": {_name(target): {"type": "string", "pattern": pattern}}},
        {"type": "object", "patternProperties": {pattern: {"type": "string"}}},
        {"type": "object", "propertyNames": {"pattern": pattern}},
    )
    return await _both(target, target.chosen.choice(schemas))


async def slow_pattern(target: Target) -> Outcomes:
    """A schema of 120 bytes that takes minutes to compile."""
    pattern = "^([a-z]|[a-z0-9]{1,40}){1,40}$"
    name = _name(target)
    properties = {name: {"type": "string", "pattern": pattern}}
    return await _both(target, {"type": "object", "properties": properties, "required": [name]})


async def many_properties(target: Target) -> Outcomes:
    """Thousands of optional properties: the time to compile them is quadratic."""
    name = _name(target)
    properties = {f"{name}{number}": {"type": "integer"} for number in range(PROPERTIES)}
    return await _both(target, {"type": "object", "properties": properties})


async def chained_rules(target: Target) -> Outcomes:
    """Rules that each call the next one, after a literal."""
    name = _name(target)
    rules = [f"{name}{number} ::= {name}{number + 1}" for number in range(RULES)]
    grammar = "\n".join([f'root ::= "{LITERAL}" {name}0', *rules, f'{name}{RULES} ::= "a"'])
    return await _asked(target, {"structured_outputs": {"grammar": grammar}, "max_tokens": TOKENS})


async def many_alternatives(target: Target) -> Outcomes:
    """Thousands of rules that all match the same, after a literal."""
    name = _name(target)
    names = [f"r{number:x}" for number in range(ALTERNATIVES)]
    rules = [f'{one} ::= "a" ("b{at % 97}" | "" | {one} "q")' for at, one in enumerate(names)]
    first = f'root ::= "{LITERAL}{name}" s'
    grammar = "\n".join([first, f"s ::= {' | '.join(names)}", *rules])
    return await _asked(target, {"structured_outputs": {"grammar": grammar}, "max_tokens": TOKENS})


async def ambiguous_rules(target: Target) -> Outcomes:
    """A grammar of a line in which each token takes longer than the one before."""
    grammar = f'root ::= "{_name(target)}" s "z"\ns ::= s s | "a"'
    options = {"structured_outputs": {"grammar": grammar}, "max_tokens": AMBIGUOUS_TOKENS}
    return await _asked(target, options)


async def many_choices(target: Target) -> Outcomes:
    """A choice among thousands, and a constant that is large."""
    name = _name(target)
    choices = [f"{name}{number}" for number in range(CHOICES)]
    schema = {"const": name + "x" * (MAX_BYTES - 1024)}
    return await _asked(target, {"structured_outputs": {"choice": choices}}) + await _asked(
        target, {"structured_outputs": {"json": schema}}
    )


async def unbounded(target: Target) -> Outcomes:
    """Counts that are astronomical, and definitions that call themselves."""
    name = _name(target)
    schemas: tuple[Mapping[str, Any], ...] = (
        {"type": "string", "minLength": 10**9, "maxLength": 10**12},
        {"type": "array", "items": {"type": "string"}, "minItems": 10**7},
        {"type": "string", "pattern": "a{100000}{100000}"},
        {"$defs": {name: {"anyOf": [{"$ref": f"#/$defs/{name}"}]}}, "$ref": f"#/$defs/{name}"},
        {"type": "integer", "minimum": -(10**400), "maximum": 10**400},
    )
    return await _asked(target, {"structured_outputs": {"json": target.chosen.choice(schemas)}})


ATTACKS: Mapping[str, Callable[[Target], Awaitable[Outcomes]]] = MappingProxyType(
    {
        "deep pattern": deep_pattern,
        "slow pattern": slow_pattern,
        "many properties": many_properties,
        "chained rules": chained_rules,
        "many alternatives": many_alternatives,
        "ambiguous rules": ambiguous_rules,
        "choices and constants": many_choices,
        "unbounded schemas": unbounded,
    }
)


def _name(target: Target) -> str:
    return "p" + "".join(target.chosen.choices("abcdefgh", k=8))


async def _asked(target: Target, options: Mapping[str, Any]) -> Outcomes:
    return await told([target.complete(options)])


async def _both(target: Target, schema: Mapping[str, Any]) -> Outcomes:
    """As the format of an answer, or as what a tool takes."""
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    forms: tuple[Mapping[str, Any], ...] = (
        {"response_format": wanted},
        {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [tool], "tool_choice": "required"},
        {"structured_outputs": {"json": schema}},
    )
    return await told([target.chat(target.chosen.choice(forms))])
