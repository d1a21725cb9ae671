"""Bodies of very many values are refused at the first wrong one, or for being so many.

vLLM's types of requests try each message and each item against dozens of types, and pydantic
collects what each of them says, on the event loop and without letting go of the interpreter (0.32):
200 KB of `{"messages": [{}, {}, ...]}` keep everything for 10 s and take a gigabyte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, get_args

from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from pydantic_core import core_schema

MOST_ITEMS = 16 * 1024
"""Of a list whose items are more than numbers and texts: messages, tools, parts of a message."""
_PLAIN = {"int", "float", "str", "bool", "any"}


def stop_at_first_error(routes: Iterable[Any]) -> None:
    """Have the lists in the bodies of all routes read so; again changes nothing."""
    fields = [
        route.body_field
        for route in routes
        if isinstance(route, APIRoute) and route.body_field is not None
    ]
    models = {model for field in fields for model in _models(field.field_info.annotation)}
    with _short_lists():
        for model in sorted(models, key=lambda one: one.__qualname__):
            model.model_rebuild(force=True)
    for field in fields:
        annotation = Annotated[field.field_info.annotation, field.field_info]  # type: ignore[name-defined]  # known when it runs
        field._type_adapter = TypeAdapter(annotation)  # noqa: SLF001 - FastAPI makes it once


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


@contextmanager
def _short_lists() -> Iterator[None]:
    """While entered, lists of new schemas stop at the first error, and have a most length."""
    original = core_schema.list_schema

    def list_schema(items_schema: Any = None, **options: Any) -> Any:
        schema = original(items_schema, **options)
        schema.setdefault("fail_fast", True)
        if items_schema is not None and items_schema["type"] not in _PLAIN:
            schema.setdefault("max_length", MOST_ITEMS)
        return schema

    core_schema.list_schema = list_schema
    try:
        yield
    finally:
        core_schema.list_schema = original
