"""Clients that ask the same greedy questions again and again, and check every answer."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import openai

from servers import Server

TOKEN_IDS = range(20, 200)
REQUEST_SECONDS = 600.0
KINDS = ("completion", "chat", "several", "streamed completion", "streamed chat", "response")


@dataclass(frozen=True, slots=True)
class Question:
    """One request and, after `asked`, the answer it has when nothing goes wrong."""

    kind: str
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got."""

    question: Question
    texts: tuple[str, ...] = ()
    finish_reasons: frozenset[str] = frozenset()
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


def questions(seed: int, *, count: int, longest_tokens: int) -> list[Question]:
    """Of every kind, with prompts of every length up to `longest_tokens`."""
    chosen = random.Random(seed)
    return [
        Question(
            KINDS[number % len(KINDS)],
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
    if question.kind == "response":
        return _response(client, model, question)
    if question.kind.endswith("chat"):
        options: dict[str, Any] = {"messages": [{"role": "user", "content": _words(question)}]}
        create: Any = client.chat.completions.create
    else:
        options = {"prompt": list(question.prompt)}
        create = client.completions.create
    if question.kind == "several":
        options["n"] = 2
    parameters = {
        "model": model,
        "max_tokens": question.max_tokens,
        # Two answers that are alike would be none; without randomness vLLM wants n = 1.
        "temperature": 1e-3 if question.kind == "several" else 0.0,
        "extra_body": {"ignore_eos": True, "top_k": 1},
        **options,
    }
    if question.kind.startswith("streamed"):
        return _streamed(create, parameters, question)
    try:
        answer = create(**parameters)
    except openai.APIError as error:
        return Answer(question, error=f"{type(error).__name__}: {error}")
    return Answer(
        question,
        tuple(_text(choice) for choice in answer.choices),
        frozenset(choice.finish_reason for choice in answer.choices),
    )


def _response(client: openai.OpenAI, model: str, question: Question) -> Answer:
    try:
        answer = client.responses.create(
            model=model,
            input=_words(question),
            max_output_tokens=question.max_tokens,
            temperature=0.0,
            extra_body={"ignore_eos": True, "top_k": 1},
        )
    except openai.APIError as error:
        return Answer(question, error=f"{type(error).__name__}: {error}")
    return Answer(question, (answer.output_text,), frozenset({str(answer.status)}))


def _words(question: Question) -> str:
    return "".join(map(chr, question.prompt))


def _streamed(create: Any, parameters: Mapping[str, Any], question: Question) -> Answer:
    parts: list[str] = []
    reasons: set[str] = set()
    try:
        for chunk in create(stream=True, **parameters):
            for choice in chunk.choices:
                parts.append(_delta(choice))
                if choice.finish_reason:
                    reasons.add(choice.finish_reason)
    except (openai.APIError, openai.APIConnectionError) as error:
        told = f"{type(error).__name__}: {error}"
        text = "".join(parts)
        return Answer(question, (text,), error=told, is_begun=bool(text))
    return Answer(question, ("".join(parts),), frozenset(reasons))


def _text(choice: Any) -> str:
    return str(choice.text if hasattr(choice, "text") else choice.message.content)


def _delta(choice: Any) -> str:
    return str((choice.text if hasattr(choice, "text") else choice.delta.content) or "")


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
        whole = [a for a in self.answers if not a.error and a != self.expected[a.question]]
        return whole + [a for a in self.broken if not self._is_beginning(a)]

    def _is_beginning(self, answer: Answer) -> bool:
        (told,), (expected,) = answer.texts, self.expected[answer.question].texts
        return expected.startswith(told)

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
                load.answers.append(ask(client, model, chosen.choice(list(expected))))
                if is_once:
                    return

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
