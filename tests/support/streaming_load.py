"""Clients of streams, half of them with features, beside clients of whole answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import compress

from load_generator import (
    Answer,
    Load,
    Question,
    client_of,
    is_clear,
    loaded,
    questions,
    undisturbed,
)
from servers import Server
from stream_features import CHAT_FEATURES, FEATURES

EACH = 3
"""Questions with each feature, and of each kind of whole answer."""
SPARES = 6
"""Further ones of each, for those whose greedy answer a rounding might change."""
PLAIN_STREAMS = ("streamed completion", "streamed chat", "streamed response")
WHOLE = ("completion", "chat", "several", "response")
FEATURE_TOKENS = 400
"""More than an answer takes that a grammar bounds."""
LOG_PROBS_TOKENS = 128
JUDGES = 16
"""Questions that are judged at once: a batch changes no margin by more than a rounding."""


def expected_streams(server: Server, seed: int, *, longest_tokens: int) -> dict[Question, Answer]:
    """Return streams and their undisturbed answers, half of them with features."""
    clear = _clear(server, asked_streams(seed, longest_tokens=longest_tokens))
    answers = undisturbed(server, half_featured(clear))
    plain = [a for a in answers.values() if not a.shows_feature]
    assert not plain, plain
    return answers


def expected_whole(server: Server, seed: int, *, longest_tokens: int) -> dict[Question, Answer]:
    """Return other questions, and their undisturbed answers."""
    number = (EACH + SPARES) * len(WHOLE)
    asked = questions(seed, count=number, longest_tokens=longest_tokens, kinds=WHOLE)
    return undisturbed(server, _clear(server, asked)[: EACH * len(WHOLE)])


def _clear(server: Server, asked: Sequence[Question]) -> list[Question]:
    """Return those whose greedy answer no rounding changes."""
    model = server.model
    with client_of(server) as client, ThreadPoolExecutor(JUDGES) as threads:
        found = list(threads.map(lambda question: is_clear(client, model, question), asked))
    return list(compress(asked, found))


def asked_streams(seed: int, *, longest_tokens: int) -> list[Question]:
    """Return plain streams of every kind, and streams with every feature, with spares."""
    long = questions(
        seed,
        count=EACH * len(FEATURES) + SPARES * len(PLAIN_STREAMS),
        longest_tokens=longest_tokens,
        kinds=PLAIN_STREAMS,
    )
    plain = [replace(question, max_tokens=4 * question.max_tokens) for question in long]
    featured = [
        replace(
            question,
            kind="streamed chat" if feature in CHAT_FEATURES else question.kind,
            # vLLM begins an answer with the prompt if no character ends where that ends.
            prompt=tuple(32 + token % 64 for token in question.prompt),
            max_tokens=LOG_PROBS_TOKENS if feature == "log-probs" else FEATURE_TOKENS,
            feature=feature,
        )
        for place, feature in enumerate(FEATURES, start=1)
        for question in questions(
            seed + place,
            count=EACH + SPARES,
            longest_tokens=longest_tokens,
            kinds=PLAIN_STREAMS[:2],
        )
    ]
    return [*plain, *featured]


def half_featured(streams: Sequence[Question]) -> list[Question]:
    """Return `EACH` with each feature, and as many plain ones.

    Raises:
        AssertionError: there are fewer.
    """
    plain = [question for question in streams if not question.feature]
    found: list[Question] = []
    for feature in FEATURES:
        with_it = [question for question in streams if question.feature == feature]
        assert len(with_it) >= EACH, f"only {len(with_it)} streams with a {feature}"
        found += with_it[:EACH]
    assert len(plain) >= len(found), f"only {len(plain)} plain streams"
    return [*plain[: len(found)], *found]


@dataclass
class BothLoads:
    """What the clients of streams and the others have got so far."""

    streams: Load
    whole: Load

    def check(self) -> None:
        """Assert that nobody has lost an answer or a stream, and that none differs."""
        for load in (self.streams, self.whole):
            assert not load.lost, load.lost
            assert not load.broken, load.broken
            wrong = [(answer, load.expected[answer.question]) for answer in load.wrong]
            assert not wrong, wrong


@contextmanager
def both_loaded(
    server: Server,
    streams: Mapping[Question, Answer],
    whole: Mapping[Question, Answer],
    *,
    clients: int,
    seed: int,
    is_once: bool = False,
) -> Iterator[BothLoads]:
    """Let this many clients ask for streams and this many others; see `loaded`."""
    with ExitStack() as stack:
        loads = [
            stack.enter_context(
                loaded(server, expected, clients=clients, seed=seed + place, is_once=is_once)
            )
            for place, expected in enumerate((streams, whole))
        ]
        yield BothLoads(*loads)
