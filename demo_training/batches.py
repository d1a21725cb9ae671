"""The lessons of one optimizer step, as padded batches; a pure function of course and step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import torch

from demo_training.chats import Example, example_of, example_of_dialogue, example_of_text
from demo_training.course import Course, drill_share
from demo_training.drills import draw_drill
from demo_training.lessons import Lesson
from demo_training.skills import draw_fine_tuning_lesson, draw_last_lesson, draw_lesson
from demo_training.skills.needles import draw_hard_text, draw_long_text
from demo_training.skills.texts import draw_text
from holdfast.demo.files import MAX_MODEL_TOKENS
from holdfast.demo.tokenizer import PAD_ID

MAX_BATCH_TOKENS = 1024
"""What fits into the caches of a core, and parts a step into halves of about the same work."""
_TEXT_SHARE = 0.08
_FAR_SHARE = 0.3
_GROWING, _FULL = (0.75, 1 / 2), (0.9, 1 / 3)
"""The shortest of the long texts, as a share of the longest, and the part that is early."""
_BREAKS = frozenset(b".\n")
_NOT_TAUGHT = -100
"""The label that torch's cross entropy leaves out."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded sequences, their positions and, for each token, the one that has to follow."""

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor


def step_batches(course: Course, step: int) -> list[Batch]:
    """The batches of one step, shortest examples first, then the long texts."""
    random = Random(f"{course.seed} {step}")
    share = drill_share(step)
    draw = _lessons_of(course, step)
    examples = [_draw_example(random, share, draw) for _ in range(course.lessons_per_step)]
    batches = [batch_of(group, random) for group in grouped(examples)]
    if course.has_long_texts(step):
        batches += _long_texts(course, step, random)
    return batches


def _lessons_of(course: Course, step: int) -> Callable[[Random], Lesson]:
    if course.has_records(step):
        return draw_last_lesson
    return draw_fine_tuning_lesson if course.is_fine_tuning(step) else draw_lesson


def _long_texts(course: Course, step: int, random: Random) -> list[Batch]:
    """Texts of about one length, so that each core has the same work."""
    shortest, early = _FULL if course.has_full_texts(step) else _GROWING
    tokens = int(course.longest_text_tokens(step) * random.uniform(shortest, 1.0))
    texts = [
        draw_hard_text(random, tokens)
        if course.has_hard_texts(step)
        else draw_long_text(random, tokens, early)
        for _ in range(course.long_texts(step))
    ]
    return [batch_of([example_of_dialogue(text)]) for text in texts]


def grouped(examples: list[Example]) -> Iterator[list[Example]]:
    """`examples` by length, in groups that stay within the tokens of a batch when padded."""
    group: list[Example] = []
    for example in sorted(examples, key=lambda example: len(example.tokens)):
        if group and (len(group) + 1) * len(example.tokens) > MAX_BATCH_TOKENS:
            yield group
            group = []
        group.append(example)
    yield group


def batch_of(examples: list[Example], random: Random | None = None) -> Batch:
    """One batch; with `random`, some sequences have a gap in their positions.

    Nothing stands in the gap. It teaches what lies far apart without the cost of long sequences. It
    lies between two sentences or lines of the prompt, because no word is ever torn apart.
    """
    longest = max(len(example.tokens) for example in examples)
    tokens = torch.full((len(examples), longest), PAD_ID)
    labels = torch.full((len(examples), longest), _NOT_TAUGHT)
    positions = torch.arange(longest).repeat(len(examples), 1)
    for row, example in enumerate(examples):
        length, first = len(example.tokens), example.first_taught
        sequence = torch.tensor(example.tokens)
        tokens[row, :length] = sequence
        labels[row, first - 1 : length - 1] = sequence[first:]
        for read in example.only_read:
            labels[row, read.start - 1 : read.stop - 1] = _NOT_TAUGHT
        if random is not None and random.random() < _FAR_SHARE:
            _open_gap(positions[row], example, random)
    return Batch(tokens, positions, labels)


def _open_gap(positions: torch.Tensor, example: Example, random: Random) -> None:
    prompt = example.tokens[: example.first_taught]
    places = [place for place, token in enumerate(prompt, start=1) if token in _BREAKS]
    if places:
        positions[random.choice(places) :] += random.randrange(
            MAX_MODEL_TOKENS - len(example.tokens)
        )


def _draw_example(random: Random, drills: float, draw: Callable[[Random], Lesson]) -> Example:
    if random.random() < drills:
        return draw_drill(random)
    if random.random() < _TEXT_SHARE:
        return example_of_text(draw_text(random))
    return example_of(draw(random))
