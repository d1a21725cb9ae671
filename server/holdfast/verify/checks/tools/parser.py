"""Does the parser hand over every call that the model wrote?

The same prompt is asked twice: as a chat, whose answer goes through the parser, and as a completion
of the chat's own token ids, whose text has not been parsed.
"""

from __future__ import annotations

import re
from collections import Counter

from holdfast.verify.answers import MalformedError, dig
from holdfast.verify.check import Check
from holdfast.verify.checks.tools.asking import ANSWER_TOKENS, NAMES, ToolBody, bodies
from holdfast.verify.checks.tools.calls import Turn, is_cut, whole_turn
from holdfast.verify.trial import CHAT, InconclusiveError, SkippedError, Trial

_ANY_NAME = "|".join(NAMES)
_TAGS = rf"<(?:function=|invoke name=|tool_call>\s*)\"?({_ANY_NAME})\b"
_CALL_FORMS = re.compile(
    rf'"name"\s*:\s*"({_ANY_NAME})"'
    rf"|\b({_ANY_NAME})(?:\(\s*(?:\w+\s*=|[\"'{{])|(?:\[ARGS\])?\s*{{\")"
    rf"|{_TAGS}"
)
"""JSON, a name before its arguments, and tags."""
_TAGGED = re.compile(_TAGS)
_BEGINNING = re.compile(rf"\s*(?:[\[{{<]|(?:{_ANY_NAME})\b)")
"""Where a call stands alone. In prose, a model may as well tell what it is about to do."""


async def parser(trial: Trial) -> None:
    """As many calls of each function as the model's own text names it."""
    free = [body for body in bodies(trial) if "tool_choice" not in body]
    seen = 0
    for body in free:
        seen += await _judge(trial, body)
    if not seen:
        raise SkippedError(f"the model makes no call of its own within {ANSWER_TOKENS} tokens")
    trial.measure("calls that the model wrote", seen)


async def _judge(trial: Trial, body: ToolBody) -> int:
    """Note what the parser lost or made up; how many calls the model wrote.

    Raises:
        InconclusiveError: the model does not write the same twice.
    """
    written = await _written(trial, body)
    answer = await trial.post(CHAT, body)
    if is_cut(answer, body):
        return 0
    turn = whole_turn(answer)
    made = _calls(turn)
    if written == made + _mentions(turn):
        return made.total()
    if await _written(trial, body) != written or whole_turn(await trial.post(CHAT, body)) != turn:
        raise InconclusiveError("the server does not give the same greedy answer twice")
    for name in NAMES:
        wrote, got = written[name] - _mentions(turn)[name], made[name]
        left = left_in(turn.content)[name]
        said = f"the model wrote {wrote} calls of {name}, not {got}"
        said += f"; {left} of them are left in the text" if left else ""
        trial.require(wrote == got, said, answer)
    return written.total()


async def _written(trial: Trial, body: ToolBody) -> Counter[str]:
    """How often the model names each function in the text that no parser has seen."""
    tokenized = await trial.tokenize(body)
    prompt = dig(tokenized.document, "tokens", kind=list)
    if not all(isinstance(token, int) for token in prompt):
        raise MalformedError("tokens has other values than integers")
    answer = await trial.complete(
        prompt,
        max_tokens=body["max_tokens"],
        skip_special_tokens=False,
        add_special_tokens=False,
    )
    return _named(answer.content())


def _calls(turn: Turn) -> Counter[str]:
    return Counter(call.name for call in turn.calls if call.name in NAMES)


def left_in(content: str) -> Counter[str]:
    """The calls that a parser took for text, in the forms that most models write.

    A call in thoughts, or in prose without tags, is one that the model only speaks of.
    """
    said = content.rpartition("</think>")[2]
    forms = _CALL_FORMS if _BEGINNING.match(said) else _TAGGED
    return Counter(found[found.lastindex or 0] for found in forms.finditer(said))


def _mentions(turn: Turn) -> Counter[str]:
    """The names in what is not a call, and in the arguments of calls."""
    said = [turn.content, turn.reasoning, *(call.arguments for call in turn.calls)]
    return _named("\n".join(said)) - left_in(turn.content)


def _named(text: str) -> Counter[str]:
    return Counter(re.findall(rf"\b(?:{_ANY_NAME})\b", text))


CHECKS = (
    Check(
        "parser",
        "tools",
        parser,
        "Every call that the model writes comes back as a call, even a second one.",
        needs=("tools", "completions", "tokenize"),
    ),
)
