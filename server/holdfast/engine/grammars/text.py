"""What is a grammar known by? Its fields as JSON, and the digest of that."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

MAX_GRAMMAR_BYTES = 512 << 10
"""The largest grammar, as JSON. vLLM has no bound, and some of its loops are quadratic."""


def grammar_text(constraint: StructuredOutputsParams) -> bytes:
    """Return the fields that were set, as JSON.

    Raises:
        VLLMValidationError: they are too large, or are not JSON.
    """
    given = {
        one.name: value
        for one in fields(constraint)
        if one.init and (value := getattr(constraint, one.name)) is not one.default
    }
    if _is_longer(given, MAX_GRAMMAR_BYTES):
        raise VLLMValidationError(_TOO_LARGE)
    try:
        text = json.dumps(given).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise VLLMValidationError(f"The grammar is not JSON: {error}.") from error
    if len(text) > MAX_GRAMMAR_BYTES:
        raise VLLMValidationError(_TOO_LARGE)
    return text


def digest_of(grammar: bytes) -> bytes:
    """Return the digest under which the result of its trial is remembered."""
    return hashlib.sha256(grammar).digest()


def _is_longer(value: Any, most_bytes: int) -> bool:
    """Whether its JSON is longer than this, without producing all of it."""
    left, todo = most_bytes, [value]
    while todo and left >= 0:
        one = todo.pop()
        if isinstance(one, str):
            left -= len(one)
        elif isinstance(one, Mapping):
            left -= len(one)
            todo.extend(one.keys())
            todo.extend(one.values())
        elif isinstance(one, list | tuple):
            left -= len(one)
            todo.extend(one)
        left -= 1
    return left < 0


_TOO_LARGE = f"The grammar of the request is larger than {MAX_GRAMMAR_BYTES >> 10} KiB."
