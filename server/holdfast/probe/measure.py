"""What did the engine really do? Read from the ranks' stats, never from what was asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.records import EngineFacts, EngineStep, RankStats

MEMORY_MARGIN_BYTES = 1024**3
"""Left to the host on a machine whose GPU shares its memory: without it the machine freezes."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How far each (engine, rank) was at one moment."""

    steps: Mapping[tuple[int, int], int]
    scheduled_tokens: Mapping[tuple[int, int], int]
    growths: Mapping[tuple[int, int], int]

    def new_steps(self, rank: RankStats) -> tuple[EngineStep, ...]:
        """The steps that ended since, oldest first, of those that are still kept."""
        done = self.steps.get((rank.engine, rank.rank), 0)
        return tuple(step for step in rank.recent_steps if step.index > done)

    def new_tokens(self, rank: RankStats) -> int:
        """The tokens that were scheduled since."""
        return rank.scheduled_tokens - self.scheduled_tokens.get((rank.engine, rank.rank), 0)

    def largest_step(self, ranks: Iterable[RankStats]) -> int:
        """The most tokens that every rank scheduled in one step since."""
        found = ([step.scheduled_tokens for step in self.new_steps(rank)] for rank in ranks)
        return min((max(tokens, default=0) for tokens in found), default=0)

    def widest_steps(self, ranks: Iterable[RankStats]) -> int:
        """The most requests that every rank had in at least two steps since."""
        found = (sorted(step.requests for step in self.new_steps(rank))[-2:-1] for rank in ranks)
        return min((max(requests, default=0) for requests in found), default=0)

    def grew(self, ranks: Iterable[RankStats]) -> bool:
        """Whether a workspace of any rank grew since, in whatever phase."""
        return any(
            sum(rank.growths.values()) > self.growths.get((rank.engine, rank.rank), 0)
            for rank in ranks
        )


def mark(ranks: Iterable[RankStats]) -> Mark:
    """Where the ranks stand now."""
    known = {(rank.engine, rank.rank): rank for rank in ranks}
    return Mark(
        steps={key: rank.steps for key, rank in known.items()},
        scheduled_tokens={key: rank.scheduled_tokens for key, rank in known.items()},
        growths={key: sum(rank.growths.values()) for key, rank in known.items()},
    )


Condition = Callable[[RankStats], bool]
"""Whether one rank shows what is to be proven."""


def is_shown(
    facts: EngineFacts, ranks: Sequence[RankStats], engine: int | None, condition: Condition
) -> bool:
    """Whether every rank of `engine` shows it; of None, every rank of at least one engine."""
    known = {(rank.engine, rank.rank): rank for rank in ranks}
    engines = {member for member, _ in facts.world} if engine is None else {engine}
    return any(
        all(key in known and condition(known[key]) for key in facts.world if key[0] == member)
        for member in engines
    )


def quiet_seconds(ranks: Iterable[RankStats], now_seconds: float) -> float:
    """For how long no rank has ended a step, of those that ever did.

    The newest of all engines counts: one of them may be done with its prompt, and have nothing.
    """
    ends = [rank.last_step_ended_seconds or 0.0 for rank in ranks]
    return now_seconds - max(ends, default=0.0)


@dataclass(frozen=True, slots=True)
class Run:
    """A prefill that was served: how many tokens were computed, in how many seconds."""

    tokens: int
    seconds: float
    context_tokens: int = 0
    """Where the context of its one prompt ended; 0 if that is not known."""

    @property
    def attended_tokens(self) -> float:
        """Tokens that its tokens looked back at, all together, with attention to all of them."""
        return self.tokens * max(0.0, self.context_tokens - self.tokens / 2)


def expected_seconds(runs: Sequence[Run], tokens: int, context_tokens: int = 0) -> float | None:
    """How long `tokens` that end at `context_tokens` take; None while nothing is known.

    The two runs with the longest contexts say what a token costs, and what each token costs that it
    looks back at: of long contexts attention takes most of the time. One run tells a rate alone.
    The first run pays for kernels that compile on first use, so it says nothing.
    """
    measured = runs[1:]
    if not measured:
        return None
    largest = max(measured, key=lambda run: run.tokens)
    linear = tokens * largest.seconds / largest.tokens
    longest = sorted(measured, key=lambda run: run.attended_tokens)[-2:]
    each, back = _costs(*longest) if len(longest) > 1 else (0.0, 0.0)
    if not back or not context_tokens:
        return linear
    return each * tokens + back * Run(tokens, 0.0, context_tokens).attended_tokens


def _costs(one: Run, other: Run) -> tuple[float, float]:
    """Seconds of a token, and of one that it looks back at; the last is 0 if none is seen."""
    determinant = one.tokens * other.attended_tokens - other.tokens * one.attended_tokens
    if not determinant:
        return 0.0, 0.0
    back = (one.tokens * other.seconds - other.tokens * one.seconds) / determinant
    each = (one.seconds * other.attended_tokens - other.seconds * one.attended_tokens) / determinant
    if each < 0:
        return 0.0, other.seconds / other.attended_tokens
    return each, max(0.0, back)


def leaves_margin(*, available_bytes: int, cost_bytes: int, growth: float) -> bool:
    """Whether the host keeps its margin if a size `growth` times the last costs as much more."""
    return available_bytes - max(0, cost_bytes) * growth >= MEMORY_MARGIN_BYTES


def rank_errors(ranks: Iterable[RankStats]) -> str:
    """What the ranks themselves say went wrong: caller, bytes needed, bytes held; else empty."""
    return "; ".join(filter(None, map(_rank_error, ranks)))


def _rank_error(rank: RankStats) -> str:
    name = f"engine {rank.engine} rank {rank.rank}"
    refused = rank.last_rejection
    if refused is not None:
        return (
            f"{name} refused {refused.kind} workspace to {refused.caller}: needed "
            f"{refused.needed_bytes} bytes, held {refused.held_bytes} bytes"
        )
    return f"{name} was lost: {rank.fatal_error}" if rank.fatal_error else ""
