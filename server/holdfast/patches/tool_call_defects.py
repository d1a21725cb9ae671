"""What is wrong with a tool call of the model, in a time linear in the call's length.

The client chooses the schema of a tool, and what the model says. A validator of JSON Schema follows
references and runs regular expressions, so such a schema could make it take forever. Here only the
top level of the arguments is compared with it: `required`, `properties` with their `type` and
`enum`, and `additionalProperties: false`. Whatever else a schema demands counts as kept, and so
does a schema that is wrong itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from holdfast.labels import ToolCallDefect

MAX_ITEMS = 256
"""How much of a list in a schema is read: an answer may have thousands of calls."""

Schemas = Mapping[str, Mapping[str, Any]]
"""The schema of the arguments of each tool, by the tool's name."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def schemas_of(tools: Iterable[Any]) -> Schemas | None:
    """Return the schemas of a request's tools; None if the model may know some by other names.

    Chats and `/v1/responses` write a function differently. Other kinds of tools, such as namespaces
    and the ones that a server runs itself, are named by vLLM.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        if getattr(tool, "type", None) != "function":
            return None
        function = getattr(tool, "function", tool)
        parameters = function.parameters
        found[function.name] = parameters if isinstance(parameters, Mapping) else {}
    return found


def defect_of(
    name: str, arguments: str, schemas: Schemas | None, *, is_cut: bool = False
) -> ToolCallDefect | None:
    """Return the first defect of a call, or None.

    Of a call that `is_cut`, because the answer reached a limit or a stop string of its client, only
    the name is judged.
    """
    if schemas is not None and name not in schemas:
        return "unknown_name"
    if is_cut:
        return None
    try:
        given = json.loads(arguments, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return "invalid_json"
    return None if schemas is None or _fits(given, schemas[name]) else "schema_mismatch"


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _fits(given: Any, schema: Mapping[str, Any]) -> bool:
    """Whether arguments keep the top level of a schema."""
    if not isinstance(given, dict):
        return False
    required, properties = schema.get("required"), schema.get("properties")
    if isinstance(required, list) and not all(
        name in given for name in required[:MAX_ITEMS] if isinstance(name, str)
    ):
        return False
    if not isinstance(properties, Mapping):
        return True
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if is_closed and not given.keys() <= properties.keys():
        return False
    return all(_is_kept(value, properties.get(name)) for name, value in given.items())


def _is_kept(value: Any, schema: Any) -> bool:
    """Whether a value has the type of its property, and one of the values that it lists."""
    if not isinstance(schema, Mapping) or (value is None and schema.get("nullable") is True):
        return True
    kinds, values = schema.get("type"), schema.get("enum")
    if isinstance(kinds, str):
        kinds = [kinds]
    if isinstance(kinds, list) and not any(_is_a(value, kind) for kind in kinds[: len(_TYPES)]):
        return False
    if not isinstance(values, list) or len(values) > MAX_ITEMS or isinstance(value, list | dict):
        return True
    return value in values


def _is_a(value: Any, kind: Any) -> bool:
    if not isinstance(kind, str) or kind not in _TYPES:
        return True
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])
