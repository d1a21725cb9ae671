"""How far has each request come, and how much was made? For the status page; it has no text.

A prompt of a hundred thousand tokens takes minutes, in which vLLM says nothing about it. The ranks
record the requests of their last steps with the tokens that each has reached, so its progress can
be read without asking the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.engine.requests.request import EngineOutputs, EngineRequest
from holdfast.request_context import RequestContext

MAX_FIRST_TOKENS = 10_000
"""The number of first tokens that are kept until they are taken."""

RequestStage = Literal["waiting", "held", "queued", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One HTTP request that has a request in the engine, or waits for one."""

    number: int
    """A later request has a larger number."""
    stage: RequestStage
    received_seconds: float | None
    """When it was complete; None for a session, which has no such time."""
    key: str
    """The name of its key; empty without keys."""
    generation: int
    """The generation that has it; 0 if none has had it."""
    replays: int
    prompt_tokens: int | None
    """Tokens of its prompts; None until they are known."""
    prefilled_tokens: int | None
    """How many of them are computed; None if the engine's steps do not tell."""
    output_tokens: int


def waiting_row(context: RequestContext) -> RequestRow:
    """Return the row of a request that waits in the front end, where it has no tokens yet."""
    return RequestRow(
        number=context.number,
        stage="waiting",
        received_seconds=_received_seconds(context),
        key=context.key,
        generation=context.generation,
        replays=context.replays,
        prompt_tokens=context.prompt_tokens or None,
        prefilled_tokens=None,
        output_tokens=context.output_tokens,
    )


class Traffic:
    """Counts what clients were sent, without the probe. Belongs to one event loop."""

    def __init__(self, outputs: EngineOutputs, clock: Callable[[], float]) -> None:
        self._outputs = outputs
        self._clock = clock
        self.prompt_tokens = 0
        """Tokens of the prompts whose answers have begun."""
        self.output_tokens = 0
        self._first_token_seconds: deque[float] = deque(maxlen=MAX_FIRST_TOKENS)

    def count(self, request: EngineRequest, output: Any) -> None:
        """Count an output; that of a request that has yielded nothing before is its first."""
        context = request.context
        is_counted = request.has_yielded or request.is_later_step
        prompt_tokens = 0 if is_counted else self._outputs.prompt_tokens(output)
        output_tokens = self._outputs.new_tokens(output)
        context.count_tokens(prompt_tokens, output_tokens)
        if context.is_probe:
            return
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        # Any other answer comes as a whole, and does not tell when its first token was made.
        is_first_token = request.is_answer_streamed and not request.has_yielded
        if is_first_token and context.received_seconds is not None:
            self._first_token_seconds.append(self._clock() - context.received_seconds)

    def take_first_tokens(self) -> Sequence[float]:
        """Return how long the first tokens of streamed answers took since the last call.

        That is the time from the receipt of the whole request, and includes every wait.
        """
        taken = tuple(self._first_token_seconds)
        self._first_token_seconds.clear()
        return taken


class RequestProgress:
    """Reads how far the requests are. Belongs to one event loop."""

    def __init__(self, outputs: EngineOutputs, requests: Iterable[EngineRequest]) -> None:
        """Take the requests in the order of their arrival, which stay those of their owner."""
        self._outputs = outputs
        self._requests = requests
        self._reached: dict[tuple[int, int], tuple[int, ...]] = {}
        """The last known tokens of a request by its number and generation, one for each answer."""
        self.reached_tokens: Callable[[], Mapping[str, int]] = dict
        """Returns the tokens that requests have reached, by vLLM's internal IDs."""

    def rows(self, limit: int) -> tuple[Sequence[RequestRow], int]:
        """Return the oldest requests, at most `limit`, and how many others there are."""
        groups: dict[int, list[EngineRequest]] = {}
        for request in self._requests:
            if not request.context.is_probe:
                groups.setdefault(id(request.context), []).append(request)
        shown = list(groups.values())[:limit]
        self._read(request for group in shown for request in group)
        return [self._row(group) for group in shown], len(groups) - len(shown)

    def _read(self, requests: Iterable[EngineRequest]) -> None:
        """Update what is known; a request that has no part in the last steps keeps its tokens."""
        found: dict[str, list[int]] = {}
        for internal_id, tokens in self.reached_tokens().items():
            for request_id in self._outputs.request_ids(internal_id):
                found.setdefault(request_id, []).append(tokens)
        known, self._reached = self._reached, {}
        for request in requests:
            place = (request.number, request.generation)
            now = found.get(request.request_id, ()) if request.is_in_engine else ()
            if reached := tuple(now) or known.get(place, ()):
                self._reached[place] = reached

    def _row(self, group: Sequence[EngineRequest]) -> RequestRow:
        context = group[0].context
        parts = [self._part(request) for request in group]
        return RequestRow(
            number=context.number,
            stage=_stage_of([part.stage for part in parts]),
            received_seconds=_received_seconds(context),
            key=context.key,
            generation=context.generation,
            replays=context.replays,
            prompt_tokens=_sum(part.prompt_tokens for part in parts),
            prefilled_tokens=_sum(part.prefilled_tokens for part in parts),
            output_tokens=max(context.output_tokens, sum(part.output_tokens for part in parts)),
        )

    def _part(self, request: EngineRequest) -> _Part:
        prompt_tokens = self._outputs.given_tokens(request.arguments) or None
        reached = self._reached.get((request.number, request.generation), ())
        if not request.is_in_engine:
            return _Part("held", prompt_tokens, None, 0)
        if not reached:
            stage: RequestStage = "decode" if request.has_yielded else "queued"
            return _Part(stage, prompt_tokens, None, 0)
        if prompt_tokens is None:
            return _Part("decode" if request.has_yielded else "prefill", None, None, 0)
        prefilled_tokens = min(max(reached), prompt_tokens)
        is_whole = request.has_yielded or prefilled_tokens == prompt_tokens
        made_tokens = sum(max(0, tokens - prompt_tokens) for tokens in reached)
        return _Part(
            "decode" if is_whole else "prefill", prompt_tokens, prefilled_tokens, made_tokens
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """What one engine request contributes to its row."""

    stage: RequestStage
    prompt_tokens: int | None
    prefilled_tokens: int | None
    output_tokens: int


def _stage_of(stages: Sequence[RequestStage]) -> RequestStage:
    """Return the stage of several requests together: that of the one that has come furthest."""
    order: tuple[RequestStage, ...] = ("decode", "prefill", "queued", "held")
    return next(stage for stage in order if stage in stages)


def _received_seconds(context: RequestContext) -> float | None:
    received = context.received_seconds
    return context.entered_seconds if received is None else received


def _sum(values: Iterable[int | None]) -> int | None:
    """Return the sum; None if one of them is unknown."""
    every = list(values)
    known = [value for value in every if value is not None]
    return sum(known) if len(known) == len(every) else None
