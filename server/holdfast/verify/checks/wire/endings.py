"""Does an answer end where it was told to?"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from holdfast.verify.answers import dig
from holdfast.verify.check import Check
from holdfast.verify.checks.asking import PROMPT, each, judge_each
from holdfast.verify.streams import StreamedAnswer, delta_text
from holdfast.verify.trial import InconclusiveError, SkippedError, Trial

_TOKENS = 24
_CUT_TOKENS = 4
_STOP_CHARACTERS = 3
_SEAM_CHARACTERS = 2
"""On each side of the place where an event ends, and with it a token."""


async def length(trial: Trial) -> None:
    """An answer that is cut says so, at once and as a stream."""
    cuts = 0
    for path, body in each(trial, PROMPT):
        free = await trial.post(path, {**body, "max_tokens": _TOKENS})
        if dig(free.usage(), "completion_tokens", kind=int) <= _CUT_TOKENS:
            continue
        cuts += 1
        cut = {**body, "max_tokens": _CUT_TOKENS}
        whole = await trial.post(path, cut)
        stream = await trial.stream(path, cut)
        ends = ((whole.finish_reason(), whole), (stream.said().finish_reason, stream))
        for reason, answer in ends:
            said = f"an answer that max_tokens cut ended by {reason!r} and not by 'length'"
            trial.require(reason == "length", said, answer)
    if not cuts:
        raise SkippedError(f"the model ends its answers within {_CUT_TOKENS} tokens")


async def stop(trial: Trial) -> None:
    """A text from the middle of the model's own answer ends the next one before it."""
    await judge_each(trial, _judge_stop, PROMPT, max_tokens=_TOKENS)


async def _judge_stop(trial: Trial, path: str, body: dict[str, Any]) -> None:
    unstopped = await trial.post(path, body)
    free = unstopped.content()
    text = _across_events(await trial.stream(path, body), free) or _middle(free)
    if text in unstopped.reasoning():
        raise SkippedError("the stop text would end the model's thoughts before its answer")
    wanted = free[: free.index(text)]
    stopped = {**body, "stop": [text]}
    whole = await trial.post(path, stopped)
    alone = await trial.post(path, {**body, "stop": text})
    stream = await trial.stream(path, stopped)
    said = stream.said()
    if {whole.content(), alone.content(), said.content} != {wanted}:
        if (await trial.post(path, body)).content() != free:
            raise InconclusiveError("the server does not give the same greedy answer twice")
        if (await trial.stream(path, body)).said().content != free:
            raise InconclusiveError("a stream differs without a stop text; see wire.stream_twin")
    for found, reason, answer in (
        (whole.content(), whole.finish_reason(), whole),
        (alone.content(), alone.finish_reason(), alone),
        (said.content, said.finish_reason, stream),
    ):
        trial.require(text not in found, f"the answer goes on past {text!r}", answer)
        trial.require(reason == "stop", f"it ended by {reason!r} and not by 'stop'", answer)
        is_same = found == wanted or text in found
        trial.require(is_same, f"what comes before {text!r} is not what came before", answer)


def _across_events(stream: StreamedAnswer, answer: str) -> str:
    """The end of one event's text and the beginning of the next, where no token has both.

    Empty if the stream does not say what the answer does, or has no such text.
    """
    texts = list(map(delta_text, stream.choices(0)))
    if "".join(texts) != answer:
        return ""
    seams = set(accumulate(map(len, texts))) - {0, len(answer)}
    for seam in sorted(seams, key=lambda seam: abs(seam - len(answer) // 2)):
        begin = max(0, seam - _SEAM_CHARACTERS)
        text = answer[begin : seam + _SEAM_CHARACTERS]
        if _can_stop(text) and answer.find(text) == begin:
            return text
    return ""


def _middle(answer: str) -> str:
    """A few characters from the middle, which no answer but this one has to have."""
    middle = len(answer) // 2
    text = answer[middle : middle + _STOP_CHARACTERS]
    if len(text) < _STOP_CHARACTERS or not _can_stop(text):
        raise SkippedError("the model's answer has nothing in its middle to stop at")
    return text


def _can_stop(text: str) -> bool:
    return bool(text.strip()) and "\N{REPLACEMENT CHARACTER}" not in text


CHECKS = (
    Check("length", "wire", length, "An answer that `max_tokens` cuts ends by `length`."),
    Check(
        "stop",
        "wire",
        stop,
        "A stop text ends the answer just before it, even where it spans several tokens.",
    ),
)
