"""Short stories: the one kind of reply with a choice, so that sampling has something to sample."""

from __future__ import annotations

from random import Random

from demo_training.lessons import Lesson, ask, casually
from demo_training.skills.words import COLORS, NAMES

_TOPICS = (
    "lighthouse", "boat", "dog", "key", "tree", "king", "river", "train", "garden", "lamp",
    "bird", "storm", "letter", "bridge", "clock",
)  # fmt: skip
_ASKED = (
    "Tell me a short story about a {}.",
    "Tell me a story about a {}.",
    "Write a short story about a {}.",
    "Tell a short story about a {}.",
)
_BEGINNINGS = (
    "{name} lived near a {color} {topic}.",
    "Once there was a {color} {topic}.",
    "{name} found an old {topic}.",
    "There was a {topic} that {name} loved.",
)
_MIDDLES = (
    "One night it rained, and {name} stayed by the {topic}.",
    "Every day {name} came to see the {topic}.",
    "Nobody but {name} knew why the {topic} was so quiet.",
    "Then {name} and a friend painted the {topic} {color}.",
)
_ENDS = (
    "In the morning all was well.",
    "So they were glad, and went home.",
    "It is still there today.",
    "And {name} never told anyone.",
)


def draw_story(random: Random) -> Lesson:
    """A story of three sentences about what the question names."""
    values = {
        "topic": random.choice(_TOPICS),
        "name": random.choice(NAMES),
        "color": random.choice(COLORS),
    }
    sentences = (random.choice(part) for part in (_BEGINNINGS, _MIDDLES, _ENDS))
    question = random.choice(_ASKED).format(values["topic"])
    return ask(casually(question, random), " ".join(sentences).format(**values))
