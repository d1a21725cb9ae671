"""Text without meaning that comes twice: what the network learns to copy from.

Lessons alone do not teach it, because few of their tokens are copies. Drills do within some hundred
steps: the circuit is that of "In-context Learning and Induction Heads" (Olsson and others, 2022,
https://arxiv.org/abs/2209.11895), which forms where text repeats itself.
"""

from __future__ import annotations

import string
from random import Random

from demo_training.chats import Example
from demo_training.skills.words import foreign_word, invented_word
from holdfast.demo.tokenizer import EOS_ID

_ALPHABETS = (
    string.ascii_lowercase,
    string.ascii_lowercase + " ",
    string.ascii_letters + string.digits,
    string.digits + "-. ",
    string.printable.strip(),
)
_MIN_CHARACTERS = 4
_MAX_CHARACTERS = 28
_MAX_WORDS = 4
_MAX_PAIRS = 5
_SEPARATORS = ("\n", "\n", ". ")


def draw_drill(random: Random) -> Example:
    """Letters, words or pairs of words, and the same again; only what is said again is taught."""
    draw = random.choice((_letters, _words, _pairs))
    first, again = draw(random)
    separator = random.choice(_SEPARATORS)
    prompt = f"{first}{separator}".encode()
    return Example((*prompt, *again.encode(), EOS_ID), len(prompt))


def _letters(random: Random) -> tuple[str, str]:
    alphabet = random.choice(_ALPHABETS)
    length = random.randint(_MIN_CHARACTERS, _MAX_CHARACTERS)
    text = "".join(random.choice(alphabet) for _ in range(length))
    return text, text


def _words(random: Random) -> tuple[str, str]:
    text = " ".join(_word(random) for _ in range(random.randint(1, _MAX_WORDS)))
    return text, text


def _pairs(random: Random) -> tuple[str, str]:
    """Pairs of words in one order and another: a word calls for the one that followed it."""
    pairs = [f"{_word(random)} {_word(random)}" for _ in range(random.randint(2, _MAX_PAIRS))]
    again = random.sample(pairs, len(pairs))
    return ", ".join(pairs), ", ".join(again)


def _word(random: Random) -> str:
    draw = random.choice((invented_word, invented_word, _number, foreign_word))
    return draw(random)


def _number(random: Random) -> str:
    return str(random.randint(0, 99_999))
