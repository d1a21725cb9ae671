"""What the steps share: a session composes, sends, waits and checks, under one deadline.

Prompts are random tokens, so that no prefix cache shortcuts them and no tokenizer is needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NoReturn, TypeVar

import httpx

from holdfast.engine.baseline import BaselineWatch
from holdfast.engine.heartbeat import SLOWEST_STEP_FACTOR
from holdfast.engine.interface import Engine
from holdfast.errors import HoldfastError, ProbeFailedError, ProbeTooSlowError
from holdfast.labels import StepName
from holdfast.probe import measure
from holdfast.probe.budget import Budget
from holdfast.probe.client import (
    COMPLETIONS,
    Message,
    ProbeRequestBody,
    completion,
    exchange,
    pooling,
    post,
    read,
    refusal,
)
from holdfast.probe.sizes import EngineLimits, is_pooling, is_transcribing
from holdfast.processes.stacks import is_compiling_in_process
from holdfast.records import EngineFacts, RankStats
from holdfast.telemetry.progress import Progress

logger = logging.getLogger(__name__)

NONCE_TOKENS = 8
POLL_SECONDS = 0.01
PROMPTS_PER_MESSAGE = 256
"""Well below vLLM's limit of 1,024 prompts in one request."""

Answered = TypeVar("Answered")


class Prompts:
    """Makes prompts of the model's ordinary tokens, since special ones may end a request."""

    def __init__(self, facts: EngineFacts, random: Random) -> None:
        ordinary = (t for t in range(facts.vocab_size) if t not in facts.special_token_ids)
        self._tokens = tuple(ordinary) or tuple(range(facts.vocab_size))
        self.random = random

    def fresh(self, tokens: int) -> list[int]:
        """Return a prompt that begins unlike every other."""
        return self.random.choices(self._tokens, k=tokens)

    def repeated(self, tokens: int) -> list[int]:
        """Return a nonce and then one token repeated: the skew that overloads a single expert."""
        nonce = self.fresh(min(NONCE_TOKENS, tokens))
        return nonce + [self._tokens[len(self._tokens) // 2]] * (tokens - len(nonce))


def grouped(lengths: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Split the lengths into groups of at most `size`, in their order."""
    return (lengths[start : start + size] for start in range(0, len(lengths), size))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step proved, or the reason why it was skipped. A failure is raised instead."""

    tokens: int = 0
    limited: bool = False
    is_skipped: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ProbeTimeouts:
    """How long the probe waits for news of what has already happened."""

    proof_seconds: float = 2.0
    """Another rank may write its stats a moment after the answer arrives."""
    death_seconds: float = 2.0
    """The engine names its death within a second; a failed answer may come before."""
    cleanup_seconds: float = 10.0
    stall_seconds: float = 120.0
    """The longest time that a step may take after another of the same prompt has ended."""


@dataclass(slots=True)
class ProbeSession:
    """One run of the suite: what it runs on, and what it has learned so far."""

    engine: Engine
    client: httpx.AsyncClient
    budget: Budget
    progress: Progress
    limits: EngineLimits
    prompts: Prompts
    timeouts: ProbeTimeouts
    slowest: measure.SlowestStep
    baseline: BaselineWatch | None = None
    step: StepName = "first_token"
    attempt: str = ""
    """The current attempt, for the reason of a failure."""
    served: dict[int | None, list[int]] = field(default_factory=dict)
    """The context that each engine served last: its prefix is cached if any is."""
    ceiling_tokens: int | None = None
    """The longest context that may be tried; None until one had to be left out."""
    prefers_many_requests: bool = False
    """Whether this scheduler has cut a long prompt that one step should have taken."""

    @property
    def facts(self) -> EngineFacts:
        """Sizes and capabilities of the engine."""
        return self.engine.facts

    @property
    def engines(self) -> tuple[int | None, ...]:
        """The engines that each step is proven for; None is the engine that vLLM chooses."""
        chooses = is_pooling(self.facts) or is_transcribing(self.facts)
        if chooses and self.facts.data_parallel_size > 1:
            return (None,)
        return tuple(sorted({engine for engine, _ in self.facts.world}))

    @property
    def longest_allowed_tokens(self) -> int:
        """The longest context that neither the sweep nor the journal forbids."""
        bounds = [self.limits.prompt_tokens]
        if self.ceiling_tokens is not None:
            bounds.append(self.ceiling_tokens)
        if self.budget.forbidden_tokens is not None:
            bounds.append(self.budget.forbidden_tokens - 1)
        return min(bounds)

    @property
    def allowed(self) -> EngineLimits:
        """The limits for every step, with prompts no longer than is allowed."""
        return replace(self.limits, prompt_tokens=max(0, self.longest_allowed_tokens))

    def begin_attempt(self, detail: str, tokens: int) -> None:
        """Note the attempt for the reason of a failure, and show it as progress."""
        self.attempt = detail
        self.progress.step_started(self.step, detail, tokens)

    def address(self, engine: int | None) -> int | None:
        """Return the address of `engine` in a message; None if there is only one engine."""
        return engine if self.facts.data_parallel_size > 1 else None

    def message(
        self,
        engine: int | None,
        prompts: Sequence[list[int]],
        tokens: int = 1,
        extra: ProbeRequestBody | None = None,
    ) -> Message:
        """Make one request of token-id prompts to one engine, each answered by `tokens` tokens."""
        address = self.address(engine)
        if is_pooling(self.facts):
            path, body = pooling(self.facts, prompts)
            return Message(path, {**body, **(extra or {})}, len(prompts), address)
        body = {**completion(self.facts, prompts, tokens), **(extra or {})}
        return Message(COMPLETIONS, body, len(prompts), address, len(prompts) * tokens)

    def messages(
        self,
        lengths: Sequence[int],
        make: Callable[[int], list[int]],
        tokens: int = 1,
        extra: ProbeRequestBody | None = None,
    ) -> list[Message]:
        """Make requests with prompts of these lengths from `make`, as many for each engine."""
        return [
            self.message(engine, [make(length) for length in group], tokens, extra)
            for engine in self.engines
            for group in grouped(lengths, PROMPTS_PER_MESSAGE)
        ]

    async def run_bounded(
        self, work: Coroutine[Any, Any, Answered], seconds: float | None = None
    ) -> Answered:
        """Return the result of `work`, within `seconds` or all the time that is left.

        Raises:
            ProbeTooSlowError: the time was over, though every engine made progress.
            ProbeFailedError: an engine died or hung, or `work` failed.
        """
        left, since = self.budget.seconds_left(), self.mark()
        if left <= 0:
            work.close()
            raise ProbeTooSlowError("no time was left")
        seconds = left if seconds is None else seconds
        try:
            async with asyncio.timeout(seconds):
                async with asyncio.TaskGroup() as group:
                    watcher = group.create_task(self._fail_at_death())
                    result = await work
                    watcher.cancel()
                return result
        except TimeoutError:
            raise await self._late(since, seconds) from None
        except BaseExceptionGroup as group:
            raise first_failure(group) from None
        finally:
            work.close()

    async def _late(self, since: measure.Mark, waited_seconds: float) -> ProbeFailedError:
        """Tell slowness from a hang, by the rules of `heartbeat`.

        An engine that has ended no step at all fails without waiting for the stall timeout.
        """
        quiet_seconds, longest_seconds = waited_seconds, self.steps_seconds(SLOWEST_STEP_FACTOR)
        if self._is_shown(lambda rank: bool(since.new_steps(rank))):
            now_seconds = self.budget.now_seconds()
            quiet_seconds = measure.quiet_seconds(self.engine.ranks(reads_steps=False), now_seconds)
            longest_seconds = max(longest_seconds, self.timeouts.stall_seconds)
        if quiet_seconds < longest_seconds or await self._is_compiling():
            return ProbeTooSlowError(
                "the engine was too slow to finish before the probe's time limit"
            )
        return ProbeFailedError(
            "it had not finished at the probe's time limit, and no step had ended for "
            f"{quiet_seconds:.0f} s."
        )

    async def _is_compiling(self) -> bool:
        """Whether the engine waits for a compiler; if not, log its stacks."""
        if self.engine.is_compiling():
            return True
        stacks = await self.engine.dump_stacks()
        if is_compiling_in_process(stacks):
            return True
        logger.error("the engine hangs at %s\n%s", self.attempt, stacks)
        return False

    async def _fail_at_death(self) -> NoReturn:
        raise ProbeFailedError(f"the engine died: {await self.engine.until_dead()}")

    async def exchange_all(self, messages: Iterable[Message]) -> list[ProbeRequestBody]:
        """Send all messages at once, and return the answers in the same order."""
        async with asyncio.TaskGroup() as group:
            sent = [group.create_task(exchange(self.client, m)) for m in messages]
        return [task.result() for task in sent]

    async def refusal(self, messages: Iterable[Message]) -> str:
        """Send the messages one after the other; return why one gets 400, empty if none does."""
        for message in messages:
            response = await post(self.client, message)
            if response.status_code == httpx.codes.BAD_REQUEST:
                return refusal(message, response.status_code, response.text)
            read(message, response)
        return ""

    async def exchange_in_one_step(self, messages: Sequence[Message]) -> None:
        """Send so that one step of each engine takes all messages that are for it.

        A single prompt is not held: a pause takes 21 ms (vLLM 0.32, `pause_generation`).
        """
        expected = sum(message.prompts for message in messages)
        if expected == 1:
            await self.exchange_all(messages)
            return
        async with asyncio.TaskGroup() as group, self.engine.scheduling_paused():
            for message in messages:
                group.create_task(exchange(self.client, message))
            await self.until_queued(expected)

    async def until_queued(self, requests: int) -> None:
        """Wait until the engine has exactly `requests` requests, within the suite's deadline."""
        while await self.engine.queued_requests() != requests:  # noqa: ASYNC110 - the engine has no event
            await asyncio.sleep(POLL_SECONDS)

    def mark(self) -> measure.Mark:
        """Return how far the ranks are now."""
        return measure.mark(self.engine.ranks())

    async def is_seen(self, condition: measure.Condition) -> bool:
        """Whether every rank of every engine meets the condition, now or in a moment."""
        return await self._comes_true(lambda: self._is_shown(condition))

    async def until_all_reported(self) -> None:
        """Wait, for a moment at most, until the ranks of each engine report equally many steps.

        They run the same steps; what those on another node report arrives later.
        """
        await self._comes_true(
            lambda: measure.report_alike(self.engine.ranks(reads_steps=False)),
        )

    async def _comes_true(self, condition: Callable[[], bool]) -> bool:
        waits = int(self.timeouts.proof_seconds / POLL_SECONDS)
        for _ in range(waits):
            if condition():
                return True
            await asyncio.sleep(POLL_SECONDS)
        return condition()

    async def require(self, condition: measure.Condition, missing: str) -> None:
        """Wait until every rank of every engine meets the condition.

        Raises:
            ProbeFailedError: one did not.
        """
        if not await self.is_seen(condition):
            raise ProbeFailedError(missing)

    async def is_formed(
        self, since: measure.Mark, tokens: int, condition: measure.Condition, missing: str
    ) -> bool:
        """Whether the scheduler formed what `condition` looks for from the `tokens` it was given.

        It did not if every rank has run all of them, after `since`, in other steps. What it forms
        depends on more than our plans know, for example on the groups of a hybrid model's KV cache.

        Raises:
            ProbeFailedError: a rank neither meets the condition nor ran all the tokens.
        """

        def is_over(rank: RankStats) -> bool:
            return condition(rank) or since.new_tokens(rank) >= tokens

        await self.require(is_over, missing)
        return self._is_shown(condition)

    def _is_shown(self, condition: measure.Condition) -> bool:
        ranks = self.engine.ranks()
        self.slowest.observe(ranks)
        return all(
            measure.is_shown(self.facts, ranks, engine, condition) for engine in self.engines
        )

    def steps_seconds(self, steps: float) -> float:
        """Return the time that `steps` steps take if all are as slow as the slowest of this run."""
        self.slowest.observe(self.engine.ranks())
        return steps * self.slowest.seconds


def first_failure(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the failure that caused the others: ours if there is one."""
    ours = group.subgroup(HoldfastError)
    found: BaseException = ours or group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
