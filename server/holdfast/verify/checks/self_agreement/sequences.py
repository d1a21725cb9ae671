"""Token sequences of any length, the same in every run against one model."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import takewhile

from holdfast.verify.scoring import token_ids_of
from holdfast.verify.trial import Trial

ANSWER_TOKENS = 24
"""What is decoded behind a prompt."""
MOST_SCORED_TOKENS = 512
"""The longest prompt whose every position is scored: vLLM takes 4 bytes for each position and each
token of the vocabulary, which no profile run has reserved."""
_UNKNOWN_LENGTH = 2048
_SENTENCES = (
    "The harbour master wrote down the wind, the tide and the name of every ship.",
    "At 04:17 the lamp went out; nobody noticed until 05:02.",
    "def depth(fathoms: int) -> float:\n    return fathoms * 1.8288\n",
    "If the rope is wet, then it is heavier, and the knot holds better.",
    "Le phare est allumé. Der Leuchtturm brennt. El faro está encendido.",
    '{"ship": "Aurora", "tons": 1240, "cargo": ["salt", "tar", "hemp"]}',
    "Seven times eight is fifty-six, and nine times seven is sixty-three.",
    "She asked whether the anchor held. It held, he said, it always holds.",
    "| hour | wind | sea |\n| 6 | NW 4 | slight |\n| 9 | NW 6 | rough |\n",
    "Water boils at 100 degrees, sooner on a mountain than on a beach.",
    "First take in the mainsail. Second, heave to. Third, wait for the light.",
    "The quick brown fox jumps over the lazy dog, twice, and then sleeps.",
)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Makes prompts from sentences of the tool, as the model's tokenizer cuts them."""

    start: tuple[int, ...]
    """What the tokenizer puts before every text."""
    sentences: tuple[tuple[int, ...], ...]
    longest_tokens: int
    """The length of the longest prompt with its answer."""

    def longest_scored(self, answer_tokens: int) -> int:
        """The longest prompt that can be scored with its answer, which takes one token more."""
        return max(self.longest_tokens - answer_tokens - 1, 1)

    def prompt(self, tokens: int, number: int = 0) -> list[int]:
        """A prompt of this length; another number is another prompt, longer ones begin alike."""
        order = random.Random(number)  # noqa: S311 - the same in every run
        ids = list(self.start)
        while len(ids) < tokens:
            ids += order.choice(self.sentences)
        return ids[:tokens]


async def sequences(trial: Trial) -> Sequences:
    """Return the sequences for the model, from the token ids of the sentences.

    Raises:
        SkippedError: the server does not report token ids.
    """
    ids = [await token_ids_of(trial, sentence) for sentence in _SENTENCES]
    heads = takewhile(lambda column: len(set(column)) == 1, zip(*ids, strict=False))
    start = tuple(column[0] for column in heads)
    cut = [tuple(one[len(start) :]) for one in ids]
    return Sequences(start, tuple(one for one in cut if one), longest_tokens(trial))


def longest_tokens(trial: Trial) -> int:
    """The longest prompt with its answer that the server promises: with Holdfast, has proven."""
    found = trial.server.max_model_len or _UNKNOWN_LENGTH
    proof = trial.server.holdfast.proof if trial.server.holdfast else {}
    proven = proof.get("proven_tokens")
    return min(found, proven) if isinstance(proven, int) and proven > 0 else found
