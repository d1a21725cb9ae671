"""What do other people's tools say of it? They are part of the extra `verify`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from holdfast.verify.check import Check
from holdfast.verify.checks.asking import PROMPT, post_listed
from holdfast.verify.checks.wire.responses import RESPONSES
from holdfast.verify.other_tools import Wish, rows_of
from holdfast.verify.streams import DONE, NO_DONE, StreamedAnswer
from holdfast.verify.target import Answer
from holdfast.verify.trial import CHAT, COMPLETIONS, MODELS, SkippedError, Trial

_MAX_TOKENS = 256
_TO_CALL = "What is the weather in Paris now? Use the tool."
_FUNCTION = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_PONG = "reply exactly PONG"
_FRAMING = "stream.sse-framing"
"""It fails a line that begins with `data:` and no space, and then judges nothing else of a stream,
which `wire.events` and `wire.usage` do."""
_WITHOUT_SPACE = re.compile(r"(?:^|[\r\n])data:(?! )")
_OF_ANOTHER_CHECK = "stream.incremental-delivery"
"""It warns if a client that is busy reads the few tokens of its answer at once. `wire.incremental`
asks for a longer answer."""


async def openai_types(trial: Trial) -> None:
    """The types of OpenAI's client take what the server says, and strictly so."""
    # It takes a second to import, and is here only if the extra is.
    from openai.types import Completion, Model  # noqa: PLC0415 - see above
    from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: PLC0415 - see above
    from openai.types.responses import Response  # noqa: PLC0415 - see above

    listed = await trial.admitted(partial(trial.ask, MODELS))
    for entry in listed.document.get("data", []):
        _require(trial, Model, entry, listed)
    for body in _chats(trial):
        whole = await trial.post(CHAT, body)
        _require(trial, ChatCompletion, whole.document, whole)
        stream = await trial.stream(CHAT, body)
        for document in stream.documents:
            _require(trial, ChatCompletionChunk, document, stream)
    if "completions" in trial.server.abilities:
        body = trial.completion_body(PROMPT, max_tokens=8)
        completion = await trial.post(COMPLETIONS, body)
        _require(trial, Completion, completion.document, completion)
        stream = await trial.stream(COMPLETIONS, body)
        for document in stream.documents:
            _require(trial, Completion, document, stream)
    if "chat" in trial.server.abilities:  # vLLM lists responses also where no template writes them
        with suppress(SkippedError):  # not every server has it
            asked = {"model": trial.server.model, "input": PROMPT, "max_output_tokens": 16}
            response = await post_listed(trial, RESPONSES, asked)
            _require(trial, Response, response.document, response)


def _chats(trial: Trial) -> Iterator[dict[str, Any]]:
    """A chat that is answered in words, and one in which the model may call a function."""
    if "chat" in trial.server.abilities:
        yield trial.chat_body(PROMPT, max_tokens=8)
    if "tools" in trial.server.abilities:
        yield trial.chat_body(_TO_CALL, tools=[_FUNCTION], max_tokens=_MAX_TOKENS)


def _require(trial: Trial, kind: Any, document: Any, answer: Answer | StreamedAnswer) -> None:
    """Note what the type first refuses.

    New versions of the client require more of a response, in which only vLLM has to follow them.
    """
    from pydantic import ValidationError  # noqa: PLC0415 - openai brings it

    try:
        kind.model_validate(document)
    except ValidationError as error:
        is_stream = isinstance(answer, StreamedAnswer)
        for one in error.errors(include_url=False):
            if is_stream and _is_to_come(one):
                continue
            where = ".".join(map(str, one["loc"]))
            is_new = kind.__name__ == "Response" and one["type"] == "missing"
            note = trial.warn if is_new and not trial.server.is_vllm else trial.blame
            note(f"{kind.__name__}: {where}: {one['msg']}", answer)
            return


def _is_to_come(error: Mapping[str, Any]) -> bool:
    """Whether an event ends nothing yet, for which OpenAI's type of a completion has no value."""
    return error["loc"][-1:] == ("finish_reason",) and error["input"] is None


async def provider_check(trial: Trial) -> None:
    """Tiers 1 to 4 of trustedrouter-provider-check: catalogue, chats, streams."""
    # Its requests have no limit, and a model that does not end would fill its context each time.
    sure = await trial.chat(_PONG, max_tokens=_MAX_TOKENS)
    if sure.finish_reason() == "length":
        raise SkippedError(f"the model does not end an answer within {_MAX_TOKENS} tokens")
    target = trial.target
    wish = Wish("provider-check", target.url, trial.server.model, target.api_key, target.secrets)
    rows = [row for row in await rows_of(wish) if row.name != _OF_ANOTHER_CHECK]
    for row in rows:
        said = f"{row.name}: {row.said}"
        if row.status == "fail" and row.name == _FRAMING and await _lacks_only_a_space(trial):
            trial.warn(f"{said}; the stream keeps to the standard, and strict readers fail on it")
        elif row.status == "fail" and row.name != "chat.pong":
            trial.blame(said)
        elif row.status in ("warn", "fail"):  # whether a model obeys is for other groups to say
            trial.warn(said)
    trial.measure("checks passed", sum(row.status == "pass" for row in rows))


async def _lacks_only_a_space(trial: Trial) -> bool:
    """Whether a stream leaves out the space behind `data:`, and else keeps to the standard.

    `wire.events` judges how it ends.
    """
    stream = await trial.stream(CHAT, trial.chat_body(_PONG, max_tokens=_MAX_TOKENS))
    is_standard = stream.is_of_events and not {*stream.frames.faults} - {NO_DONE}
    has_answer = any(event.data != DONE for event in stream.frames.events)
    return is_standard and has_answer and bool(_WITHOUT_SPACE.search(stream.text))


CHECKS = (
    Check(
        "openai_types",
        "wire",
        openai_types,
        "The types of OpenAI's client accept models, chats, calls, completions and responses.",
        packages=("openai",),
    ),
    Check(
        "provider_check",
        "wire",
        provider_check,
        "Tiers 1 to 4 of trustedrouter-provider-check pass: what a strict gateway asks for.",
        needs=("chat",),
        packages=("tr_provider_check",),
        is_asked_elsewhere=True,
    ),
)
