"""Variables in the values of a Compose file, by the grammar of Compose.

See https://docs.docker.com/reference/compose-file/interpolation/. What is not known here is UNSEEN:
Compose may be run elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.doctor.words import UNSEEN

_VARIABLE = re.compile(
    r"\$(?:(?P<dollar>\$)|(?P<bare>[A-Za-z_]\w*)"
    r"|\{(?P<name>[A-Za-z_]\w*)(?:(?P<operator>:?[-?+])(?P<text>(?:[^{}]|\$\{[^{}]*\})*))?\})"
)


def filled_in(node: Any, environment: Mapping[str, str]) -> Any:
    """The same mappings and lists with every variable in a value replaced."""
    if isinstance(node, dict):
        return {key: filled_in(value, environment) for key, value in node.items()}
    if isinstance(node, list):
        return [filled_in(value, environment) for value in node]
    return _text(node, environment) if isinstance(node, str) else node


def _text(text: str, environment: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: _value(found, environment), text)


def _value(found: re.Match[str], environment: Mapping[str, str]) -> str:
    if found["dollar"]:
        return "$"
    value = environment.get(found["bare"] or found["name"])
    operator = found["operator"] or ""
    # With a colon an empty value counts as none.
    is_given = bool(value) if operator.startswith(":") else value is not None
    other = _text(found["text"] or "", environment)
    if operator.endswith("+"):
        return other if is_given else ""
    if operator.endswith("-") and not is_given:
        return other
    return value if value is not None and is_given else UNSEEN


def read_variables(path: Path) -> dict[str, str]:
    """The variables of an `.env` or `env_file`; OSError if it cannot be read."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    pairs = (line.strip().removeprefix("export ").partition("=") for line in lines)
    return {
        name.strip(): value.strip().strip("\"'")
        for name, equals, value in pairs
        if equals and not name.startswith("#")
    }
