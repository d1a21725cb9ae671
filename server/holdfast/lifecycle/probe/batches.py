"""The steps about one engine step of a chosen size, made up of many prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from holdfast.errors import ProbeFailedError
from holdfast.lifecycle.probe import measure
from holdfast.lifecycle.probe.bench import Bench
from holdfast.lifecycle.probe.finding import Finding
from holdfast.lifecycle.probe.sizes import batch_sizes, fewest, largest_step, most
from holdfast.records import RankStats


async def batch_sweep(bench: Bench) -> Finding:
    """Prove engine steps of many sizes, up to the largest that can be made."""
    proven, obstacle = 0, ""
    for size in batch_sizes(largest_step(bench.allowed)):
        least_seconds = bench.steps_seconds(1)
        obstacle = bench.budget.time_obstacle(size, least_seconds=least_seconds)
        if obstacle:
            break
        await _make_step(bench, size, bench.prompts.fresh, is_widest=bench.prefers_many_requests)
        proven = size
    return Finding(tokens=proven, limited=bool(obstacle), reason=obstacle, is_skipped=not proven)


async def full_batch(bench: Bench) -> Finding:
    """Prove the largest engine step over as many requests as fit: once random, once one token."""
    target, wanted = largest_step(bench.allowed), bench.limits.step_tokens
    if not target:
        return Finding(is_skipped=True, limited=True, reason="no prompt fits in an engine step")
    for make in (bench.prompts.fresh, bench.prompts.repeated):
        least_seconds = bench.steps_seconds(1)
        if obstacle := bench.budget.time_obstacle(target, least_seconds=least_seconds):
            return Finding(is_skipped=True, limited=True, reason=obstacle)
        await _make_step(bench, target, make, is_widest=True)
    reason = f"no step can be larger than {target} of {wanted} tokens" if target < wanted else ""
    return Finding(tokens=target, reason=reason)


async def _make_step(
    bench: Bench, size: int, make: Callable[[int], list[int]], *, is_widest: bool
) -> None:
    """Prove a step of exactly `size` scheduled tokens.

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
        if await bench.is_seen(has_size):
            return
        bench.prefers_many_requests = not bench.prefers_many_requests
        largest = max(largest, since.largest_step(bench.engine.ranks()))
    raise ProbeFailedError(
        f"no engine step of {size} scheduled tokens was seen on every rank; "
        f"the largest had {largest}."
    )


def _splits(bench: Bench, size: int, *, is_widest: bool) -> Iterator[tuple[int, ...]]:
    order = (most, fewest) if is_widest else (fewest, most)
    found = (split(bench.allowed, size) for split in order)
    return iter(dict.fromkeys(lengths for lengths in found if lengths))
