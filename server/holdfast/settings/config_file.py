"""The flags in the `--config` file of a command line, as vLLM reads it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError
from holdfast.settings import flags
from holdfast.settings.yaml_file import read_yaml


def with_two_token_config(arguments: Sequence[str]) -> list[str]:
    """Split `--config=FILE` into two arguments: vLLM accepts one but silently ignores the file."""
    split = (
        ("--config", argument.removeprefix("--config="))
        if argument.startswith("--config=")
        else (argument,)
        for argument in arguments
    )
    return [token for tokens in split for token in tokens]


def with_file(given: Sequence[str]) -> list[str]:
    """Return the flags of the `--config` file, then those of the command line, normalised."""
    return _normalised([*_file_arguments(given), *given])


def _normalised(arguments: Sequence[str]) -> list[str]:
    """Replace underscores in flag names by dashes, as vLLM's parser does."""
    return [
        re.sub(r"^--[^=.]+", lambda name: name[0].replace("_", "-"), argument)
        for argument in arguments
    ]


def _file_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the flags in the `--config` file; those of the command line must come after them."""
    if "--config" not in arguments:
        return []
    position = arguments.index("--config") + 1
    if position == len(arguments):
        raise UsageError("--config: expected one argument.", remedy="name a YAML file.")
    if arguments.count("--config") > 1:
        raise UsageError("--config: given more than once.", remedy="name one YAML file.")
    path = Path(arguments[position])
    return [
        token
        for name, value in _read_mapping(path).items()
        for token in _flag_of_file(path, name, value)
    ]


def _flag_of_file(path: Path, name: str, value: Any) -> list[str]:
    flag = f"--{name}"
    if isinstance(value, list):
        return [flag, *map(str, value)] if value else []
    if value is True:
        return [flag]
    if value is False or value is None:
        if flag.replace("_", "-") in {ours.name for ours in flags() if not ours.is_switch}:
            # YAML reads `off` and `no` as false; vLLM would drop false and take None for a name.
            raise UsageError(
                f"--config: {path}: {name}: YAML read this as {value}.",
                remedy=f'quote it, for example {name}: "off".',
            )
        return []
    return [f"{flag}={value}"]


def _read_mapping(path: Path) -> dict[str, Any]:
    if path.suffix not in {".yaml", ".yml"}:
        raise UsageError(
            f"--config: {path} must end in .yaml or .yml.",
            remedy="rename the file, or name another one.",
        )
    match read_yaml("--config", path):
        case [dict(content)]:
            return {str(name): value for name, value in content.items()}
    raise UsageError(
        f"--config: {path} must contain a mapping of flags to values.",
        remedy="write `flag: value` lines.",
    )
