"""What an answer says of itself, in whichever API and way it comes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from holdfast.verify.answers import MalformedError, constant_in, dig, dig_or, excerpt, read_json
from holdfast.verify.streams import StreamedAnswer
from holdfast.verify.target import Answer
from holdfast.verify.trial import MODELS, Trial

_OF_A_SNAPSHOT = re.compile(
    r"-(?:\d{4}|\d{6}|\d{8}|\d{4}-\d\d-\d\d|0\d\d|(?:0[1-9]|1[0-2])-(?:\d{4}|[0-3]\d))"
)
"""How the name of one goes on behind that of its model.

gpt-4-0613, gpt-4o-2024-08-06, gemini-1.5-pro-002, command-r-08-2024,
gemini-2.5-flash-preview-05-20.
"""
_SHOWN = 160
"""Characters of an error, in a fault."""


async def judge_name(
    trial: Trial, answer: Answer | StreamedAnswer, document: Mapping[str, Any]
) -> None:
    """Blame the name of another model that is listed; an alias is the same one.

    vLLM answers with the first of its `--served-model-name`, OpenAI with the name of a snapshot.

    Raises:
        MalformedError: the document, which is the answer or a part of it, names no model.
    """
    named, asked = dig(document, "model", kind=str), trial.server.model
    if named == asked:
        return
    roots = await _roots(trial)
    told = f"it names the model {named!r} and not {asked!r}"
    is_dated = named.startswith(asked) and _OF_A_SNAPSHOT.fullmatch(named, len(asked))
    is_snapshot = is_dated and not roots.get(asked)
    is_alias = bool(roots.get(asked)) and roots.get(asked) == roots.get(named)
    if not named or (named in roots and not (is_alias or is_snapshot)):
        trial.blame(told, answer)
    elif not is_alias:
        trial.warn(told, answer)


def has_no_error(trial: Trial, answer: Answer | StreamedAnswer) -> bool:
    """Blame an error that comes in place of an answer, or of a part of one, though with 200.

    A stream may break off behind it.

    Raises:
        MalformedError: the answer at once is not an object.
    """
    documents = _objects_in(answer) if isinstance(answer, StreamedAnswer) else [answer.document]
    errors = [one for one in documents if one.get("error")]
    said = f"it is an error: {excerpt(str(errors[0]['error']), _SHOWN)}" if errors else ""
    return trial.require(not errors, said, answer)


def require_strict(trial: Trial, answer: Answer | StreamedAnswer) -> None:
    """Blame a constant such as NaN, at which most clients stop reading."""
    texts = [answer.text]
    if isinstance(answer, StreamedAnswer):
        texts = [event.data for event in answer.frames.events]
    if found := next(filter(None, map(constant_in, texts)), ""):
        trial.blame(f"it has {found} in it, which is not JSON", answer)


def require_same_input(
    trial: Trial, stream: StreamedAnswer, counted: Sequence[int], wanted: int
) -> None:
    """Blame a stream that counts other tokens read than the same answer at once.

    A count of 0 says that it is not known yet, so not all of them may be 0. Some servers guess at
    first, and are warned of.
    """
    if not wanted:
        return
    known = [count for count in counted if count]
    said = f"it counts no tokens read, and the same answer at once {wanted}"
    trial.require(known, said, stream)
    for place, count in enumerate(known, 1):
        is_guess = place < len(known) and not trial.server.is_vllm
        note = trial.warn if is_guess else trial.blame
        if count != wanted:
            note(f"it counts {count} tokens read, and the same answer at once {wanted}", stream)


def _objects_in(stream: StreamedAnswer) -> list[dict[str, Any]]:
    """The events that are JSON objects, also of a stream that is broken elsewhere."""
    found = []
    for event in stream.frames.events:
        with suppress(MalformedError):
            found.append(read_json(event.data))
    return [one for one in found if isinstance(one, dict)]


async def _roots(trial: Trial) -> dict[str, str]:
    """What each listed name stands for; empty where the server does not say."""
    listed = await trial.admitted(partial(trial.ask, MODELS))
    models: list[Any] = dig_or(listed.document, "data", default=[])
    return {dig_or(one, "id", default=""): dig_or(one, "root", default="") for one in models}
