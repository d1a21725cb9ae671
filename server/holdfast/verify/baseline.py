"""A baseline: what `holdfast verify --record` writes, and what `--against` and the server read.

The file is JSON, packed with gzip, in the shape of `docs/schemas/holdfast-baseline-1.schema.json`.
It has no prompt of a user, and no key.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from holdfast.atomic_files import write_atomically
from holdfast.errors import UsageError
from holdfast.verify.records import Limit, Number, at_least

SCHEMA: Literal["holdfast-baseline/1"] = "holdfast-baseline/1"
"""Rises when a reader of baselines has to change."""

WIDTH = 8
"""How many of the likeliest tokens are recorded and compared at each position."""
NOISE_FACTOR = 3.0
"""By how much a difference may exceed the measured noise: a sample does not show its worst case."""

OWN_TASKS = "own tasks solved"
"""The score of `--tasks`."""
LM_EVAL = "lm-eval "
"""How the scores of `--lm-eval` begin; the rest of the name says what was asked."""
_STANDARD_ERRORS = 2
_MAX_PACKED_BYTES = 16 * 1024 * 1024
_MAX_BYTES = 128 * 1024 * 1024
_MAX_ENTRIES = 1_000_000
_GZIP_MAGIC = b"\x1f\x8b"
_STRICT = ConfigDict(extra="forbid", strict=True)

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[tuple[TokenId, ...], Field(max_length=_MAX_ENTRIES)]
LogProb = Annotated[float, Field(allow_inf_nan=False, le=0.01)]
"""Natural logarithm of a probability; the sum of rounded ones may be a little above 1."""
RecordedTop = Annotated[tuple[tuple[TokenId, LogProb], ...], Field(max_length=1000)]
"""The likeliest tokens at one position, and the token that stands there."""
Difference = Annotated[float, Field(allow_inf_nan=False, ge=0)]


@dataclass(frozen=True, slots=True)
class Score:
    """A share of right answers."""

    __pydantic_config__ = _STRICT

    value: Annotated[float, Field(ge=0, le=100)]
    """In %."""
    of: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """How many tasks it is a share of."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The server that was recorded, as it said of itself."""

    __pydantic_config__ = _STRICT

    model: str
    """The name that clients send as `model`."""
    vllm: str
    """Its version; empty if the server did not tell."""
    max_model_len: int | None
    fingerprint: str
    """`system_fingerprint` of its answers; empty if they had none."""
    tool: str
    """The version of Holdfast that recorded."""
    verdict: str
    """The verdict of the run that recorded: a baseline of a server that failed is one, too."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How far the server that was recorded differs from itself, in nats."""

    __pydantic_config__ = _STRICT

    median: Difference = 0.0
    p999: Difference = 0.0
    """99.9 % of the differences are smaller."""
    divergence: Difference = 0.0
    """Mean Kullback-Leibler divergence over the likeliest tokens, of a position from itself."""


@dataclass(frozen=True, slots=True)
class RecordedSequence:
    """A prompt, its greedy answer, and how likely both were."""

    __pydantic_config__ = _STRICT

    prompt_ids: TokenIds
    answer_ids: TokenIds
    tops: Annotated[tuple[RecordedTop, ...], Field(max_length=_MAX_ENTRIES)]
    """For every token of both but the first: teacher-forced, in one prefill."""


@dataclass(frozen=True, slots=True)
class RecordedText:
    """A text of the tool, or a chat with that one message, and the prompt that it became."""

    __pydantic_config__ = _STRICT

    text: Annotated[str, Field(max_length=100_000)]
    is_chat: bool
    token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The likeliest first tokens after a short prompt, asked several times."""

    __pydantic_config__ = _STRICT

    prompt_ids: TokenIds
    samples: Annotated[tuple[RecordedTop, ...], Field(max_length=1000)]


@dataclass(frozen=True, slots=True)
class RecordedContext:
    """What follows a prompt that is too long for the log-probs of all its tokens."""

    __pydantic_config__ = _STRICT

    prompt_ids: TokenIds
    top: RecordedTop


@dataclass(frozen=True, slots=True)
class Baseline:
    """A recorded run."""

    __pydantic_config__ = _STRICT

    scores: Mapping[str, Score] = field(default_factory=dict)
    """Each number with `of` that a check measured, by its `tasks.score_key`; by its name alone in a
    file that does not tell what was asked."""
    recorded_at: str = ""
    """UTC, ISO 8601."""
    origin: Origin | None = None
    noise: Noise = field(default_factory=Noise)
    sequences: Annotated[tuple[RecordedSequence, ...], Field(max_length=1000)] = ()
    first_tokens: Annotated[tuple[FirstToken, ...], Field(max_length=1000)] = ()
    texts: Annotated[tuple[RecordedText, ...], Field(max_length=1000)] = ()
    contexts: Annotated[tuple[RecordedContext, ...], Field(max_length=1000)] = ()
    contexts_noise: Noise = field(default_factory=Noise)
    """The noise of `contexts`, which add up more."""
    schema: Literal["holdfast-baseline/1"] = SCHEMA


def write_baseline(baseline: Baseline, path: Path) -> None:
    """Write the file so that after any crash it is the old one or the new one.

    Raises:
        OSError: it could not be written.
    """
    content = TypeAdapter(Baseline).dump_json(baseline)
    write_atomically(path, gzip.compress(content, mtime=0))


def read_baseline(path: Path, flag: str = "--against") -> Baseline:
    """Read the file that `flag` names.

    Raises:
        UsageError: it cannot be read, or is not a baseline that this version knows.
    """
    try:
        content = _unpacked(path)
        _check_schema(json.loads(content))
        return TypeAdapter(Baseline).validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        why = f"{where}: {first['msg']}"
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, RecursionError, EOFError, zlib.error) as error:
        why = str(error)
    raise UsageError(
        f"{flag}: {path} is not a baseline: {why}.",
        remedy="record one with `holdfast verify URL --record FILE`.",
    )


def published_schema() -> dict[str, Any]:
    """The JSON schema of the file before it is packed."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Baseline of holdfast verify",
    }
    return TypeAdapter(Baseline).json_schema(mode="serialization") | head


def limit_of(share: Number, key: str, baseline: Baseline | None) -> Limit | None:
    """What a share must reach: that of the baseline, less two standard errors of the difference.

    The standard error is that of two proportions with the same true value, so it is not 0 where
    one of the runs got everything right. None if the baseline does not know the share.
    """
    recorded = _recorded(share, key, baseline) if baseline else None
    if recorded is None or not share.of:
        return None
    right = (recorded.value * recorded.of + share.value * share.of) / 100
    pooled = right / (recorded.of + share.of)
    error = math.sqrt(pooled * (1 - pooled) * (1 / recorded.of + 1 / share.of))
    return at_least(recorded.value - _STANDARD_ERRORS * 100 * error, "baseline")


def _recorded(share: Number, key: str, baseline: Baseline) -> Score | None:
    """The score of the same questions, as far as the file tells which ones were asked."""
    unnamed = baseline.scores.get(share.name)
    if unnamed is not None and share.name == OWN_TASKS and unnamed.of != share.of:
        unnamed = None
    return baseline.scores.get(key, unnamed)


def _check_schema(document: Any) -> None:
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA:
        raise ValueError(f"its schema is {str(found)[:60]!r} instead of {SCHEMA!r}")


def _unpacked(path: Path) -> bytes:
    if not path.is_file():  # a pipe would block its reader
        raise ValueError("it is not a file" if path.exists() else "there is no such file")
    if path.stat().st_size > _MAX_PACKED_BYTES:
        raise ValueError(f"it has more than {_MAX_PACKED_BYTES} bytes")
    with path.open("rb") as file:
        if file.read(len(_GZIP_MAGIC)) != _GZIP_MAGIC:
            raise ValueError("it is not packed with gzip")
    with gzip.open(path) as unpacked:
        content = unpacked.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"unpacked it has more than {_MAX_BYTES} bytes")
    return content
