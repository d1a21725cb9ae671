"""An engine that yields what a test tells it to, and the calls that a test makes of it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.engine.requests.request import Method, SentAnswer
from holdfast.errors import HoldfastError

DEADLINE_SECONDS = 60.0


class EngineGoneError(Exception):
    """What a scripted engine raises when it dies."""


class UnsentError(EngineGoneError):
    """What a scripted engine raises when it dies before it was given the call."""


class AnsweredError(Exception):
    """One of our errors, as it reaches the caller."""

    def __init__(self, error: HoldfastError) -> None:
        super().__init__(error.cause)
        self.error = error


@dataclass(frozen=True, slots=True)
class Output:
    """One output of a scripted engine."""

    tokens: int
    finished: bool = False
    is_abort: bool = False
    is_cut: bool = False
    is_failure: bool = False


class PlainOutputs:
    """`requests.request.EngineOutputs` for a scripted engine."""

    def is_death(self, error: Exception, llm: Any) -> bool:
        del llm
        return isinstance(error, EngineGoneError)

    def is_unsent(self, error: Exception) -> bool:
        return isinstance(error, UnsentError)

    def is_abort(self, output: Output) -> bool:
        return output.is_abort

    def is_cut(self, output: Output) -> bool:
        return output.is_cut

    def is_failure(self, output: Output) -> bool:
        return output.is_failure

    def is_answer(self, output: Output) -> bool:
        return output.finished and not output.is_abort and not output.is_failure

    def as_vllm_error(self, error: HoldfastError) -> Exception:
        return AnsweredError(error)

    def is_replayable(self, arguments: Mapping[str, Any]) -> bool:
        return not (arguments.get("is_consumed", False) or self.is_streamed(arguments))

    def is_streamed(self, arguments: Mapping[str, Any]) -> bool:
        return bool(arguments.get("is_streamed", False))

    def is_continuable(self, arguments: Mapping[str, Any]) -> bool:
        return bool(arguments.get("is_continuable", False))

    def is_answer_streamed(self, arguments: Mapping[str, Any]) -> bool:
        return bool(arguments.get("is_answer_streamed", True))

    def add_sent(self, sent: SentAnswer, output: Output) -> None:
        sent.token_ids.append(output.tokens)
        sent.last_output = output

    def continued_arguments(
        self, arguments: Mapping[str, Any], sent: SentAnswer, llm: Any
    ) -> Mapping[str, Any] | None:
        if not sent.token_ids:
            return arguments
        has_room = len(sent.token_ids) < llm.most_answers
        return {**arguments, "sent": tuple(sent.token_ids)} if has_room else None

    def size_bytes(self, arguments: Mapping[str, Any]) -> int:
        return len(arguments["prompt"])

    def digest_of(self, arguments: Mapping[str, Any]) -> str:
        prompt = str(arguments["prompt"]).partition("#")[0]  # what follows is incidental
        return hashlib.sha256(prompt.encode()).hexdigest()

    def trial_arguments(self, method: Method, arguments: Mapping[str, Any]) -> dict[str, Any]:
        del method
        return {**arguments, "is_trial": True}

    def context_tokens(self, output: Output) -> int:
        return output.tokens

    def given_tokens(self, arguments: Mapping[str, Any]) -> int:
        return int(arguments.get("tokens", 1))

    def prompt_tokens(self, output: Output) -> int:
        del output
        return 1

    def new_tokens(self, output: Output) -> int:
        del output
        return 1

    def request_ids(self, internal_id: str) -> tuple[str, ...]:
        return (internal_id,)


@dataclass
class ScriptedLLM:
    """Makes a token whenever it is told to; dies of its poison, or when it is told to."""

    poison: str = ""
    """The prompts that kill it at their first token."""
    answers: int = 1
    """Tokens of an answer."""
    most_answers: int = 100
    """Tokens of an answer that it has room for."""
    received: list[str] = field(default_factory=list)
    went_on_after: list[Sequence[int]] = field(default_factory=list)
    """The tokens of the answer that it was given, by call."""
    running: list[str] = field(default_factory=list)
    most_running: int = 0

    def __post_init__(self) -> None:
        self.died = asyncio.Event()
        self.is_dead = False
        self._go = asyncio.Event()
        self._go.set()

    def hold(self) -> None:
        """Make no token until `release`."""
        self._go.clear()

    def release(self) -> None:
        """Make tokens."""
        self._go.set()

    def die(self) -> None:
        """End every call now."""
        self.is_dead = True
        self._go.set()
        self.died.set()

    async def until_received(self, count: int) -> None:
        """Return when this many calls have arrived."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len(self.received) < count:  # noqa: ASYNC110 - the loop is all there is
                await asyncio.sleep(0)

    async def abort(self, request_id: str) -> None:
        """Take note of nothing: the call goes on until the engine dies or answers."""

    async def generate(
        self,
        prompt: str,
        *,
        gives_up: bool = False,
        gives_up_late: bool = False,
        sent: Sequence[int] = (),
        **_: Any,
    ) -> AsyncIterator[Output]:
        """`answers` outputs of one token each; an abort instead if it `gives_up`.

        It goes on after what was sent. One that `gives_up_late` has its second output aborted,
        unless it goes on.
        """
        if self.is_dead:
            raise UnsentError
        self.received.append(prompt)
        self.went_on_after.append(sent)
        self.running.append(prompt)
        self.most_running = max(self.most_running, len(self.running))
        try:
            for token in range(len(sent) + 1, self.answers + 1):
                await asyncio.sleep(0)
                await self._go.wait()
                if self.poison and prompt.partition("#")[0] in self.poison.split():
                    self.die()
                if self.is_dead:
                    raise EngineGoneError
                is_abort = gives_up or (gives_up_late and token == 2 and not sent)
                yield Output(token, finished=token == self.answers or is_abort, is_abort=is_abort)
        finally:
            self.running.remove(prompt)
