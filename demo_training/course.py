"""What is trained for how long: all that the weights depend on, beside code and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

_WARMUP_STEPS = 50
DECAY_SHARE = 0.35
FINE_TUNING_RATE = 0.3
_FINE_TUNING_DECAY_SHARE = 0.5
FINE_TUNED_SHARE = 0.8
"""In the mean of the weights before and after fine-tuning, which keeps more of what the lessons
taught than those after it ("Robust fine-tuning of zero-shot models", Wortsman and others, 2021,
https://arxiv.org/abs/2109.01903)."""
_DRILL_STEPS = 400
_LATER_DRILL_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class Course:
    """Seed and length of a training: `steps` of all lessons, then some that mend weak skills.

    The rate is constant until the last third of `steps`, so a longer course can go on from a
    checkpoint of a shorter one that was interrupted before its decay. Fine-tuning rises and falls
    once more, to `FINE_TUNING_RATE` of the peak.
    """

    seed: int = 20
    steps: int = 4000
    lessons_per_step: int = 64
    fine_tuning_steps: int = 900

    @property
    def total_steps(self) -> int:
        """The steps of the whole training."""
        return self.steps + self.fine_tuning_steps

    def is_fine_tuning(self, step: int) -> bool:
        """Whether `step` comes after those of all lessons."""
        return step >= self.steps

    def rate(self, step: int) -> float:
        """The share of the peak learning rate at `step`."""
        if self.is_fine_tuning(step):
            return FINE_TUNING_RATE * _rate(
                step - self.steps, self.fine_tuning_steps, _FINE_TUNING_DECAY_SHARE
            )
        return _rate(step, self.steps, DECAY_SHARE)

    def continues(self, other: Course, steps_done: int) -> bool:
        """Whether the first steps of `other` are those of this course, so that it can go on."""
        is_alike = (self.seed, self.lessons_per_step) == (other.seed, other.lessons_per_step)
        is_within = steps_done <= self.total_steps
        return (
            is_alike
            and is_within
            and all(self.rate(step) == other.rate(step) for step in range(steps_done))
        )


def _rate(step: int, steps: int, decay_share: float) -> float:
    """One, but for a warmup at the beginning of `steps` and the decay at their end."""
    warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
    return min(warmup, (steps - step) / (steps * decay_share))


def drill_share(step: int) -> float:
    """The share of drills among the examples of a step: all of the first, and some of the rest."""
    return 1.0 if step < _DRILL_STEPS else _LATER_DRILL_SHARE
