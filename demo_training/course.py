"""What is trained for how long: all that the weights depend on, beside code and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

_WARMUP_STEPS = 50
DECAY_SHARE = 0.35
FINE_TUNING_RATE = 0.3
_LATER_DECAY_SHARE = 0.5
FINE_TUNED_SHARE, LONG_TEXT_SHARE, HARD_TEXT_SHARE, RECORD_SHARE = 0.8, 0.5, 0.8, 0.4
"""In the mean of the weights before and after a later part, which keeps more of what was taught
before than those after it ("Robust fine-tuning of zero-shot models", Wortsman and others, 2021,
https://arxiv.org/abs/2109.01903)."""
_DRILL_STEPS = 400
_LATER_DRILL_SHARE = 0.15
_FIRST_TEXT_TOKENS = 3000
"""About the longest in which the lessons alone teach to find a sentence."""
_LAST_TEXT_TOKENS = 8000
"""Those of the longest prompt, with room for the reply."""
_GROWING_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Course:
    """Seed and length of a training: `steps` of all lessons, then some that mend weak skills.

    The last four parts have long texts beside the lessons of fine-tuning: texts that grow, texts
    that fill the context, hard ones of that length, and again such ones, but half as many, beside
    lessons that also have answers to record. The rate is constant until the last third
    of `steps`, so a longer course can go on from a checkpoint of a shorter one that was interrupted
    before its decay. In each later part it rises and falls once more, to `FINE_TUNING_RATE` of the
    peak.
    """

    seed: int = 20
    steps: int = 4000
    lessons_per_step: int = 64
    fine_tuning_steps: int = 900
    long_text_steps: int = 440
    full_text_steps: int = 200
    hard_text_steps: int = 440
    record_steps: int = 160
    long_texts_per_step: int = 4

    @property
    def total_steps(self) -> int:
        """The steps of the whole training."""
        return sum(steps for steps, _, _ in self._parts)

    @property
    def _parts(self) -> tuple[tuple[int, float, float], ...]:
        """The steps of each part, its peak rate, and the share of its steps in which that falls."""
        later = (
            self.fine_tuning_steps,
            self.long_text_steps,
            self.full_text_steps,
            self.hard_text_steps,
            self.record_steps,
        )
        return (
            (self.steps, 1.0, DECAY_SHARE),
            *((steps, FINE_TUNING_RATE, _LATER_DECAY_SHARE) for steps in later),
        )

    @property
    def fine_tuned_steps(self) -> int:
        """The steps before the first that has long texts."""
        return self.steps + self.fine_tuning_steps

    @property
    def full_text_trained_steps(self) -> int:
        """The steps before the first that has hard texts."""
        return self.fine_tuned_steps + self.long_text_steps + self.full_text_steps

    @property
    def hard_text_trained_steps(self) -> int:
        """The steps before the first whose lessons have answers to record."""
        return self.full_text_trained_steps + self.hard_text_steps

    @property
    def later_parts(self) -> tuple[int, ...]:
        """The steps with which a part begins that goes on from the weights alone."""
        return (
            self.steps,
            self.fine_tuned_steps,
            self.full_text_trained_steps,
            self.hard_text_trained_steps,
        )

    def is_fine_tuning(self, step: int) -> bool:
        """Whether `step` has the lessons of fine-tuning, which long texts come with as well."""
        return step >= self.steps

    def has_long_texts(self, step: int) -> bool:
        """Whether `step` comes after those of lessons alone."""
        return step >= self.fine_tuned_steps

    def has_full_texts(self, step: int) -> bool:
        """Whether the long texts of `step` fill the context."""
        return step >= self.fine_tuned_steps + self.long_text_steps

    def has_hard_texts(self, step: int) -> bool:
        """Whether the long texts of `step` are hard to search."""
        return step >= self.full_text_trained_steps

    def has_records(self, step: int) -> bool:
        """Whether the lessons of `step` have answers to record as well."""
        return step >= self.hard_text_trained_steps

    def long_texts(self, step: int) -> int:
        """How many long texts `step` has beside its lessons."""
        if not self.has_long_texts(step):
            return 0
        return self.long_texts_per_step // (2 if self.has_records(step) else 1)

    def longest_text_tokens(self, step: int) -> int:
        """How long the texts of `step` may be: they grow, and then stay at their longest."""
        share = (step - self.fine_tuned_steps) / (self.long_text_steps * _GROWING_SHARE)
        grown = (_LAST_TEXT_TOKENS - _FIRST_TEXT_TOKENS) * min(1.0, share)
        return _FIRST_TEXT_TOKENS + int(grown)

    def later_share(self, steps_done: int) -> float:
        """The share of the later weights in the mean that the part before `steps_done` hands on."""
        if steps_done > self.hard_text_trained_steps:
            return RECORD_SHARE
        if steps_done > self.full_text_trained_steps:
            return HARD_TEXT_SHARE
        return LONG_TEXT_SHARE if steps_done > self.fine_tuned_steps else FINE_TUNED_SHARE

    def rate(self, step: int) -> float:
        """The share of the peak learning rate at `step`."""
        for steps, peak, decay_share in self._parts:
            if step < steps:
                return peak * _rate(step, steps, decay_share)
            step -= steps
        raise ValueError("the course has ended before this step")

    def continues(self, other: Course, steps_done: int) -> bool:
        """Whether the first steps of `other` are those of this course, so that it can go on."""
        return (
            self.seed == other.seed
            and steps_done <= self.total_steps
            and all(self._plan(step) == other._plan(step) for step in range(steps_done))
        )

    def _plan(self, step: int) -> tuple[float, ...]:
        """All that makes the step of one course another than that of a course of the same seed."""
        plan = (self.rate(step), self.lessons_per_step)
        if self.has_long_texts(step):
            kind = (self.has_full_texts(step), self.has_hard_texts(step), self.has_records(step))
            return (*plan, self.long_texts(step), self.longest_text_tokens(step), *kind)
        return plan


def _rate(step: int, steps: int, decay_share: float) -> float:
    """One, but for a warmup at the beginning of `steps` and the decay at their end."""
    warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
    return min(warmup, (steps - step) / (steps * decay_share))


def drill_share(step: int) -> float:
    """The share of drills among the examples of a step: all of the first, and some of the rest."""
    return 1.0 if step < _DRILL_STEPS else _LATER_DRILL_SHARE
