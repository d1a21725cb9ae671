"""What did the engine really do? Read from the ranks' stats, not assumed from the request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.records import EngineFacts, EngineStep, RankStats

MEMORY_MARGIN_BYTES = 1024**3
"""Left to the host if the GPU shares its memory, since the machine freezes without it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How far each (engine, rank) was at a moment."""

    steps: Mapping[tuple[int, int], int]
    scheduled_tokens: Mapping[tuple[int, int], int]
    growths: Mapping[tuple[int, int], int]

    def new_steps(self, rank: RankStats) -> tuple[EngineStep, ...]:
        """Return the kept steps that ended since the mark, oldest first."""
        done = self.steps.get((rank.engine, rank.rank), 0)
        return tuple(step for step in rank.recent_steps if step.index > done)

    def new_tokens(self, rank: RankStats) -> int:
        """Return how many tokens were scheduled since the mark."""
        return rank.scheduled_tokens - self.scheduled_tokens.get((rank.engine, rank.rank), 0)

    def largest_step(self, ranks: Iterable[RankStats]) -> int:
        """Return the most tokens that every rank scheduled in one step since the mark."""
        found = ([step.scheduled_tokens for step in self.new_steps(rank)] for rank in ranks)
        return min((max(tokens, default=0) for tokens in found), default=0)

    def widest_steps(self, ranks: Iterable[RankStats]) -> int:
        """Return the most requests that every rank had in at least two steps since the mark."""
        found = (sorted(step.requests for step in self.new_steps(rank))[-2:-1] for rank in ranks)
        return min((max(requests, default=0) for requests in found), default=0)

    def slowest_step_seconds(self, ranks: Iterable[RankStats]) -> float:
        """Return the duration of the slowest kept step of any rank since the mark; 0 if none."""
        seen = (step.duration_seconds for rank in ranks for step in self.new_steps(rank))
        return max(seen, default=0.0)

    def grew(self, ranks: Iterable[RankStats]) -> bool:
        """Whether a workspace of any rank grew since the mark, in any phase."""
        return any(
            sum(rank.growths.values()) > self.growths.get((rank.engine, rank.rank), 0)
            for rank in ranks
        )


def mark(ranks: Iterable[RankStats]) -> Mark:
    """Return how far the ranks are now."""
    known = {(rank.engine, rank.rank): rank for rank in ranks}
    return Mark(
        steps={key: rank.steps for key, rank in known.items()},
        scheduled_tokens={key: rank.scheduled_tokens for key, rank in known.items()},
        growths={key: sum(rank.growths.values()) for key, rank in known.items()},
    )


@dataclass(slots=True)
class SlowestStep:
    """How long the slowest step of the engine took while the suite ran.

    The steps for the first token wait for compilers, up to a minute on a new machine, so they count
    only while there are no others.
    """

    since: Mark
    _seconds: float = 0.0
    _first_token_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The duration of the slowest step that counts; 0 before any was seen."""
        return self._seconds or self._first_token_seconds

    def observe(self, ranks: Iterable[RankStats]) -> None:
        """Look at the kept steps, before newer ones displace them."""
        self._seconds = max(self._seconds, self.since.slowest_step_seconds(ranks))

    def first_token_ended(self, ranks: Sequence[RankStats]) -> None:
        """Begin with the steps that are not for the first token."""
        self.observe(ranks)
        self.since, self._first_token_seconds, self._seconds = mark(ranks), self._seconds, 0.0


Condition = Callable[[RankStats], bool]
"""Whether the stats of one rank show what is to be proven."""


def is_shown(
    facts: EngineFacts, ranks: Sequence[RankStats], engine: int | None, condition: Condition
) -> bool:
    """Whether every rank of `engine` meets the condition; for None, those of any one engine."""
    known = {(rank.engine, rank.rank): rank for rank in ranks}
    engines = {member for member, _ in facts.world} if engine is None else {engine}
    return any(
        all(key in known and condition(known[key]) for key in facts.world if key[0] == member)
        for member in engines
    )


def report_alike(ranks: Iterable[RankStats]) -> bool:
    """Whether the ranks of each engine report the same number of steps."""
    steps: dict[int, set[int]] = {}
    for rank in ranks:
        steps.setdefault(rank.engine, set()).add(rank.steps)
    return all(len(of_engine) == 1 for of_engine in steps.values())


def quiet_seconds(ranks: Iterable[RankStats], now_seconds: float) -> float:
    """Return for how long no rank has ended a step, of those that ever did.

    The newest step of all engines counts: one engine may be done with its prompt, and idle.
    """
    ends = [rank.last_step_ended_seconds or 0.0 for rank in ranks]
    return now_seconds - max(ends, default=0.0)


@dataclass(frozen=True, slots=True)
class Run:
    """A prefill that was served: the tokens that were computed, and the seconds they took."""

    tokens: int
    seconds: float
    context_tokens: int = 0
    """Where the context of its one prompt ended; 0 if unknown."""

    @property
    def attended_tokens(self) -> float:
        """The sum of the tokens that each of its tokens attends to, with full attention."""
        return self.tokens * max(0.0, self.context_tokens - self.tokens / 2)


def expected_seconds(runs: Sequence[Run], tokens: int, context_tokens: int = 0) -> float | None:
    """Return how long `tokens` that end at `context_tokens` take; None while it is unknown.

    The two runs with the longest contexts tell the cost of a token, and the cost of each token that
    it attends to: attention takes most of the time of long contexts. One run tells only a rate. The
    first run pays for kernels that compile on first use, so it tells nothing.
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
    """Return the seconds of a token, and of one that it attends to, which is 0 if not seen."""
    determinant = one.tokens * other.attended_tokens - other.tokens * one.attended_tokens
    if not determinant:
        return 0.0, 0.0
    back = (one.tokens * other.seconds - other.tokens * one.seconds) / determinant
    each = (one.seconds * other.attended_tokens - other.seconds * one.attended_tokens) / determinant
    if each < 0:
        return 0.0, other.seconds / other.attended_tokens
    return each, max(0.0, back)


def leaves_margin(*, available_bytes: int, cost_bytes: int, growth: float) -> bool:
    """Whether the host keeps its margin if the next size costs `growth` times the last."""
    return available_bytes - max(0, cost_bytes) * growth >= MEMORY_MARGIN_BYTES


def rank_errors(ranks: Iterable[RankStats]) -> str:
    """Return what the ranks say went wrong: caller, bytes needed, bytes held; else empty."""
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
