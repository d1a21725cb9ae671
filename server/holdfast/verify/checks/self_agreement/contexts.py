"""Is a long context the same, whether it comes in chunks, from the prefix cache or at once?"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from holdfast.verify.agreement import NoiseFloor, Scores, TopLogProbs, compare, floor_of, noisier
from holdfast.verify.check import Check
from holdfast.verify.checks.self_agreement.judging import (
    MAX_NOISE,
    judge,
    malformed_blamed,
    need_decode,
    noise,
    prefilled,
)
from holdfast.verify.checks.self_agreement.sequences import (
    ANSWER_TOKENS,
    MOST_SCORED_TOKENS,
    Sequences,
    sequences,
)
from holdfast.verify.records import Profile
from holdfast.verify.scoring import decoded, next_top
from holdfast.verify.trial import InconclusiveError, SkippedError, Trial

_RUNG_TOKENS = 128
"""Fewer than an engine step takes, so that no rung of the ladder is cut into chunks."""
_OTHER_RUNGS = (64, 256, 384)
"""The rungs of ladders that add in another order and differ in nothing else; they meet it often."""
_CACHED_TOKENS = (300, 1100)
"""Prompts that a prefix cache may keep: its blocks have 16 tokens, 128 on a CPU, or more than 500
where a model keeps a state."""
_CACHED_ANSWER_TOKENS = ANSWER_TOKENS + ANSWER_TOKENS // 2
"""Behind such a prompt, half of its answer joins it."""
_LONGER: dict[Profile, tuple[int, ...]] = {"quick": (0, 4), "standard": (0, 3, 4, 5, 19, 20)}
_EVERY_LONGER = (*_LONGER["standard"], 21, 83, 84, 85)
"""How many tokens longer a prompt is: a block of 16 ends at 304 and 320, one of 128 at 384."""
_RECORDED = (4120, 8190)
"""The further lengths of a run that records a baseline, whatever its profile: many windows, and the
scaling of many positions, begin at 4,096 tokens."""
_CHUNKED: dict[Profile, tuple[int, ...]] = {
    "quick": (1040, 2072),
    "standard": (520, 1040, 2072, 3000, 4120, 8190, 8216),
}
"""Some are a little longer than an engine step of vLLM may be by default."""
_LONGEST_STEPS: dict[Profile, int] = {"quick": 16_384, "standard": 65_536}
"""The longest step in tokens; a profile adds no prompt for a step that exceeds this."""
_BEYOND_STEP_TOKENS = 24
LONGEST_TOKENS = 524_288
"""The longest prompt in `full`: it grows to its length by a request for every 64 to 384 tokens."""
_EVERY_CHUNKED = (
    *(*_CHUNKED["standard"], 6000, 12000, 16400, 24000, 32800, 65600, 131000),
    LONGEST_TOKENS,
)
GROWING_SECONDS = 28_800.0
"""The time for a slow server to answer the 16,000 requests by which prompts grow to that length."""
_MAX_GROWTH = 10
"""How many times that of short contexts the noise of long ones may be. On an H200 it is 1.5."""
_EXACT = 0.001
"""Noise in nats that is never too much. Short contexts may have none, as on a CPU."""
_HITS = re.compile(r"^vllm:prefix_cache_hits(?:_total)?(?:\{[^}\n]*\})? (\S+)", re.MULTILINE)
"""Within a line, as that of `vitals`."""
_OK = 200
_HITS_SECONDS = 10.0
_POLL_SECONDS = 0.1


async def prefix(trial: Trial) -> None:
    """The same prompts again, and then with half of an answer: they find a prefix in the cache."""
    await need_decode(trial)
    limits = (await cached_floor(trial)).as_reordered
    made = await trial.once(sequences)
    again, longer = list[tuple[Scores, Scores]](), list[tuple[Scores, Scores]]()
    for length in prefix_lengths(trial.profile, made, await trial.once(cached_tokens)):
        prompt, salt = made.prompt(length), secrets.token_hex(8)
        await decoded(trial, prompt, ANSWER_TOKENS, salt=salt)
        with malformed_blamed(trial):
            same = await decoded(trial, prompt, ANSWER_TOKENS, salt=salt)
        continued = [*prompt, *same.token_ids[: ANSWER_TOKENS // 2]]
        with malformed_blamed(trial):
            further = await decoded(trial, continued, ANSWER_TOKENS, salt=salt)
        again.append((same.scores, await prefilled(trial, prompt, same.token_ids)))
        longer.append((further.scores, await prefilled(trial, continued, further.token_ids)))
    judge(trial, "the same prompt again", again, limits)
    judge(trial, "with half of its answer", longer, limits)
    trial.measure("prompts", len(again))


def prefix_lengths(profile: Profile, made: Sequences, cached: int) -> list[int]:
    """The profile's lengths that fit, from the shortest that the cache keeps."""
    most = made.longest_scored(_CACHED_ANSWER_TOKENS)
    return sorted({min(cached + more, most) for more in _LONGER.get(profile, _EVERY_LONGER)})


async def chunked(trial: Trial) -> None:
    """Prompts that are longer than an engine step, cold; against a context that grew in the cache.

    Nothing can prefill them at once. So the reference climbs a ladder: each prompt of it is a
    little longer than the one before, finds that one in the prefix cache, and is never cut.
    """
    made = await trial.once(sequences)
    first = await trial.once(cached_tokens)
    control = [first, first + _RUNG_TOKENS // 2]
    if control[-1] >= made.longest_tokens:
        raise SkippedError(
            f"in {made.longest_tokens} tokens no prompt can grow in the prefix cache",
            "serve the model with a longer --max-model-len",
        )
    ladder = await _ladder(trial, made, control, _RUNG_TOKENS)
    near = (await cached_floor(trial)).as_reordered
    if not compare(await _cold(trial, made, control), ladder).is_within(near):
        raise InconclusiveError("a prefix from the cache does not agree; see self.prefix")
    with malformed_blamed(trial):
        cold = await trial.once(cold_contexts)
    limits = (await long_floor(trial)).as_reordered
    judge(trial, "in chunks", [(cold, await trial.once(_long_ladder))], limits)
    trial.measure("longest prompt", max(cold), "tokens")
    _require_chunks(trial, made, cold)


def _require_chunks(trial: Trial, made: Sequences, cold: Scores) -> None:
    """Warn if no prompt came in chunks, though a client could send one that does."""
    step_tokens = _engine_step_tokens(trial)
    longer = [one for one in cold if step_tokens is not None and one > step_tokens]
    trial.measure("prompts known to be longer than an engine step", len(longer))
    if step_tokens is None:
        return
    trial.measure("engine step", step_tokens, "tokens")
    if not longer and step_tokens < made.longest_tokens - 1:
        trial.warn(
            f"no prompt was longer than an engine step ({step_tokens} tokens), "
            "so none came in chunks"
        )


async def long_floor(trial: Trial) -> NoiseFloor:
    """The noise of long contexts: prefills of other lengths add them up in another order.

    It is that of prompts which grow in the prefix cache by other lengths, so that neither a chunk
    nor a decode is in it.

    Raises:
        SkippedError: there is no prefix cache.
        InconclusiveError: there is more than noise in it, as of a prefix cache that is wrong there.
    """
    short, long = (await noise(trial)).reordered, await trial.once(_ladders_floor)
    if long.p999 > _most_noise(short):
        raise InconclusiveError(
            f"too noisy: long prompts that grow in the prefix cache differ by {long.p999:.2g} nat, "
            f"and short prompts by {short.p999:.2g}"
        )
    return noisier(short, long)


async def cached_floor(trial: Trial) -> NoiseFloor:
    """The noise behind the prompt of `cached_tokens`, which may be a long one.

    A prefix cache that is wrong raises the noise of long contexts, too. So no more of it counts
    than sound servers have.

    Raises:
        SkippedError: there is no prefix cache.
    """
    short = (await noise(trial)).reordered
    if await trial.once(cached_tokens) + _RUNG_TOKENS <= MOST_SCORED_TOKENS:
        return short
    long, most = await trial.once(_ladders_floor), _most_noise(short)
    return noisier(short, replace(long, median=min(long.median, most), p999=min(long.p999, most)))


def _most_noise(short: NoiseFloor) -> float:
    """What the noise of long contexts may come to."""
    return min(max(_MAX_GROWTH * short.p999, _EXACT), MAX_NOISE)


async def _ladders_floor(trial: Trial) -> NoiseFloor:
    """Grouped by ladder and by power of two of the length: noise grows with the context."""
    made, known = await trial.once(sequences), await trial.once(_long_ladder)
    groups: dict[tuple[int, int], dict[int, TopLogProbs]] = {}
    for rung_tokens in _OTHER_RUNGS:
        other = await _ladder(trial, made, [max(known)], rung_tokens)
        for length in other.keys() & known.keys():
            groups.setdefault((rung_tokens, length.bit_length()), {})[length] = other[length]
    return floor_of(compare(group, known) for group in groups.values())


async def _long_ladder(trial: Trial) -> Scores:
    made = await trial.once(sequences)
    return await _ladder(trial, made, _lengths(trial, made), _RUNG_TOKENS)


async def cold_contexts(trial: Trial) -> Scores:
    """What follows the start of `Sequences.prompt`, cold, at each length that this run looks at."""
    made = await trial.once(sequences)
    return await _cold(trial, made, _lengths(trial, made))


def _lengths(trial: Trial, made: Sequences) -> list[int]:
    recorded = _RECORDED if trial.options.records else ()
    return context_lengths(trial.profile, made, recorded, _engine_step_tokens(trial))


def context_lengths(
    profile: Profile,
    made: Sequences,
    recorded: Sequence[int] = (),
    step_tokens: int | None = None,
) -> list[int]:
    """The profile's lengths that fit; the longest that fits stands for those that do not.

    If none of them is longer than an engine step, there is one more that is.
    """
    most = max(made.longest_tokens - 1, 1)
    wanted = (*_CHUNKED.get(profile, _EVERY_CHUNKED), *recorded)
    found = sorted({min(one, most) for one in wanted})
    if step_tokens is None or not found[-1] <= step_tokens < most:
        return found
    if step_tokens > _LONGEST_STEPS.get(profile, LONGEST_TOKENS):
        return found
    return [*found, min(step_tokens + _BEYOND_STEP_TOKENS, most)]


def _engine_step_tokens(trial: Trial) -> int | None:
    told = trial.server.configuration
    return (told.max_num_batched_tokens or None) if told is not None else None


async def _cold(trial: Trial, made: Sequences, lengths: Sequence[int]) -> Scores:
    """What follows prompts of these lengths, each without a prefix in the cache."""
    prompt = made.prompt(max(lengths))
    return {length: await next_top(trial, prompt[:length]) for length in lengths}


async def _ladder(
    trial: Trial, made: Sequences, lengths: Sequence[int], rung_tokens: int
) -> Scores:
    """What follows the same prompts, if each finds the one before in the cache; and the rungs."""
    first = await trial.once(cached_tokens)
    prompt, salt, found = made.prompt(max(lengths)), secrets.token_hex(8), dict[int, TopLogProbs]()
    for rung in sorted({*lengths, *range(first, max(lengths), rung_tokens)}):
        found[rung] = await next_top(trial, prompt[:rung], salt=salt)
    return found


async def cached_tokens(trial: Trial) -> int:
    """The length of a prompt that the cache keeps in part, with room for an answer.

    Raises:
        SkippedError: it keeps none, or the server does not report it.
    """
    made = await trial.once(sequences)
    most = made.longest_scored(_CACHED_ANSWER_TOKENS)
    lengths = sorted({min(one, most) for one in _CACHED_TOKENS})
    for length in lengths:
        before, salt = await _hits(trial), secrets.token_hex(8)
        for _ in range(2):
            await next_top(trial, made.prompt(length), salt=salt)
        if await _is_hit(trial, before):
            return length
    raise SkippedError(
        f"the prefix cache is off, or does not keep prompts of {max(lengths)} tokens",
        "serve the model with --enable-prefix-caching",
    )


async def _hits(trial: Trial) -> float:
    """Return how many tokens the prefix cache has spared so far.

    Raises:
        SkippedError: the server does not report it.
    """
    answer = await trial.admitted(partial(trial.ask, "/metrics"))
    found = _HITS.findall(answer.text) if answer.status == _OK else []
    if not found:
        raise SkippedError("the server does not report how often its prefix cache is hit")
    return sum(map(float, found))


async def _is_hit(trial: Trial, before: float) -> bool:
    """Whether the metrics, which a server may write later, have more hits than before."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_HITS_SECONDS):
            while await _hits(trial) <= before:  # noqa: ASYNC110 - another process counts them
                await asyncio.sleep(_POLL_SECONDS)
            return True
    return False


CHECKS = (
    Check(
        "prefix",
        "self",
        prefix,
        "An answer after a cached prefix has the same log-probs as after a computed one.",
        needs=("completions",),
        deadline_seconds=GROWING_SECONDS,
    ),
    Check(
        "chunked",
        "self",
        chunked,
        "A prompt longer than an engine step has the same log-probs as when it is built up through "
        "the prefix cache.",
        needs=("completions",),
        deadline_seconds=GROWING_SECONDS,
    ),
)
