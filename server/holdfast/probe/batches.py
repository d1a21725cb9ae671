"""The steps that prove one engine step of a chosen size, made up of many prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from holdfast.errors import ProbeTooSlowError
from holdfast.probe import measure
from holdfast.probe.session import ProbeSession, StepResult
from holdfast.probe.sizes import batch_sizes, fewest, fullest_step, largest_step, most
from holdfast.records import RankStats


async def batch_sweep(session: ProbeSession) -> StepResult:
    """Prove engine steps of many sizes, up to the largest possible."""
    proven, obstacle, cut = 0, "", list[int]()
    for size in batch_sizes(largest_step(session.allowed)):
        least_seconds = session.steps_seconds(1)
        obstacle = session.budget.time_obstacle(size, least_seconds=least_seconds)
        if obstacle:
            break
        is_widest = session.prefers_many_requests
        try:
            formed = await _make_step(session, size, session.prompts.fresh, is_widest=is_widest)
        except ProbeTooSlowError as error:
            obstacle = f"{session.attempt}: {error.cause}"
            break
        proven = max(proven, formed)
        cut += [size] if formed < size else []
    reasons = filter(None, (obstacle, _unformed(cut)))
    return StepResult(proven, bool(obstacle), is_skipped=not proven, reason="; ".join(reasons))


def _unformed(sizes: list[int]) -> str:
    if not sizes:
        return ""
    return (
        f"the scheduler does not form a step of {', '.join(map(str, sizes))} tokens from these "
        "prompts"
    )


async def full_batch(session: ProbeSession) -> StepResult:
    """Prove the largest engine step over as many requests as fit: of random tokens, then of one.

    Where each request takes draft slots, the largest step has few requests, so the step with the
    most requests is proven too.
    """
    target, formed = largest_step(session.allowed), 0
    if not target:
        return StepResult(is_skipped=True, limited=True, reason="no prompt fits in an engine step")
    steps = [(target, session.prompts.fresh), (target, session.prompts.repeated)]
    if session.limits.draft_slots:
        steps.append((fullest_step(session.allowed), session.prompts.fresh))
    for size, make in steps:
        least_seconds = session.steps_seconds(1)
        if obstacle := session.budget.time_obstacle(size, least_seconds=least_seconds):
            return StepResult(is_skipped=True, limited=True, reason=obstacle)
        formed = max(formed, await _make_step(session, size, make, is_widest=True))
    return StepResult(tokens=formed, reason=_smaller(session, target, formed))


def _smaller(session: ProbeSession, target: int, formed: int) -> str:
    """Return why no step has all the tokens that a step may have; empty if one has."""
    if formed < target:
        return f"the scheduler formed no step larger than {formed} tokens"
    wanted, slots = session.facts.max_num_batched_tokens, session.limits.draft_slots
    if target == wanted:
        return ""
    drafts = f", since drafting takes {slots} of them for each request" if slots else ""
    return f"no step can be larger than {target} of {wanted} tokens{drafts}"


async def _make_step(
    session: ProbeSession, size: int, make: Callable[[int], list[int]], *, is_widest: bool
) -> int:
    """Prove a step of `size` scheduled tokens, and return the size of the largest that was formed.

    Some schedulers cut prompts, for example at block boundaries of hybrid models. They never form
    the step from few long prompts but do from many short ones, or the other way round.
    """
    largest = 0
    for lengths in _splits(session, size, is_widest=is_widest):
        session.begin_attempt(f"a step of {size} tokens over {len(lengths)} requests", size)
        since = session.mark()

        def has_size(rank: RankStats, since: measure.Mark = since) -> bool:
            return any(step.scheduled_tokens == size for step in since.new_steps(rank))

        await session.run_bounded(session.exchange_in_one_step(session.messages(lengths, make)))
        missing = f"not every rank ran an engine step of {size} scheduled tokens."
        if await session.is_formed(since, size, has_size, missing):
            return size
        session.prefers_many_requests = not session.prefers_many_requests
        largest = max(largest, since.largest_step(session.engine.ranks()))
    return largest


def _splits(session: ProbeSession, size: int, *, is_widest: bool) -> Iterator[tuple[int, ...]]:
    order = (most, fewest) if is_widest else (fewest, most)
    found = (split(session.allowed, size) for split in order)
    return iter(dict.fromkeys(lengths for lengths in found if lengths))
