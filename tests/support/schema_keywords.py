"""The keywords of JSON Schema that limit a value, and those that the cases of `verify` have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]  # it has no stubs

from holdfast.verify.checks.tools.keywords import Case

_VOCABULARIES = ("applicator", "validation", "unevaluated")
_META = "https://json-schema.org/draft/2020-12/meta/"


def limiting() -> set[str]:
    """Those of the vocabularies that can refuse a value, and the reference to another schema."""
    names = (name for one in _VOCABULARIES for name in REGISTRY.contents(_META + one)["properties"])
    return {"$ref", *names}


def used_by(cases: Sequence[Case]) -> set[str]:
    """Every name in their schemas, also that of a property, which is never one of a keyword."""
    return {name for case in cases for name in _names(case.parameters)}


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list):
            yield from _names(part)
