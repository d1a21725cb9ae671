"""Does the model find a sentence at any depth of a long text?

A model that does not find it in a short text cannot show anything about long ones.
"""

from __future__ import annotations

import random

from holdfast.verify.answers import dig
from holdfast.verify.check import FROM_STANDARD, Check
from holdfast.verify.checks.self_agreement.sequences import longest_tokens
from holdfast.verify.records import equal_to
from holdfast.verify.target import PATIENT_SECONDS, THOUGHT_ENDS, Answer
from holdfast.verify.trial import InconclusiveError, SkippedError, Trial

_DEPTHS = 15
_JUDGED_DEPTH = 0.9
"""Deeper ones are told, not judged: next to the question almost every model finds them."""
_SHORT_LINES = 8
_LENGTHS = {"standard": (512, 2048, 8192)}
_EVERY_LENGTH = (512, 2048, 8192, 16384, 32768, 65536, 131072, 262144)
_ANSWER_TOKENS = 64
_THINKING_TOKENS = 512
"""Room for a model that thinks first."""
_SHARE = 0.98
"""The share of a length that a text fills: the drawn words of another text may be longer."""
_LONGER_NUMBER_TOKENS = 1
"""How much longer a later line is, because its number is."""
_PLACES = ("harbour", "lighthouse", "shipyard", "ferry", "pier", "chandlery", "customs house")
_NUMBER = "70413"
_QUESTION = "\nWhat is the secret number of the harbour master? Answer with the number only."


async def needles(trial: Trial) -> None:
    """Hide a number at 15 depths of texts of several lengths that the server promises."""
    tokens, short = await _first(trial)
    room = longest_tokens(trial) - tokens
    found: dict[float, list[bool]] = {}
    longest = 0
    for length in sorted({min(one, room) for one in _LENGTHS.get(trial.profile, _EVERY_LENGTH)}):
        lines = await _lines_of(trial, length, short)
        judged = 0
        for step in range(_DEPTHS):
            depth = step / (_DEPTHS - 1)
            answer = await _asked(trial, lines, depth, tokens)
            where = f"at {depth:.0%} of {lines} lines"
            if _is_unsaid(answer, short):
                trial.warn(f"{where} the model still thinks after {tokens} tokens", answer)
                continue
            judged += 1
            longest = max(longest, _prompt_tokens(answer))
            found.setdefault(depth, []).append(_is_found(answer))
            if depth <= _JUDGED_DEPTH:
                trial.require(found[depth][-1], f"{where} the number is not found", answer)
        if not judged:
            raise InconclusiveError(
                f"in all texts of {lines} lines the model still thinks after {tokens} tokens"
            )
    missed = sum(not one for depth, all_ in found.items() for one in all_ if depth <= _JUDGED_DEPTH)
    trial.measure("numbers that were not found", missed, limit=equal_to(0))
    trial.measure("longest prompt", longest, "tokens")
    shares = [(100 * depth, 100 * sum(all_) / len(all_)) for depth, all_ in sorted(found.items())]
    trial.draw("found by depth", "depth [%]", "numbers found [%]", shares)


async def _first(trial: Trial) -> tuple[int, Answer]:
    """How many tokens an answer may have, and the answer about a short text.

    Raises:
        SkippedError: the model does not find the number even there.
        InconclusiveError: it does not end its thoughts.
    """
    tokens = _ANSWER_TOKENS
    short = await _asked(trial, _SHORT_LINES, 0.5, tokens)
    if short.finish_reason() == "length":
        # These may be thoughts. If they have the number by now, those of long texts may not.
        tokens = min(_THINKING_TOKENS, longest_tokens(trial) // 2)
        short = await _asked(trial, _SHORT_LINES, 0.5, tokens)
    if short.is_cut_in_thought():
        raise InconclusiveError(f"the model still thinks after {tokens} tokens")
    if not _is_found(short):
        raise SkippedError("the model does not find a number in a short text")
    return tokens, short


async def _lines_of(trial: Trial, length: int, short: Answer) -> int:
    """How many lines make a prompt of nearly this length, but no longer one."""
    wanted = _SHARE * length
    few = max(_fitting(wanted, _prompt_tokens(short), _SHORT_LINES), 1)
    # These are too few: each line of the short text has a share of the question.
    tokens = _prompt_tokens(await _asked(trial, few, depth=0.0))
    return few + max(_fitting(wanted - tokens, tokens, few), 0)


def _fitting(wanted: float, tokens: int, lines: int) -> int:
    return int(wanted / (tokens / lines + _LONGER_NUMBER_TOKENS))


def _prompt_tokens(answer: Answer) -> int:
    return int(dig(answer.usage(), "prompt_tokens", kind=int))


async def _asked(trial: Trial, lines: int, depth: float, tokens: int = _ANSWER_TOKENS) -> Answer:
    asked = _text(lines, depth)
    return await trial.chat(asked, max_tokens=tokens, deadline_seconds=PATIENT_SECONDS)


def _text(lines: int, depth: float) -> str:
    """Lines about numbers of other places, one about the harbour master's, and the question."""
    drawn = random.Random(lines)  # noqa: S311 - the same in every run
    said = [
        f"Line {number}: the {drawn.choice(_PLACES)} counted {drawn.randrange(10, 1000)} boats."
        for number in range(lines)
    ]
    said.insert(round(depth * lines), f"The secret number of the harbour master is {_NUMBER}.")
    return "\n".join(said) + _QUESTION


def _is_found(answer: Answer) -> bool:
    return _NUMBER in answer.content() + answer.reasoning()


def _is_unsaid(answer: Answer, short: Answer) -> bool:
    """Whether the answer is cut in its thoughts, which the one about a short text may show."""
    is_open = THOUGHT_ENDS in short.content() and THOUGHT_ENDS not in answer.content()
    is_cut = answer.is_cut_in_thought() or (is_open and answer.finish_reason() == "length")
    return is_cut and not _is_found(answer)


CHECKS = (
    Check(
        "needles",
        "self",
        needles,
        "The model finds a sentence at every depth down to 90 % of a text, short or long.",
        profiles=FROM_STANDARD,
        needs=("chat",),
        deadline_seconds=14400.0,
    ),
)
