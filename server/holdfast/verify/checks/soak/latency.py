"""Do answers take as long at the end of a soak as at its beginning?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.verify.agreement import quantile
from holdfast.verify.check import ONLY_SOAK, Check
from holdfast.verify.checks.soak.history import SoakHistory, history_of
from holdfast.verify.records import Limit, at_most
from holdfast.verify.trial import InconclusiveError, Trial

LEAST_ANSWERS = 300
"""In a third: of fewer, not even the slowest is slower than 99 % of what there may be, with 95 %
confidence."""
_P99 = 0.99
_FACTOR = 1.2
_ONE_SIDED_95 = 1.645
"""Standard deviations."""
_SLICES = 24
_HOUR_SECONDS = 3600.0


async def latency(trial: Trial) -> None:
    """Compare the 99th percentiles of the first and the last third."""
    history = await history_of(trial)
    thirds = history.by_third()
    first, last = sorted(thirds[0]), sorted(thirds[2])
    trial.measure("answers of the first third", len(first))
    trial.measure("answers of the last third", len(last))
    if min(len(first), len(last)) < LEAST_ANSWERS:
        _draw(trial, history, None)
        raise InconclusiveError(
            f"a third of the soak has fewer than {LEAST_ANSWERS} answers; raise --hours"
        )
    before, now = quantile(first, _P99), quantile(last, _P99)
    trial.measure("p99 of the first third", before, "s")
    trial.measure("p99 of the last third", now, "s")
    limit = limit_of(first)
    trial.measure("p99 of the last third / first third", now / before, limit=limit)
    _draw(trial, history, at_most(limit.value * before, limit.source))


def limit_of(first: Sequence[float]) -> Limit:
    """How much slower the last third may be than the first, whose durations ascend.

    The factor applies to the largest p99 that the first third may stand for: a percentile of a
    sample is not that of the server.
    """
    count = len(first)
    spread = _ONE_SIDED_95 * math.sqrt(count * _P99 * (1 - _P99))
    rank = min(math.ceil(count * _P99 + spread), count)
    sampling = first[rank - 1] / quantile(first, _P99)
    return at_most(_FACTOR * sampling, "A/A" if sampling > 1 else "constant")


def _draw(trial: Trial, history: SoakHistory, limit: Limit | None) -> None:
    slices: dict[int, list[float]] = {}
    length_seconds = max(history.lasted_seconds, 1e-9) / _SLICES
    pairs = zip(history.answered_at_seconds, history.answer_seconds, strict=True)
    for at_seconds, seconds in pairs:
        number = min(int(at_seconds / length_seconds), _SLICES - 1)
        slices.setdefault(number, []).append(seconds)
    points = [
        ((number + 0.5) * length_seconds / _HOUR_SECONDS, quantile(sorted(found), _P99))
        for number, found in sorted(slices.items())
    ]
    trial.draw("p99 of answers", "time [h]", "p99 [s]", points, limit)


CHECKS = (
    Check(
        "latency",
        "soak",
        latency,
        "Under the same load, answers take no longer at the end than at the beginning.",
        profiles=ONLY_SOAK,
        is_afterthought=True,
    ),
)
