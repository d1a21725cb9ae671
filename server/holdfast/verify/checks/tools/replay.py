"""What does the server's own parser make of answers that models of its kind have written?

canitoolcall has recorded such answers, with what they mean. vLLM parses the tokens of an answer at
`DERENDER`, at once or part by part, if it is started with `--enable-scale-out`. So the parsers that
judge are those of the running server, with its flags, its tokenizer and Holdfast's patches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from holdfast.verify.answers import dig, dig_or, is_absent
from holdfast.verify.check import Check
from holdfast.verify.checks.tools.asking import ToolBody
from holdfast.verify.survey import given_flags
from holdfast.verify.trial import TOKENIZE, SkippedError, Trial, UnexpectedStatusError
from holdfast.verify.waiting import together

if TYPE_CHECKING:  # a package of the extra `verify`
    from canitoolcall.chunking import ChunkStrategy
    from canitoolcall.fixtures import Family, Fixture
    from canitoolcall.results import CheckResult, ParseResult

DERENDER = "/v1/chat/completions/derender"
SCORE = "recorded answers parsed"
_AT_ONCE = 4
_UNKNOWN_LENGTH = 2048
_PARTS = 16
"""About how many a stream has: for each one, vLLM parses all that came before it again."""
_MIN_LARGEST_PART_TOKENS = 8
"""Several tokens come at once with speculative decoding, and where the front end is busy."""
_FORBIDDEN = 403
_QUESTION = "Use the tools to answer."


@dataclass(frozen=True, slots=True)
class _Recorded:
    """An answer that a model has written."""

    fixture: Fixture
    family: Family
    request: ToolBody
    """The chat that it answers."""
    prompt_ids: list[int]
    ids: list[int]
    """Its tokens, as the served model's tokenizer has them."""


async def replay(trial: Trial) -> None:
    """How many recorded answers come out as they were meant, at once and as streams.

    What goes wrong is vLLM's own doing, so it is warned of; a baseline says how much may be.
    """
    longest = trial.server.max_model_len or _UNKNOWN_LENGTH
    short = [one for one in await _suitable(trial) if len(one[0].raw_output) <= longest]
    known = [await _recorded(trial, *one) for one in short]
    fitting = [one for one in known if len(one.prompt_ids) + len(one.ids) <= longest]
    if not fitting:
        raise SkippedError("no recorded answer is short enough for the served model")
    room = asyncio.Semaphore(_AT_ONCE)

    async def parsed(recorded: _Recorded) -> bool:
        async with room:
            return await _is_parsed(trial, recorded)

    outcomes = await together(*map(parsed, fitting))
    trial.score(SCORE, sum(outcomes), len(outcomes))


async def _suitable(trial: Trial) -> list[tuple[Fixture, Family]]:
    """The answers of models that need the parsers of this server.

    Raises:
        SkippedError: the server does not parse on request, or it is not known what it parses.
        UnexpectedStatusError: it is vLLM's, lists the route, and does not have it.
    """
    answer = await trial.admitted(partial(trial.ask, DERENDER, {}))
    is_promised = trial.server.is_vllm and DERENDER in trial.server.routes
    if is_promised and is_absent(answer.status):
        raise UnexpectedStatusError(answer)
    if answer.status == _FORBIDDEN or is_absent(answer.status):
        why = "the server does not parse the tokens of an answer"
        raise SkippedError(why, "start vLLM or Holdfast with --enable-scale-out")
    told = trial.server.configuration
    flags = given_flags(told.flags) if told is not None else {}
    tool_parser = flags.get("--tool-call-parser", "")
    if not tool_parser:
        why = "the server does not say which parser it uses"
        raise SkippedError(why, "serve it with `holdfast serve --tool-call-parser X`")
    found = _of_parsers(tool_parser, flags.get("--reasoning-parser", ""))
    if not found:
        raise SkippedError(f"canitoolcall has no answers for the parser {tool_parser}")
    return found


def _of_parsers(tool_parser: str, reasoning_parser: str) -> list[tuple[Fixture, Family]]:
    """The whole answers of models that need these parsers, by canitoolcall's table of models.

    Without a reasoning parser these are answers without thoughts, of any model that needs the tool
    parser. Half a call and a broken one mean something else to each parser, so they are left out.
    """
    from canitoolcall.adapters.vllm import resolve_parsers  # noqa: PLC0415 - as in `probe`
    from canitoolcall.fixtures import load_families, load_fixtures  # noqa: PLC0415 - as above

    families = load_families()
    found = []
    for fixture in load_fixtures():
        rule = resolve_parsers(fixture.family, fixture.reference_model)
        choice = rule.choice if rule is not None else None
        if choice is None or fixture.truncated or fixture.expected is None:
            continue
        is_alike = (choice.reasoning_parser or "") == reasoning_parser
        has_thoughts = bool(fixture.thinking) or "reasoning" in fixture.tags
        is_plain = not (reasoning_parser or has_thoughts)
        if choice.tool_parser == tool_parser and (is_alike or is_plain):
            found.append((fixture, families[fixture.family]))
    return found


async def _recorded(trial: Trial, fixture: Fixture, family: Family) -> _Recorded:
    request = trial.chat_body(_QUESTION, max_tokens=1)
    if fixture.tools:
        request |= {"tools": list(fixture.tools), "tool_choice": "auto"}
    if fixture.thinking is not None:  # templates call it one or the other
        thinking = {"enable_thinking": fixture.thinking, "thinking": fixture.thinking}
        request["chat_template_kwargs"] = thinking
    names = ("model", "messages", "tools", "chat_template_kwargs")
    asked = {name: request[name] for name in names if name in request}
    written = {"prompt": fixture.raw_output, "add_special_tokens": False}
    return _Recorded(
        fixture,
        family,
        request,
        prompt_ids=await _tokens(trial, asked),
        ids=await _tokens(trial, {"model": trial.server.model, **written}),
    )


async def _tokens(trial: Trial, body: ToolBody) -> list[int]:
    return dig((await trial.post(TOKENIZE, body)).document, "tokens", kind=list)


async def _is_parsed(trial: Trial, recorded: _Recorded) -> bool:
    """Whether an answer comes out as it was meant, and warn of what does not."""
    from canitoolcall.checks import case_status, run_checks  # noqa: PLC0415 - as in `probe`
    from canitoolcall.results import Observation, Status  # noqa: PLC0415 - as above

    observed = Observation(
        nonstream=await _at_once(trial, recorded),
        streams={
            strategy.id: await _as_stream(trial, recorded, strategy)
            for strategy in _strategies(len(recorded.ids))
        },
    )
    rows = run_checks(recorded.fixture, recorded.family, observed)
    is_right = case_status(rows) in {Status.PASS, Status.SOFT_PASS}
    if not is_right:
        trial.warn(_first_fault(recorded, rows))
    return is_right


def _first_fault(recorded: _Recorded, rows: Sequence[CheckResult]) -> str:
    from canitoolcall.results import Status  # noqa: PLC0415 - as in `probe`

    worst = next(row for row in rows if row.status not in {Status.PASS, Status.SOFT_PASS})
    way = "at once" if worst.strategy == "nonstream" else f"as a stream ({worst.strategy})"
    return f"{recorded.fixture.id}, {way}: {worst.check}: {worst.detail}"


async def _at_once(trial: Trial, recorded: _Recorded) -> ParseResult:
    """What the parser makes of the whole answer; an error if it fails."""
    from canitoolcall.results import ParsedToolCall, ParseResult  # noqa: PLC0415 - as in `probe`

    choice = _choice(recorded.ids, "stop")
    body = {**_frame(trial, recorded), "generate_response": {"choices": [choice]}}
    try:
        answer = await trial.post(DERENDER, body)
    except UnexpectedStatusError as error:
        return ParseResult(exception=f"HTTP {error.status}")
    message = dig(answer.document, "choices", 0, "message", kind=dict)
    calls = [dig(call, "function", kind=dict) for call in message.get("tool_calls") or ()]
    return ParseResult(
        content=message.get("content"),
        reasoning_content=message.get("reasoning"),
        tool_calls=tuple(
            ParsedToolCall(dig(call, "name", kind=str), call.get("arguments")) for call in calls
        ),
    )


def _strategies(tokens: int) -> tuple[ChunkStrategy, ...]:
    """How an answer is cut into the parts of a stream: not at all, and at random places."""
    from canitoolcall.chunking import ChunkStrategy  # noqa: PLC0415 - as in `probe`

    largest = max(_MIN_LARGEST_PART_TOKENS, 2 * tokens // _PARTS)
    return ChunkStrategy("one"), ChunkStrategy("rand", seed=1, max_group=largest)


async def _as_stream(trial: Trial, recorded: _Recorded, strategy: ChunkStrategy) -> ParseResult:
    """What a client puts together from the parts of the answer; an error if the parser fails."""
    from canitoolcall.chunking import split  # noqa: PLC0415 - as in `probe`
    from canitoolcall.results import StreamAccumulator  # noqa: PLC0415 - as above

    merged, state = StreamAccumulator(), None
    parts = split(recorded.ids, strategy)
    for number, ids in enumerate(parts, start=1):
        choice = _choice(ids, "stop" if number == len(parts) else None)
        chunk = {"stream": True, "generate_chunk": {"choices": [choice]}, "stream_state": state}
        try:
            answer = await trial.post(DERENDER, {**_frame(trial, recorded), **chunk})
        except UnexpectedStatusError as error:
            return merged.result(exception=f"HTTP {error.status}")
        state = dig(answer.document, "stream_state", kind=dict)
        for made in dig(answer.document, "chunk", "choices", kind=list):
            merged.add_openai_delta(dig_or(made, "delta", default={}))
    return merged.result()


def _frame(trial: Trial, recorded: _Recorded) -> ToolBody:
    """What every request to `DERENDER` for this answer has."""
    return {
        "model": trial.server.model,
        "prompt_token_ids": recorded.prompt_ids,
        "chat_request": recorded.request,
    }


def _choice(ids: Sequence[int], finish_reason: str | None) -> ToolBody:
    return {"index": 0, "token_ids": list(ids), "finish_reason": finish_reason}


CHECKS = (
    Check(
        "replay",
        "tools",
        replay,
        "The server's parsers turn recorded answers of similar models into the intended calls.",
        needs=("tools", "tokenize"),
        packages=("canitoolcall", "jsonschema"),
    ),
)
