"""A YAML file that a flag names. It may contain keys, and it may be too large for the memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError

STANDARD_INPUT = Path("-")
MOST_FILE_BYTES = 4 * 1024 * 1024
MOST_NODES = 1_000_000
"""A few lines of aliases that refer to aliases can make more."""


def read_yaml(flag: str, path: Path) -> list[Any]:
    """Return the documents of the file; `-` is standard input.

    Raises:
        UsageError: the file cannot be read; its content is not quoted.
    """
    import yaml  # noqa: PLC0415 - only where a flag names such a file

    try:
        documents = list(yaml.safe_load_all(_text(path)))
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


def nodes(node: Any) -> Iterator[Any]:
    """Yield the node and all nodes in it; an aliased node comes once for each alias."""
    yield node
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in inner:
        yield from nodes(child)


def _refuse_bomb(documents: list[Any]) -> None:
    if any(count > MOST_NODES for count, _ in enumerate(nodes(documents))):
        raise ValueError("it is too large")


def _text(path: Path) -> str:
    """Read the text; ValueError if it is too large, or not UTF-8."""
    if path == STANDARD_INPUT:
        content = sys.stdin.buffer.read(MOST_FILE_BYTES + 1)
    else:
        with path.open("rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
    if len(content) > MOST_FILE_BYTES:
        raise ValueError("it is too large")
    return content.decode("utf-8")
