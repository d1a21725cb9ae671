"""YAML files that a flag names: the flags of a `--config` file, and the documents of any other.

A file may contain keys, which no error quotes, and may expand to more than the memory can hold.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError
from holdfast.settings import flags

STANDARD_INPUT = Path("-")
MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_NODES = 1_000_000
"""A few lines of aliases that refer to aliases can make more."""
_NEED_VALUE = frozenset({"--api-key", "--demo", "--master-addr", *(flag.name for flag in flags())})
"""From a line of one of these that has no value, vLLM's parser would read the word None."""
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


def with_file(given: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the flags of the `--config` file, then those of the command line, normalised.

    A model that comes first stays there, as in vLLM: the last flag of the file could take it.

    Raises:
        UsageError: the file cannot be read, or a line of it would be dropped, such as one that
            switches off what a variable switches on.
    """
    leading = 1 if given and not given[0].startswith("-") else 0
    in_file = _file_arguments(given, environment or {})
    return _normalised([*given[:leading], *in_file, *given[leading:]])


def _normalised(arguments: Sequence[str]) -> list[str]:
    """Replace underscores in flag names by dashes, as vLLM's parser does."""
    return [
        re.sub(r"^--[^=.]+", lambda name: name[0].replace("_", "-"), argument)
        for argument in arguments
    ]


def _file_arguments(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
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
        for token in _flag_of_file(f"--config: {path}: {name}", name, value, environment)
    ]


def _flag_of_file(source: str, name: str, value: Any, environment: Mapping[str, str]) -> list[str]:
    flag = f"--{name}"
    if isinstance(value, list):
        return [flag, *map(_argument, value)] if value else []
    if value is None:
        if flag.replace("_", "-") in _NEED_VALUE:
            raise UsageError(
                f"{source}: it has no value.",
                remedy='leave the line out, or quote a word such as "~" or "null".',
            )
        return []
    if isinstance(value, bool):
        _refuse_misread(source, name, is_on=value, environment=environment)
        return [flag] if value else []
    return [f"{flag}={_argument(value)}"]


def _refuse_misread(source: str, name: str, *, is_on: bool, environment: Mapping[str, str]) -> None:
    """Refuse a line from which vLLM would take a switch, or which it would drop."""
    ours = next((flag for flag in flags() if flag.name == f"--{name.replace('_', '-')}"), None)
    if ours is None:
        return
    if not ours.is_switch:  # YAML reads `on` as true, `off` and `no` as false
        raise UsageError(
            f"{source}: YAML read this as {is_on}.",
            remedy=f'quote it, for example {name}: "{"on" if is_on else "off"}".',
        )
    if not is_on and ours.read(environment.get(ours.variable, "0"), ours.variable):
        raise UsageError(
            f"{source}: false has no effect, because {ours.variable} switches it on.",
            remedy=f"leave the line out, and unset {ours.variable}.",
        )


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

        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            """Refuse text that its tag does not fit: each tag fails in a way of its own."""
            try:
                made = super().construct_object(node, deep)
                if isinstance(made, int):
                    str(made)  # which Python refuses for thousands of digits, here from hex
            except (ArithmeticError, AttributeError, LookupError, ValueError) as error:
                raise yaml.constructor.ConstructorError(
                    None, None, None, node.start_mark
                ) from error
            return made

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
