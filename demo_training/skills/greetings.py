"""Hello, thanks and goodbye."""

from __future__ import annotations

from random import Random

from demo_training.lessons import Lesson, Phrasings, ask, casually

_INTRODUCTION = "I am the demo model of Holdfast. How can I help you?"
_HELLOS = {"Hello": "Hello", "Hi": "Hello", "Hey": "Hello"} | {
    f"Good {time}": f"Good {time}" for time in ("morning", "afternoon", "evening")
}
_HELLO_FORMS = Phrasings(
    (
        "{}",
        "{}!",
        "{}.",
        "{} there!",
        "{}, Holdfast!",
        "{} Holdfast.",
        "{}, how are you?",
        "{} you!",
    ),
    ("{}, model!", "{} there.", "{}, Holdfast.", "{} Holdfast!"),
)
_THANKS = Phrasings(
    ("Thanks.", "Thank you.", "Thank you!", "Thanks a lot!", "Thanks, Holdfast.", "Many thanks!"),
    ("Thanks!", "Thank you, Holdfast.", "Many thanks."),
)
_GOODBYES = Phrasings(
    ("Goodbye.", "Goodbye!", "Bye.", "Bye!", "See you later.", "Bye bye!", "Good night."),
    ("Goodbye, Holdfast.", "Bye, Holdfast!", "See you later!"),
)


def draw_greeting(random: Random, *, is_exam: bool) -> Lesson:
    """A hello with the introduction as its reply, more rarely thanks or a goodbye."""
    kind = random.random()
    if kind < 0.15:
        return ask(_THANKS.draw(random, is_exam=is_exam), "You are welcome.")
    if kind < 0.3:
        return ask(_GOODBYES.draw(random, is_exam=is_exam), "Goodbye! Come back soon.")
    hello, answer = random.choice(list(_HELLOS.items()))
    question = _HELLO_FORMS.draw(random, is_exam=is_exam).format(hello)
    return ask(casually(question, random), f"{answer}! {_INTRODUCTION}")
