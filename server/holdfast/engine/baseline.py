"""Does an engine still compute what was recorded? Compares log-probs with a baseline.

`holdfast verify --record` writes the baseline. The probe scores its sequences before READY, and the
canary its first token while the engine is idle. Both ask when nothing else runs, as the recording
did, because the numbers of a request depend on what shares its step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.errors import UsageError
from holdfast.labels import BaselineCheck
from holdfast.records import BaselineComparison
from holdfast.settings import ProbeSettings
from holdfast.verify.agreement import TopLogProbs, differences, lead_over
from holdfast.verify.baseline import (
    NOISE_FACTOR,
    WIDTH,
    Baseline,
    RecordedSequence,
    read_baseline,
)

FLAG = "--verify-baseline"


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """What an engine said after the prompt of a canary; nothing without a prompt."""

    token: int | None = None
    """The token that it took."""
    top: TopLogProbs = field(default_factory=dict)
    """The log-probs of the likeliest tokens."""


class BaselineWatch:
    """A baseline, and how comparisons with it ended. Any thread may read those.

    A canary that differs is remembered for as long as its engine runs: a fault may come and go.
    """

    def __init__(self, baseline: Baseline, clock: Callable[[], float] = time.monotonic) -> None:
        """Take a baseline.

        Raises:
            UsageError: it has no sequence, or one without the log-probs of each token.
        """
        if not baseline.sequences or not all(map(_is_whole, baseline.sequences)):
            raise UsageError(
                f"{FLAG}: the baseline has no sequence with the log-probs of all its tokens.",
                remedy="record another one with `holdfast verify URL --record FILE`.",
            )
        self.sequences = baseline.sequences
        self.limit_nats = NOISE_FACTOR * baseline.noise.p999
        """The largest difference that counts as noise; 0 where the recorded server had none."""
        self._first_token = next(iter(baseline.first_tokens), None)
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[BaselineCheck, BaselineComparison] = {}

    @property
    def canary_prompt(self) -> tuple[int, ...]:
        """The prompt whose next token the baseline knows; empty if it knows none."""
        return self._first_token.prompt_ids if self._first_token is not None else ()

    def judge(
        self, check: BaselineCheck, worst_nats: float, stray_token: int | None = None
    ) -> BaselineComparison:
        """Keep the largest difference that a check found, and say whether it is noise."""
        agrees = worst_nats <= self.limit_nats and stray_token is None
        found = BaselineComparison(agrees, worst_nats, self._clock(), stray_token)
        with self._lock:
            last = self._last.get(check)
            has_differed = check == "canary" and last is not None and not last.agrees
            self._last[check] = replace(found, agrees=found.agrees and not has_differed)
        return found

    def forget_canary(self) -> None:
        """Forget how the canaries compared: their engine is replaced."""
        with self._lock:
            self._last.pop("canary", None)

    def judge_canary(self, answer: CanaryAnswer) -> BaselineComparison | None:
        """Judge a first token; None if the engine or the baseline told nothing about it."""
        if not answer.top or self._first_token is None or not self._first_token.samples:
            return None
        worst_nats, nearest = min(
            ((max(differences(dict(one), answer.top)), one) for one in self._first_token.samples),
            key=lambda found: found[0],
        )
        return self.judge("canary", worst_nats, self._stray_token(answer.token, dict(nearest)))

    def _stray_token(self, token: int | None, recorded: TopLogProbs) -> int | None:
        """The token, unless it was the likeliest or noise may have made it so."""
        if token is None:
            return None
        return token if lead_over(recorded, token) > 2 * self.limit_nats else None

    def last(self) -> Mapping[BaselineCheck, BaselineComparison]:
        """Return the last comparison of each check that has run.

        That of the canary agrees if all canaries of the engine did.
        """
        with self._lock:
            return dict(self._last)


def baseline_watch(settings: ProbeSettings) -> BaselineWatch | None:
    """Read the file of `--verify-baseline`; None without that flag.

    Raises:
        UsageError: it is not a baseline, or no probe would compare with it.
    """
    if settings.baseline_file is None:
        return None
    if settings.suite == "off":
        raise UsageError(
            f"{FLAG} needs the probe, which --probe off leaves out.",
            remedy="choose --probe quick.",
        )
    return BaselineWatch(read_baseline(settings.baseline_file, FLAG))


def top_width(max_logprobs: int) -> int:
    """Return how many tokens to ask for; a limit of -1 is none."""
    return WIDTH if max_logprobs < 0 else min(WIDTH, max_logprobs)


def worst_position(
    recorded: Sequence[Iterable[tuple[int, float]]], found: Sequence[TopLogProbs]
) -> tuple[int, float]:
    """Return where two scores of a sequence differ most, and by how much; position 0 has none."""
    pairs = enumerate(zip(recorded, found, strict=True), start=1)
    worst = [(position, max(differences(dict(one), other))) for position, (one, other) in pairs]
    return max(worst, key=lambda each: each[1])


def _is_whole(sequence: RecordedSequence) -> bool:
    tokens = len(sequence.prompt_ids) + len(sequence.answer_ids)
    return tokens > 1 and len(sequence.tops) == tokens - 1
