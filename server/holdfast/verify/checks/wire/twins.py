"""Does the server say the same in every way in which it can be asked?"""

from __future__ import annotations

from holdfast.verify.answers import dig
from holdfast.verify.check import Check
from holdfast.verify.checks.asking import PROMPT, each
from holdfast.verify.checks.twins import compare
from holdfast.verify.checks.wire.heads import has_no_error
from holdfast.verify.streams import Said, StreamedAnswer
from holdfast.verify.target import Answer
from holdfast.verify.trial import (
    COMPLETIONS,
    SkippedError,
    Trial,
    UnexpectedStatusError,
)
from holdfast.verify.waiting import together

_UNUSUAL = "naïve 北京 \N{SLIGHTLY SMILING FACE}\N{ZERO WIDTH JOINER}\N{FIRE} 0.1e-5\n\ttabs"
_AT_ONCE = 8


async def stream_twin(trial: Trial) -> None:
    """A greedy answer as a stream, against the same at once."""
    asked = each(trial, PROMPT, max_tokens=48) + each(trial, _UNUSUAL, max_tokens=16)
    if "completions" in trial.server.abilities and await _echoes(trial):
        # Whatever the model is, this text is known.
        body = trial.completion_body(_UNUSUAL, max_tokens=1, echo=True)
        asked.append((COMPLETIONS, body))
    for path, body in asked:
        await compare(trial, path, body, _said, StreamedAnswer.said)
    trial.measure("requests compared", len(asked))


def _said(answer: Answer) -> Said:
    return Said(answer.content(), answer.reasoning(), answer.finish_reason())


async def _echoes(trial: Trial) -> bool:
    """Whether the server repeats the prompt before a completion, as OpenAI's did."""
    prompt = "holdfast"
    try:
        answer = await trial.complete(prompt, max_tokens=1, echo=True)
    except UnexpectedStatusError:
        return False
    return answer.content().startswith(prompt)


async def own_answers(trial: Trial) -> None:
    """Each of several clients gets its own prompt back, at once and as a stream."""
    if not await _echoes(trial):
        raise SkippedError("the server does not repeat prompts")
    prompts = [f"client {number} of {_AT_ONCE}" for number in range(_AT_ONCE)]
    bodies = [trial.completion_body(one, max_tokens=4, echo=True) for one in prompts]
    answers = await together(
        *(trial.post(COMPLETIONS, body) for body in bodies),
    )
    streams = await together(*(trial.stream(COMPLETIONS, body) for body in bodies))
    ids: list[str] = []
    for prompt, answer, stream in zip(prompts, answers, streams, strict=True):
        said = "a client got the answer of another one"
        with trial.demanding_form(answer):
            if has_no_error(trial, answer):
                trial.require(answer.content().startswith(prompt), said, answer)
                ids.append(dig(answer.document, "id", kind=str))
        if has_no_error(trial, stream):
            trial.require(stream.said().content.startswith(prompt), said, stream)
    are_told_apart = len(ids) < 2 or len(set(ids)) > 1
    trial.require(are_told_apart, f"{len(ids)} answers have the same id", answers[0])


CHECKS = (
    Check(
        "stream_twin",
        "wire",
        stream_twin,
        "A stream says what the same answer says at once: text, reasoning, finish reason.",
    ),
    Check(
        "own_answers",
        "wire",
        own_answers,
        "Each of several concurrent clients gets its own answer.",
        needs=("completions",),
    ),
)
