"""The page about the demo model has its skills, its examples and the numbers of its training."""

from __future__ import annotations

import json

import pytest

from demo_examples import EXAMPLES
from demo_training import shape
from demo_training.course import (
    DECAY_SHARE,
    FINE_TUNED_SHARE,
    FINE_TUNING_RATE,
    HARD_TEXT_SHARE,
    LONG_TEXT_SHARE,
    RECORD_SHARE,
    Course,
)
from demo_training.skills import SKILLS
from holdfast.demo.trained import FILES, RECORD, TRAINED_DIRECTORY, is_trained
from project.test_docs import DEMO_MODEL, INLINE, ROOT, table


def test_every_skill_is_explained() -> None:
    """In the order of the lessons."""
    assert [row[0].strip("`") for row in table(DEMO_MODEL, "## What it knows")] == [*SKILLS]


@pytest.mark.skipif(not is_trained(), reason="the package has no trained weights")
def test_the_scores_are_those_of_the_weights() -> None:
    """Nobody is promised more than the exam has shown."""
    scores = json.loads((TRAINED_DIRECTORY / RECORD).read_text())["scores"]
    told = {row[0].strip("`"): row[1] for row in table(DEMO_MODEL, "## What it knows")}
    assert told == {name: f"{score:.0%}" for name, score in scores.items()}


def test_the_examples_are_those_that_a_server_is_asked() -> None:
    """Question and answer, to the letter."""
    rows = table(DEMO_MODEL, "## Examples")
    assert [tuple(cell.strip("`") for cell in row) for row in rows] == [*EXAMPLES.items()]


def test_the_numbers_of_the_training_are_those_of_the_code() -> None:
    """A reader who repeats it gets what the page says."""
    rows = {row[0]: row[1] for row in table(DEMO_MODEL, "## How it was trained")}
    course = Course()
    assert f"{course.steps:,} steps of {course.lessons_per_step} lessons" in rows["lessons"]
    assert f"then {course.fine_tuning_steps:,} steps of fine-tuning" in rows["lessons"]
    texts = (
        f"{course.long_text_steps:,} further steps, each with {course.long_texts_per_step} texts"
    )
    assert texts in rows["long texts"]
    assert f"In {course.full_text_steps:,} steps more" in rows["long texts"]
    assert f"in {course.hard_text_steps:,} after them they are hard" in rows["long texts"]
    assert f"the last {course.record_steps:,} steps" in rows["answers to record"]
    steps = (course.fine_tuned_steps, course.total_steps - 1)
    first, last = map(course.longest_text_tokens, steps)
    assert f"from {first:,} tokens to {last:,}" in rows["long texts"]
    assert rows["seed"] == str(course.seed)
    assert f"last {_percent(DECAY_SHARE)}" in rows["optimizers"]
    assert f"to {_percent(FINE_TUNING_RATE)} of its peak" in rows["optimizers"]
    assert f"{_percent(FINE_TUNED_SHARE)} after fine-tuning" in rows["optimizers"]
    assert f"{_percent(LONG_TEXT_SHARE)} after the full-context texts" in rows["optimizers"]
    assert f"{_percent(HARD_TEXT_SHARE)} after the hard ones" in rows["optimizers"]
    assert f"{_percent(RECORD_SHARE)} at the end" in rows["optimizers"]
    sizes = f"{shape.LAYERS} layers, {shape.HIDDEN_SIZE} channels, {shape.HEADS} heads"
    assert f"{sizes}, {shape.KV_HEADS} of them" in rows["network"]


def test_the_time_of_the_training_is_the_same_everywhere() -> None:
    """In `make help` and in CONTRIBUTING it is the time on the page."""
    time = {row[0]: row[1] for row in table(DEMO_MODEL, "## How it was trained")}["time"]
    hours = time.removeprefix("about ").partition(" on ")[0]
    for name in ("Makefile", "CONTRIBUTING.md"):
        assert f"train weights for a demo model that answers ({hours})" in (ROOT / name).read_text()


def test_every_file_of_the_trained_weights_is_explained() -> None:
    """And the directory is named where they are put."""
    rows = table(DEMO_MODEL, "## Train it again")
    assert [name for row in rows for name in INLINE.findall(row[0])] == [*FILES, RECORD]
    assert f"`{TRAINED_DIRECTORY.relative_to(ROOT)}/`" in DEMO_MODEL.read_text()


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " percent")
