"""Conversations that grow turn by turn, and the reading of one answer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

from holdfast.verify.answers import MalformedError, dig
from holdfast.verify.target import Answer
from holdfast.verify.trial import CHAT, ChatMessage, Trial, UnexpectedStatusError

REQUEST_SECONDS = 600.0
"""The deadline of one answer: a long prefill of a neighbour may come first."""
_OK = 200
_MOST_TURNS = 12
_MOST_TOKENS = 8192
_ANSWER_TOKENS = 48
_QUESTIONS = (
    "Tell me about the harbour.",
    "What did the harbour master write down?",
    "Why is that so?",
    "And how deep is the water there?",
    "Say it again in other words.",
    "Which ship came in last?",
    "What should I do if the rope is wet?",
    "Thank you. What is seven times eight?",
)


class Talk:
    """One conversation after another; each grows until it is long, and has a beginning of its own.

    Its turns share a prefix, which a prefix cache finds.
    """

    def __init__(self, trial: Trial, longest_tokens: int, drawn: random.Random) -> None:
        self._trial = trial
        self._most_tokens = min(longest_tokens // 2, _MOST_TOKENS)
        self._drawn = drawn
        self._messages: list[ChatMessage] = []

    async def go_on(self) -> None:
        """Ask the next question, and keep the answer.

        Raises:
            NoAnswerError: there is no answer in time.
            InconclusiveError: the server does not let it in before the deadline.
            UnexpectedStatusError: its status is not 200.
            MalformedError: it is not whole.
        """
        question = self._drawn.choice(_QUESTIONS)
        if not self._messages:
            question = f"This is log book {self._drawn.randrange(1 << 31)}. {question}"
        messages = [*self._messages, {"role": "user", "content": question}]
        self._messages = []  # a turn that fails ends the conversation
        body = self._trial.chat_body(messages, max_tokens=_ANSWER_TOKENS)
        said, tokens = await read(self._trial, CHAT, body, is_streamed=self._drawn.random() < 0.5)
        is_long = len(messages) >= 2 * _MOST_TURNS or tokens >= self._most_tokens
        if not is_long:
            answer = {"role": "assistant", "content": said or "I cannot say."}
            self._messages = [*messages, answer]


async def read(
    trial: Trial, path: str, body: Mapping[str, Any], *, is_streamed: bool
) -> tuple[str, int]:
    """What the answer says, and the tokens of prompt and answer.

    It goes past `Trial.stream`, because a report should not repeat prompts of any length.

    Raises:
        NoAnswerError: there is no answer in time.
        InconclusiveError: the server does not let it in before the deadline.
        UnexpectedStatusError: its status is not 200.
        MalformedError: it is not whole.
    """
    options = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
    request = trial.request(path, {**body, **options})
    stream = await trial.admitted(partial(trial.target.stream, request), REQUEST_SECONDS)
    if stream.status != _OK:
        raise UnexpectedStatusError(stream)
    if is_streamed:
        said, usage = stream.said(), stream.usage()
        if not said.finish_reason:
            raise MalformedError(f"{path}: a stream ends without a finish reason")
        return said.content, dig(usage, "total_tokens", kind=int)
    answer = Answer(request, stream.status, stream.content_type, stream.text, stream.seconds)
    answer.finish_reason()
    return answer.content(), dig(answer.usage(), "total_tokens", kind=int)
