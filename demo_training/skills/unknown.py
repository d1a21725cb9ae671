"""Questions that the model cannot answer, and says so."""

from __future__ import annotations

from random import Random

from demo_training.lessons import Lesson, Phrasings, ask, casually
from demo_training.skills.capitals import ASKED_FOR_CAPITAL
from demo_training.skills.words import invented_name, invented_word

_UNKNOWN = "I do not know that. I am a small demo model."
_TOPICS = (
    "sky", "sea", "moon", "sun", "dog", "cat", "music", "football", "history", "love", "war",
    "money", "bread", "car", "winter", "tree", "king", "language", "movie", "book", "doctor",
    "computer", "game", "friend", "school", "water", "river", "poem", "recipe", "secret",
)  # fmt: skip
_QUESTIONS = Phrasings(
    (
        "Tell me a joke.",
        "Write a poem.",
        "What time is it?",
        "What is the date today?",
        "How old are you?",
        "What is the best {word}?",
        "Which {word} do you like?",
        "Where can I find a {word}?",
        "How does a {word} work?",
        "What is {a} {word}?",
        "Why is the {word} {other}?",
        "Who invented the {word}?",
        "Write a poem about the {word}.",
        "How do I {word} a {other}?",
        "When did {name} live?",
        "Explain {word} to me.",
        "Translate {word} to French.",
        "Tell me a joke about {name}.",
        "{name} {word} {other}",
    ),
    (
        "Sing me a song.",
        "What is your favorite {word}?",
        "Who wrote {name}?",
        "Write a poem about {name}.",
        "Why does {name} {word}?",
    ),
)
_QUESTIONS_OTHERWISE = Phrasings(
    (
        "Sing for me.",
        "Play a song about the {word}.",
        "Sing {a} {word}.",
        "Draw {a} {word} for me.",
        "Show me a picture of {name}.",
        "Tell me about {name}.",
        "Who wrote the {word}?",
        "Who painted {name}?",
        "Who is {name}?",
        "Who wrote {a} {word} about {name}?",
        "What is your name for {a} {word}?",
        "What does {name} {word}?",
        "Why does {a} {word} {other}?",
        "Why do you {word}?",
        "Why is {name} {word}?",
        "Where does {name} live?",
        "Write {a} {word} for {name}.",
        "Write a letter to {name}.",
        "Is {name} {a} {word}?",
        "Do you like {name}?",
        "Can you {word} {a} {other}?",
        "Make me {a} {word}.",
        "Give me {a} {word}.",
        "Help me with my {word}.",
        "Should I buy {a} {word}?",
        "How far is {name}?",
        "How many people live in {name}?",
    ),
    ("Dance for me.", "What do you think of {name}?", "How tall is {name}?"),
)
_COUNTRY_SHARE = 0.2


def draw_unknown(random: Random, *, is_exam: bool) -> Lesson:
    """Something that no other skill has taught, often about words that do not exist."""
    return _draw_unknown(random, _QUESTIONS, is_exam=is_exam)


def draw_unknown_otherwise(random: Random, *, is_exam: bool) -> Lesson:
    """The same, with other questions."""
    return _draw_unknown(random, _QUESTIONS_OTHERWISE, is_exam=is_exam)


def _draw_unknown(random: Random, questions: Phrasings, *, is_exam: bool) -> Lesson:
    if random.random() < _COUNTRY_SHARE:
        question = ASKED_FOR_CAPITAL.draw(random, is_exam=is_exam).format(invented_name(random))
        return ask(question, _UNKNOWN)
    question = questions.draw(random, is_exam=is_exam).format(
        a=random.choice(("a", "the")),
        word=_word(random),
        other=_word(random),
        name=invented_name(random),
    )
    return ask(casually(question, random), _UNKNOWN)


def _word(random: Random) -> str:
    return random.choice(_TOPICS) if random.random() < 1 / 2 else invented_word(random)
