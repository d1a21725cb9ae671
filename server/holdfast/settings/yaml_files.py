"""YAML files that a flag names: the flags of a `--config` file, and the documents of any other.

A file may contain keys, which no error quotes, and may expand to more than the memory can hold.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError
from holdfast.settings import flags

STANDARD_INPUT = Path("-")
MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_NODES = 1_000_000
"""A few lines of aliases that refer to aliases can make more."""
_MERGE = "tag:yaml.org,2002:merge"


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
    """Return the flags of the `--config` file, then those of the command line, normalised.

    A model that comes first stays there, as in vLLM: the last flag of the file could take it.
    """
    leading = 1 if given and not given[0].startswith("-") else 0
    return _normalised([*given[:leading], *_file_arguments(given), *given[leading:]])


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
        return [flag, *map(_argument, value)] if value else []
    if value is None or isinstance(value, bool):
        if flag.replace("_", "-") in {ours.name for ours in flags() if not ours.is_switch}:
            # YAML reads `on` as true, `off` and `no` as false. vLLM would take true for a switch,
            # drop false, and take None for a name.
            raise UsageError(
                f"--config: {path}: {name}: YAML read this as {value}.",
                remedy=f'quote it, for example {name}: "{"on" if value else "off"}".',
            )
        return [flag] if value else []
    return [f"{flag}={_argument(value)}"]


def _argument(value: Any) -> str:
    """Return a value of the file as an argument; a mapping is JSON, as in vLLM."""
    if isinstance(value, dict):
        return json.dumps(value, default=str, skipkeys=True)
    return str(value)


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


def read_yaml(flag: str, path: Path) -> list[Any]:
    """Return the documents of the file; `-` is standard input.

    Raises:
        UsageError: the file cannot be read; its content is not quoted.
    """
    import yaml  # noqa: PLC0415 - only where a flag names such a file

    try:
        documents = _documents(_text(path))
        _refuse_bomb(documents)
    except OSError as error:
        raise UsageError(
            f"{flag}: {path} cannot be read: {error.strerror}.", remedy="name a readable YAML file."
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # The parser's message is dropped: it quotes the file, which may contain a key.
        mark = getattr(error, "problem_mark", None)
        raise UsageError(
            f"{flag}: {path} is not YAML{f', see line {mark.line + 1}' if mark else ''}.",
            remedy="name a readable YAML file of less than 4 MiB.",
        ) from None
    return documents


def _documents(text: str) -> list[Any]:
    import yaml  # noqa: PLC0415 - as above

    class BoundedLoader(yaml.SafeLoader):
        """Refuses a file whose merge keys (`<<`) copy more entries than a file may have nodes."""

        merged = 0

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            for mapping in _merged_mappings(node):
                # PyYAML would copy its entries first, and those of the mappings that it merges.
                self.flatten_mapping(mapping)
                self.merged += len(mapping.value)
                if self.merged > MAX_NODES:
                    raise ValueError("it is too large")
            super().flatten_mapping(node)

    return list(yaml.load_all(text, BoundedLoader))


def _merged_mappings(node: Any) -> Iterator[Any]:
    for key, value in node.value:
        if key.tag == _MERGE:
            merged = value.value if value.id == "sequence" else [value]
            yield from (one for one in merged if one.id == "mapping")


def nodes(node: Any) -> Iterator[Any]:
    """Yield the node and all nodes in it; an aliased node comes once for each alias."""
    yield node
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in inner:
        yield from nodes(child)


def _refuse_bomb(documents: list[Any]) -> None:
    if any(count > MAX_NODES for count, _ in enumerate(nodes(documents))):
        raise ValueError("it is too large")


def _text(path: Path) -> str:
    """Read the text; ValueError if it is too large, or not UTF-8."""
    if path == STANDARD_INPUT:
        content = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    else:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError("it is too large")
    return content.decode("utf-8")
