"""The mixed load: what each client asks next, drawn from the seed.

Each client deals its kinds of requests from a shuffled deck, so that every stretch of the soak has
the same mix, and one third can be compared with another.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.verify.answers import MalformedError, dig
from holdfast.verify.check import Ability
from holdfast.verify.checks.asking import either
from holdfast.verify.checks.sampling import sampling, takes_seeds
from holdfast.verify.checks.self_agreement.sequences import longest_tokens
from holdfast.verify.checks.soak.talk import REQUEST_SECONDS, Talk, read
from holdfast.verify.checks.tools.asking import ALARM, REQUIRED, WEATHER, refused_choices
from holdfast.verify.trial import CHAT, InconclusiveError, Trial, UnexpectedStatusError

_OK, _SERVER_ERROR = 200, 500
_MOST_LONG_TOKENS = 32_768
"""A longer prefill would leave no room for the rest of the mix."""
_LONG_SHARE = 0.75
"""The share of the longest prompt that is filled: the tokens of a text are estimated."""
_SAMPLE_LINES = 16
_ANSWER_TOKENS = (8, 24, 64)
_CALL_TOKENS = 96
_LEFT_TOKENS = 256
_TEMPERATURE = 0.8
_MOST_BYTES_BEFORE_LEAVING = 2000
_PLACES = ("harbour", "lighthouse", "shipyard", "ferry", "pier", "chandlery", "customs house")
_CITIES = ("Lisbon", "Oslo", "Porto", "Bergen", "Rome", "Tokyo")

CONVERSATION = "turns of conversations"
SHORT = "short prompts"
LONG = "long prompts"
TOOLS = "chats with functions"
LEFT = "streams that the client left"
REFUSED = "wrong requests"
DECK: Mapping[str, int] = {CONVERSATION: 8, SHORT: 4, LONG: 1, TOOLS: 3, LEFT: 3, REFUSED: 1}
"""How many of each kind are in one deck."""
_NEEDS: Mapping[str, Ability] = {CONVERSATION: "chat", TOOLS: "tools"}


@dataclass(frozen=True, slots=True)
class Room:
    """What requests may ask for."""

    longest_tokens: int
    """The most tokens of a prompt with its answer."""
    tokens_a_line: float
    choices: tuple[str, ...]
    """Each `tool_choice` that the server takes."""
    takes_seeds: bool

    @property
    def long_lines(self) -> int:
        """The number of lines of the longest prompt."""
        tokens = _LONG_SHARE * min(self.longest_tokens, _MOST_LONG_TOKENS)
        return max(int(tokens / self.tokens_a_line), 1)


async def room_of(trial: Trial) -> Room:
    """What is known after the first requests.

    Raises:
        InconclusiveError: the server does not say how long a prompt was.
        UnexpectedStatusError: a forced call of a function or a seed gets a 5xx.
    """
    path, body = either(trial, _lines(random.Random(0), _SAMPLE_LINES), max_tokens=1)  # noqa: S311 - the same in every run
    try:
        tokens = dig((await trial.post(path, body)).usage(), "prompt_tokens", kind=int)
    except (MalformedError, UnexpectedStatusError) as error:
        raise InconclusiveError(f"the first request of the soak failed: {error}") from None
    choices = await _choices(trial) if "tools" in trial.server.abilities else ()
    tokens_a_line = max(tokens, 1) / _SAMPLE_LINES
    return Room(longest_tokens(trial), tokens_a_line, choices, await takes_seeds(trial))


async def _choices(trial: Trial) -> tuple[str, ...]:
    """Return each `tool_choice` that the server takes, and warn of one that it refuses."""
    said = (await trial.once(refused_choices)).get(REQUIRED)
    if said is None:
        return ("auto", REQUIRED)
    trial.warn(said)
    return ("auto",)


class Client:
    """One of the clients."""

    def __init__(self, trial: Trial, room: Room, number: int, seed: int) -> None:
        self._trial = trial
        self._room = room
        self._drawn = random.Random(1_000_003 * seed + number)  # noqa: S311 - repeatable, no secret
        self._deck: list[str] = []
        self._talk = Talk(trial, room.longest_tokens, self._drawn)
        self._asks: Mapping[str, Callable[[], Any]] = {
            CONVERSATION: self._talk.go_on,
            SHORT: self._short,
            LONG: self._long,
            TOOLS: self._tools,
            LEFT: self._leave,
            REFUSED: self._wrong,
        }

    def next_kind(self) -> str:
        """The kind of the next request."""
        able = self._trial.server.abilities
        if not self._deck:
            self._deck = [
                kind
                for kind, count in DECK.items()
                for _ in range(count)
                if kind not in _NEEDS or _NEEDS[kind] in able
            ]
            self._drawn.shuffle(self._deck)
        return self._deck.pop()

    async def ask(self, kind: str) -> bool:
        """Ask, and read the whole answer; return whether its duration counts.

        Raises:
            NoAnswerError: there is no answer in time.
            InconclusiveError: the server does not let it in before the deadline.
            UnexpectedStatusError: it has another status than it should have.
            MalformedError: it is not whole.
        """
        await self._asks[kind]()
        return kind not in (LEFT, REFUSED)

    async def _short(self) -> None:
        prompt = _lines(self._drawn, self._drawn.randint(1, 4))
        options: dict[str, Any] = {"max_tokens": self._drawn.choice(_ANSWER_TOKENS)}
        if self._drawn.random() < 0.5:
            seed = self._drawn.randrange(1 << 31)
            options |= sampling(_TEMPERATURE, seed, is_seeded=self._room.takes_seeds)
        path, body = either(self._trial, prompt, **options)
        await read(self._trial, path, body, is_streamed=self._drawn.random() < 0.5)

    async def _long(self) -> None:
        """A prompt of any length up to the longest, as many short ones as long ones."""
        most = self._room.long_lines
        count = int(math.exp(self._drawn.uniform(math.log(max(most / 16, 1)), math.log(most))))
        path, body = either(self._trial, _lines(self._drawn, count), max_tokens=8)
        await read(self._trial, path, body, is_streamed=False)

    async def _tools(self) -> None:
        city = self._drawn.choice(_CITIES)
        choice = self._drawn.choice(self._room.choices)
        said = f"What is the weather in {city}? Use the tool."
        options = {"tools": [WEATHER, ALARM], "tool_choice": choice, "max_tokens": _CALL_TOKENS}
        body = self._trial.chat_body(said, **options)
        await read(self._trial, CHAT, body, is_streamed=self._drawn.random() < 0.5)

    async def _leave(self) -> None:
        """Go away in the middle of a stream."""
        path, body = either(self._trial, _lines(self._drawn, 2), max_tokens=_LEFT_TOKENS)
        request = self._trial.request(path, {"stream": True, **body})
        after_bytes = self._drawn.randint(1, _MOST_BYTES_BEFORE_LEAVING)
        leave = partial(self._trial.target.leave_early, request, after_bytes=after_bytes)
        begun = await self._trial.admitted(leave, REQUEST_SECONDS)
        if begun.status != _OK:
            raise MalformedError(f"{path} answered {begun.status} to a stream")

    async def _wrong(self) -> None:
        """What the server is to refuse; `wire.refusals` judges how it does so."""
        # A server that takes it all the same has no more to write than one token.
        path, body = either(self._trial, _lines(self._drawn, 1), max_tokens=1, temperature="warm")
        ask = partial(self._trial.target.ask, self._trial.request(path, body))
        answer = await self._trial.admitted(ask, REQUEST_SECONDS)
        if answer.status >= _SERVER_ERROR:
            raise UnexpectedStatusError(answer)


def _lines(drawn: random.Random, count: int) -> str:
    """A text that no other request has."""
    said = (
        f"Line {number}: the {drawn.choice(_PLACES)} counted {drawn.randrange(10, 1000)} boats."
        for number in range(count)
    )
    return "\n".join(said)
