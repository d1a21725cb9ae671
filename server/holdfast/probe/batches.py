"""The steps about one engine step of a chosen size, made up of many prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from holdfast.errors import ProbeTooSlowError
from holdfast.probe import measure
from holdfast.probe.session import Bench, Finding
from holdfast.probe.sizes import batch_sizes, fewest, fullest_step, largest_step, most
from holdfast.records import RankStats


async def batch_sweep(bench: Bench) -> Finding:
    """Prove engine steps of many sizes, up to the largest that can be made."""
    proven, obstacle, cut = 0, "", list[int]()
    for size in batch_sizes(largest_step(bench.allowed)):
        least_seconds = bench.steps_seconds(1)
        obstacle = bench.budget.time_obstacle(size, least_seconds=least_seconds)
        if obstacle:
            break
        is_widest = bench.prefers_many_requests
        try:
            formed = await _make_step(bench, size, bench.prompts.fresh, is_widest=is_widest)
        except ProbeTooSlowError as error:
            obstacle = f"{bench.tried}: {error.cause}"
            break
        proven = max(proven, formed)
        cut += [size] if formed < size else []
    reasons = filter(None, (obstacle, _unformed(cut)))
    return Finding(proven, bool(obstacle), is_skipped=not proven, reason="; ".join(reasons))


def _unformed(sizes: list[int]) -> str:
    if not sizes:
        return ""
    return (
        f"the scheduler does not form a step of {', '.join(map(str, sizes))} tokens from these "
        "prompts"
    )


async def full_batch(bench: Bench) -> Finding:
    """Prove the largest engine step over as many requests as fit: once random, once one token.

    Where each request takes draft slots, the largest step has few of them, so the one with the most
    requests is proven too.
    """
    target, formed = largest_step(bench.allowed), 0
    if not target:
        return Finding(is_skipped=True, limited=True, reason="no prompt fits in an engine step")
    steps = [(target, bench.prompts.fresh), (target, bench.prompts.repeated)]
    if bench.limits.draft_slots:
        steps.append((fullest_step(bench.allowed), bench.prompts.fresh))
    for size, make in steps:
        least_seconds = bench.steps_seconds(1)
        if obstacle := bench.budget.time_obstacle(size, least_seconds=least_seconds):
            return Finding(is_skipped=True, limited=True, reason=obstacle)
        formed = max(formed, await _make_step(bench, size, make, is_widest=True))
    return Finding(tokens=formed, reason=_smaller(bench, target, formed))


def _smaller(bench: Bench, target: int, formed: int) -> str:
    """Why no step has all the tokens that a step may have; empty if one has."""
    if formed < target:
        return f"the scheduler formed no step larger than {formed} tokens"
    wanted, slots = bench.facts.max_num_batched_tokens, bench.limits.draft_slots
    if target == wanted:
        return ""
    drafts = f", since drafting takes {slots} of them for each request" if slots else ""
    return f"no step can be larger than {target} of {wanted} tokens{drafts}"


async def _make_step(
    bench: Bench, size: int, make: Callable[[int], list[int]], *, is_widest: bool
) -> int:
    """Prove a step of `size` scheduled tokens, and return the size of the largest that was formed.

    Some schedulers cut prompts, for example at block boundaries of hybrid models, and so never make
    the step from few long prompts but from many short ones, or the other way round.
    """
    largest = 0
    for lengths in _splits(bench, size, is_widest=is_widest):
        bench.trying(f"a step of {size} tokens over {len(lengths)} requests", size)
        since = bench.mark()

        def has_size(rank: RankStats, since: measure.Mark = since) -> bool:
            return any(step.scheduled_tokens == size for step in since.new_steps(rank))

        await bench.guarded(bench.together(bench.messages(lengths, make)))
        missing = f"not every rank ran an engine step of {size} scheduled tokens."
        if await bench.is_formed(since, size, has_size, missing):
            return size
        bench.prefers_many_requests = not bench.prefers_many_requests
        largest = max(largest, since.largest_step(bench.engine.ranks()))
    return largest


def _splits(bench: Bench, size: int, *, is_widest: bool) -> Iterator[tuple[int, ...]]:
    order = (most, fewest) if is_widest else (fewest, most)
    found = (split(bench.allowed, size) for split in order)
    return iter(dict.fromkeys(lengths for lengths in found if lengths))
