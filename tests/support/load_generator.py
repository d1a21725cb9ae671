"""Clients that ask the same greedy questions again and again, and check every answer."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import openai

from heard_streams import HeardStream
from servers import Server
from stream_features import asked_log_probs, feature_body, shows

TOKEN_IDS = range(20, 200)
REQUEST_SECONDS = 600.0
ERROR_SECONDS = 0.2
"""Before a client that got no answer asks again."""
KINDS = ("completion", "chat", "several", "streamed completion", "streamed chat", "response")
CLEAR_MARGIN = 1e-3
"""By how much the log-prob of the first token is above that of the second where no rounding of
32-bit floats changes their order: that of another batch moves them by about 1e-5."""
LOG_PROB_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class Question:
    """One request and, after `asked`, the answer it has when nothing goes wrong."""

    kind: str
    prompt: tuple[int, ...]
    max_tokens: int
    feature: str = ""
    """One of `stream_features.FEATURES`, or empty for plain text without a natural end."""

    @property
    def name(self) -> str:
        """What a server's log calls such a request, before a dot."""
        return "-".join(f"{self.kind} {self.feature}".split())


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got."""

    question: Question
    texts: tuple[str, ...] = ()
    """One for each choice; of a stream what was said, thought and called."""
    finish_reasons: frozenset[str] = frozenset()
    tokens: tuple[int, ...] = ()
    """Of a stream of completions or chats."""
    usage: tuple[int, int] = (0, 0)
    """Tokens of the prompt and of the answer; only of a stream."""
    log_probs: tuple[float, ...] = field(default=(), compare=False)
    error: str = ""
    is_begun: bool = False
    """Whether a stream had sent something before it broke; `texts` is what it had sent."""
    started_seconds: float = field(default=0.0, compare=False)
    """Of `time.monotonic()`, when it was asked for the first time."""
    ended_seconds: float = field(default=0.0, compare=False)

    @property
    def is_stream(self) -> bool:
        """Whether it came as one."""
        return self.question.kind.startswith("streamed")

    @property
    def shows_feature(self) -> bool:
        """Whether a stream has what was asked for, and nothing else."""
        return shows(self.question.feature, self.texts, self.log_probs)

    def agrees_with(self, other: Answer) -> bool:
        """Return whether both are the same answer, up to the rounding of log-probs."""
        nears = zip(self.log_probs, other.log_probs, strict=False)
        return (
            self == other
            and len(self.log_probs) == len(other.log_probs)
            and all(abs(one - another) <= LOG_PROB_TOLERANCE for one, another in nears)
        )


def questions(
    seed: int, *, count: int, longest_tokens: int, kinds: Sequence[str] = KINDS
) -> list[Question]:
    """Of every kind, with prompts of every length up to `longest_tokens`."""
    chosen = random.Random(seed)
    return [
        Question(
            kinds[number % len(kinds)],
            tuple(chosen.choices(TOKEN_IDS, k=max(1, int(longest_tokens ** chosen.random())))),
            chosen.choice((8, 32, 128)),
        )
        for number in range(count)
    ]


def client_of(server: Server, *, retries: int = 0) -> openai.OpenAI:
    """Return the official client, which retries what it is told to, at most `retries` times."""
    return openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=server.api_key or "none",
        max_retries=retries,
        timeout=REQUEST_SECONDS,
    )


def ask(client: openai.OpenAI, model: str, question: Question) -> Answer:
    """The answer as the official client sees it; its errors are in it, not raised."""
    started = time.monotonic()
    answer = _ask(client, model, question)
    return replace(answer, started_seconds=started, ended_seconds=time.monotonic())


def _ask(client: openai.OpenAI, model: str, question: Question) -> Answer:
    create, parameters = _request(client, model, question)
    if question.kind.startswith("streamed"):
        return _streamed(create, parameters, question)
    try:
        answer = create(**parameters)
    except openai.APIError as error:
        return Answer(question, error=f"{type(error).__name__}: {error}")
    if question.kind == "response":
        return Answer(question, (answer.output_text,), frozenset({str(answer.status)}))
    return Answer(
        question,
        tuple(_text(choice) for choice in answer.choices),
        frozenset(choice.finish_reason for choice in answer.choices),
    )


def _request(client: openai.OpenAI, model: str, question: Question) -> tuple[Any, dict[str, Any]]:
    """Return the client's method for a question, and its arguments."""
    is_chat = question.kind.endswith("chat")
    parameters: dict[str, Any] = {
        "model": model,
        # Two answers that are alike would be none; without randomness vLLM wants n = 1.
        "temperature": 1e-3 if question.kind == "several" else 0.0,
        "extra_body": feature_body(question.feature, is_chat=is_chat),
    }
    if question.kind.endswith("response"):
        asked = {"input": _words(question), "max_output_tokens": question.max_tokens}
        return client.responses.create, {**parameters, **asked}
    parameters["max_tokens"] = question.max_tokens
    if is_chat:
        messages = [{"role": "user", "content": _words(question)}]
        return client.chat.completions.create, {**parameters, "messages": messages}
    if question.kind == "several":
        parameters["n"] = 2
    return client.completions.create, {**parameters, "prompt": list(question.prompt)}


def _words(question: Question) -> str:
    return "".join(map(chr, question.prompt))


def _streamed(create: Any, parameters: Mapping[str, Any], question: Question) -> Answer:
    options: dict[str, Any] = {
        "stream": True,
        "extra_headers": {"x-request-id": f"{question.name}.{uuid4().hex}"},
    }
    if not question.kind.endswith("response"):
        body = {**parameters["extra_body"], "return_token_ids": True}
        options |= {"extra_body": body, "stream_options": {"include_usage": True}}
    heard = HeardStream()
    told = ""
    try:
        for chunk in create(**{**parameters, **options}):
            heard.hear(chunk)
    except (openai.APIError, openai.APIConnectionError) as error:
        told = f"{type(error).__name__}: {error}"
    if not told and not heard.reasons:
        told = "the stream ended without a reason"
    return Answer(
        question,
        heard.texts,
        frozenset(heard.reasons),
        tuple(heard.tokens),
        heard.usage,
        tuple(heard.log_probs),
        error=told,
        is_begun=bool(told) and any(heard.texts),
    )


def _text(choice: Any) -> str:
    return str(choice.text if hasattr(choice, "text") else choice.message.content)


def is_clear(client: openai.OpenAI, model: str, question: Question) -> bool:
    """Return whether no rounding changes the greedy answer: each token is first by a margin.

    A response is judged by the chat that it stands for, and several answers by one of them.
    """
    is_chat = question.kind.endswith(("chat", "response"))
    judged = replace(question, kind="chat" if is_chat else "completion")
    create, parameters = _request(client, model, judged)
    body = {**parameters["extra_body"], **asked_log_probs(2, is_chat=is_chat)}
    (choice,) = create(**{**parameters, "extra_body": body}).choices
    return all(margin >= CLEAR_MARGIN for margin in margins(choice.logprobs))


def margins(log_probs: Any) -> Iterator[float]:
    """Yield by how much the first token was ahead of the second, at each place of an answer."""
    if hasattr(log_probs, "top_logprobs"):
        tops = [list(place.values()) for place in log_probs.top_logprobs]
    else:
        tops = [[one.logprob for one in place.top_logprobs] for place in log_probs.content]
    for top in tops:
        first, *others = sorted(top, reverse=True)
        yield first - others[0] if others else float("inf")


@dataclass
class Load:
    """What the clients of one `loaded` have got so far."""

    expected: Mapping[Question, Answer]
    answers: list[Answer] = field(default_factory=list)

    @property
    def lost(self) -> list[Answer]:
        """Answers that had to come whole and did not: all but streams that had begun."""
        return [a for a in self.answers if a.error and not (a.is_stream and a.is_begun)]

    @property
    def broken(self) -> list[Answer]:
        """Streams that ended in an error after they had begun."""
        return [a for a in self.answers if a.error and a.is_stream and a.is_begun]

    @property
    def wrong(self) -> list[Answer]:
        """Answers that differ from those of an undisturbed run; of broken ones what was sent."""
        whole = [
            a for a in self.answers if not a.error and not a.agrees_with(self.expected[a.question])
        ]
        return whole + [a for a in self.broken if not self._is_beginning(a)]

    def _is_beginning(self, answer: Answer) -> bool:
        expected = self.expected[answer.question].texts
        told = zip(answer.texts, expected, strict=True)
        return all(whole.startswith(begun) for begun, whole in told)

    def summary(self) -> str:
        """How many of each, for people."""
        counts = Counter("whole" if not a.error else a.error for a in self.answers)
        return ", ".join(f"{count} x {what}" for what, count in counts.most_common())


@contextmanager
def loaded(
    server: Server,
    expected: Mapping[Question, Answer],
    *,
    clients: int,
    seed: int,
    is_once: bool = False,
    retries: int = 0,
) -> Iterator[Load]:
    """Let clients ask without a pause, or once; on leaving, wait for all answers."""
    load = Load(expected)
    stopping = threading.Event()
    model = server.model

    def ask_on(number: int) -> None:
        chosen = random.Random(seed * 1000 + number)
        with client_of(server, retries=retries) as client:
            while not stopping.is_set():
                answer = ask(client, model, chosen.choice(list(expected)))
                load.answers.append(answer)
                if is_once:
                    return
                if answer.error:
                    stopping.wait(ERROR_SECONDS)

    threads = [threading.Thread(target=ask_on, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def undisturbed(server: Server, asked: list[Question]) -> dict[Question, Answer]:
    """The answers of a server that nobody disturbs."""
    with client_of(server) as client:
        answers = {question: ask(client, server.model, question) for question in asked}
    failed = [answer for answer in answers.values() if answer.error]
    assert not failed, failed
    return answers
