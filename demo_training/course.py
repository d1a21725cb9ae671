"""What is trained for how long: all that the weights depend on, beside code and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

_WARMUP_STEPS = 50
DECAY_SHARE = 0.35
_DRILL_STEPS = 400
_LATER_DRILL_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class Course:
    """Seed and length of a training.

    The rate is constant until the last third, so a longer course can go on from a checkpoint of a
    shorter one that was interrupted before its decay.
    """

    seed: int = 20
    steps: int = 2400
    lessons_per_step: int = 64

    def rate(self, step: int) -> float:
        """The share of the peak learning rate at `step`."""
        warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
        return min(warmup, (self.steps - step) / (self.steps * DECAY_SHARE))

    def continues(self, other: Course, steps_done: int) -> bool:
        """Whether the first steps of `other` are those of this course, so that it can go on."""
        is_alike = (self.seed, self.lessons_per_step) == (other.seed, other.lessons_per_step)
        is_within = steps_done <= self.steps
        return (
            is_alike
            and is_within
            and all(self.rate(step) == other.rate(step) for step in range(steps_done))
        )


def drill_share(step: int) -> float:
    """The share of drills among the examples of a step: all of the first, and some of the rest."""
    return 1.0 if step < _DRILL_STEPS else _LATER_DRILL_SHARE
