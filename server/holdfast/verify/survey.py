"""What is the server? Its models, what it can do, its versions, and Holdfast's own status."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pydantic import TypeAdapter, ValidationError

from holdfast.configuration_record import Configuration
from holdfast.errors import NotReachableError, UsageError
from holdfast.verify.answers import (
    LEAST_TOO_GREAT,
    MalformedError,
    dig,
    dig_or,
    excerpt,
    is_absent,
    shortened,
)
from holdfast.verify.denials import denies_tools
from holdfast.verify.records import HoldfastFacts, Request, Server
from holdfast.verify.redaction import redacted
from holdfast.verify.target import Answer, NoAnswerError, Target
from holdfast.verify.texts import with_texts
from holdfast.verify.trial import CHAT, COMPLETIONS, MODELS, TOKENIZE
from holdfast.verify.vitals import Vitals, ask_vitals
from holdfast.verify.waiting import LIMITED_REMEDY, TOO_MANY, LimitedError, until_admitted

_OK = 200
_KEY_REFUSED = (401, 403)
_LATER = (408, TOO_MANY)
"""Statuses of a route that is there, and has no time now."""
_UNAVAILABLE = 503
"""The status of a server that is busy, or lacks a part: it says nothing of what it can do."""
_SURVEY_SECONDS = 60.0
_MOST_FACT_CHARACTERS = 10_000
"""The maximum of a fact about a server, such as a flag with a document: a report repeats it."""
_LISTED_CHARACTERS = 2000
"""The maximum of the names of models in an error; a gateway may list hundreds."""
_STATUS_FIELDS = {"state", "engine", "probe"}
"""What `/statusz` of Holdfast always has."""
_PROOF_FIELDS = ("passed", "limited", "proven_tokens")
_CONFIGURATION = TypeAdapter(Configuration)
_VALUE = re.compile(r"[^-]|-[\d.]")
"""How an argument begins that is not a flag: a number may be negative."""


async def survey(
    target: Target, recorded: str | None = None, *, named: str | None = None
) -> Server:
    """What the server says of itself, and which of its routes answer.

    Of several models it is the one that the user named that is verified; else the recorded one, if
    that is listed.

    Raises:
        NotReachableError: nothing answers there, or not as a server of models that is ready does.
        UsageError: it asks for a key, refuses the one that it got, or does not list what was named.
    """
    models = await _models(target)
    ids = [dig_or(one, "id", default="") for one in models]
    if named is not None and named not in ids:
        raise _not_listed(named, ids, target.secrets)
    own = _chosen(models, recorded if named is None else named)
    model = dig_or(own, "id", default="")
    openapi = await _document(target, "/openapi.json")
    server = Server(
        url=without_secrets(target.url),
        model=model,
        models=tuple(ids),
        max_model_len=dig_or(own, "max_model_len", default=0) or None,
        owner=dig_or(own, "owned_by", default=""),
        vllm=dig_or(await _document(target, "/version"), "version", default=""),
        abilities=(),
        routes=tuple(sorted(dig_or(openapi, "paths", default={}))),
        holdfast=await ask_facts(target),
        configuration=await _configuration(target),
    )
    bounded = with_texts(server, partial(shortened, characters=_MOST_FACT_CHARACTERS))
    return await _with_abilities(target, bounded)


async def ask_holdfast(target: Target) -> HoldfastFacts | None:
    """What `/statusz` says; None if the server is not Holdfast, or says nothing now."""
    status = await _document(target, "/statusz")
    if not status.keys() >= _STATUS_FIELDS:
        return None
    ranks: list[Any] = dig_or(status, "workspace", default=[])
    probe: dict[str, Any] = dig_or(status, "probe", default={})
    return HoldfastFacts(
        state=shortened(dig_or(status, "state", default="")),
        proof={name: _plain(probe.get(name)) for name in _PROOF_FIELDS},
        generation=dig_or(status, "engine", "generation", default=0),
        restarts=dig_or(status, "engine", "restarts", default=0),
        growths=sum(_counts(rank, "growths").get("locked", 0) for rank in ranks),
        rejections=sum(sum(_counts(rank, "rejections").values()) for rank in ranks),
        running=dig_or(status, "progress", "running", default=0),
    )


async def ask_facts(target: Target) -> HoldfastFacts | None:
    """What `/statusz` and `/metrics` say, as `ask_holdfast`."""
    facts = await ask_holdfast(target)
    if facts is None:
        return None
    told = await ask_vitals(target, is_holdfast=True)
    return with_vitals(facts, told)


def with_vitals(facts: HoldfastFacts, told: Vitals) -> HoldfastFacts:
    """The facts with what `/metrics` adds to them."""
    return replace(
        facts,
        deaths=told.deaths,
        memory_bytes=told.memory_bytes,
        started_at_seconds=told.started_at_seconds,
    )


def given_flags(arguments: Sequence[str]) -> Mapping[str, str]:
    """Each flag of a command line with its values; a switch has the value "given".

    What precedes the first flag is the model, whose name is MODEL.
    """
    found: dict[str, list[str]] = {}
    name = "MODEL"
    for argument in arguments:
        if _VALUE.match(argument):
            found.setdefault(name, []).append(argument)
            continue
        name, equals, value = argument.partition("=")
        found.setdefault(name, []).extend([value] if equals else [])
    return {name: " ".join(values) or "given" for name, values in found.items()}


async def is_answering(target: Target, server: Server) -> bool:
    """Whether the server still answers the smallest request there is, or says that it may later."""
    path = CHAT if "chat" in server.abilities else COMPLETIONS
    if path == COMPLETIONS and "completions" not in server.abilities:
        path = MODELS
    request = Request("GET", MODELS) if path == MODELS else _smallest(path, server.model)
    # A connection that is kept may have been closed behind an error, which only a request shows.
    answer = await _told(target, request) or await _told(target, request)
    return answer is not None and answer.status in (_OK, TOO_MANY)


def without_secrets(url: str) -> str:
    """The address without user, password, query and fragment."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


async def _models(target: Target) -> list[Any]:
    where = f"{without_secrets(target.url)}{MODELS}"
    ask = partial(target.ask, Request("GET", MODELS))
    try:
        answer = await until_admitted(ask, _SURVEY_SECONDS)
    except LimitedError:
        raise NotReachableError(
            f"{where} refuses requests for now (HTTP {TOO_MANY}).",
            remedy=f"{LIMITED_REMEDY}.",
        ) from None
    except NoAnswerError as error:
        raise NotReachableError(
            f"{where} did not answer: {redacted(str(error), target.secrets)}.",
            remedy="start the server, or correct the URL.",
        ) from None
    if answer.status in _KEY_REFUSED:
        raise _key_refused(target, answer.status)
    if answer.status != _OK:
        raise NotReachableError(
            f"{where} answered HTTP {answer.status}.",
            remedy="wait until the server is ready, or correct the URL.",
        )
    try:
        models = dig(answer.document, "data", kind=list)
    except MalformedError as error:
        raise NotReachableError(
            f"{where} is not a list of models: {redacted(str(error), target.secrets)}.",
            remedy="correct the URL.",
        ) from None
    if not models:
        raise NotReachableError(f"{where} lists no model.", remedy="load a model.")
    return models


def _chosen(models: Sequence[Any], wanted: str | None) -> Any:
    """The model of that name; else the first that is not an adapter, else the first."""
    named = [one for one in models if dig_or(one, "id", default="") == wanted]
    own = [one for one in models if not dig_or(one, "parent", default="")]
    return [*named, *own, *models][0]


def _not_listed(named: str, ids: Sequence[str], secrets: Sequence[str]) -> UsageError:
    listed = redacted(excerpt(", ".join(map(repr, ids)), _LISTED_CHARACTERS), secrets)
    return UsageError(
        f"--model: the server lists {listed}, and not {named!r}.",
        remedy="name one of these with --model, or leave it out.",
    )


def _key_refused(target: Target, status: int) -> UsageError:
    told = "refused the key" if target.api_key else "asks for a key"
    return UsageError(
        f"the server {told} (HTTP {status}).",
        remedy="give --api-key-file a file with a key of this server.",
    )


async def _with_abilities(target: Target, server: Server) -> Server:
    """The server with what it can do, and what it says of the rest.

    Raises:
        UsageError: it lists its models without a key, and asks for one where they answer.
    """
    asked = {path: _smallest(path, server.model) for path in (CHAT, COMPLETIONS)}
    asked[TOKENIZE] = Request("POST", TOKENIZE, {"model": server.model, "prompt": "Hello"})
    names = {CHAT: "chat", COMPLETIONS: "completions"}
    answers = {path: await _answer(target, request) for path, request in asked.items()}
    found = [name for path, name in names.items() if _is_there(answers[path], server)]
    if _tells_tokens(answers[TOKENIZE], server):
        found.append("tokenize")
    if not {"chat", "completions"} & set(found):
        for answer in (answers[CHAT], answers[COMPLETIONS]):
            if answer is not None and answer.status in _KEY_REFUSED:
                raise _key_refused(target, answer.status)
    refusals = {}
    if "chat" in found:
        if refusal := await _refusal_of_tools(target, server):
            refusals["tools"] = refusal
        else:
            found.append("tools")
    if server.holdfast:
        found.append("holdfast")
    return replace(server, abilities=tuple(found), refusals=refusals)


async def _refusal_of_tools(target: Target, server: Server) -> str:
    """What the server says to a chat that offers a function; empty if it may offer one.

    A server must be told to parse calls. One that was not may say so with a status of its own
    failure, as llama.cpp does with 500; vLLM says it with 400.
    """
    asked = _smallest(CHAT, server.model)
    function = {"name": "nothing", "parameters": {"type": "object", "properties": {}}}
    body = {**(asked.body or {}), "tools": [{"type": "function", "function": function}]}
    answer = await _answer(target, Request("POST", CHAT, body))
    if answer is None or answer.status == _OK:
        return ""
    said = _error_of(answer)
    is_told = answer.status != _UNAVAILABLE and not server.is_vllm
    is_denied = is_told and denies_tools(said)
    return f"{said} (HTTP {answer.status})" if is_denied or not _is_there(answer, server) else ""


def _error_of(answer: Answer) -> str:
    """What the server says of an error, in OpenAI's form or in any other."""
    try:
        told = dig_or(answer.document, "error", "message", default="")
    except MalformedError:
        told = ""
    return excerpt(told or answer.text or "nothing")


def _is_there(answer: Answer | None, server: Server) -> bool:
    """Whether the server has what was asked for, also where it fails: a check will find that.

    Where vLLM lists a route, only a 4xx says that the model does not have it.
    """
    if answer is None or answer.status in _LATER:
        return True
    is_promised = server.is_vllm and answer.request.path in server.routes
    return not 400 <= answer.status < 500 and (is_promised or not is_absent(answer.status))


def _tells_tokens(answer: Answer | None, server: Server) -> bool:
    """Whether it is that of vLLM's `/tokenize`: other servers have another route of that name."""
    if answer is None or answer.status != _OK:
        return _is_there(answer, server)
    try:
        told = answer.document
    except MalformedError:
        return False
    return dig_or(told, "count", default=0) > 0 and bool(dig_or(told, "tokens", default=[]))


def _smallest(path: str, model: str) -> Request:
    asked: dict[str, Any] = {"model": model, "max_tokens": 1, "temperature": 0}
    if path == CHAT:
        return Request("POST", path, {**asked, "messages": [{"role": "user", "content": "Hi"}]})
    return Request("POST", path, {**asked, "prompt": "Hi"})


async def _configuration(target: Target) -> Configuration | None:
    """What Holdfast says that serves what; None if it says nothing, or in another shape."""
    status = await _document(target, "/statusz")
    try:
        return _CONFIGURATION.validate_python(dig(status, "configuration", kind=dict))
    except (MalformedError, ValidationError):
        return None


async def _document(target: Target, path: str) -> Mapping[str, Any]:
    """The JSON object there; an empty one if there is none."""
    answer = await _answer(target, Request("GET", path))
    if answer is None or answer.status != _OK:
        return {}
    try:
        return answer.document
    except MalformedError:
        return {}


async def _answer(target: Target, request: Request) -> Answer | None:
    """The answer; None if there is none, or the server lets no request in for that long."""
    try:
        return await until_admitted(partial(target.ask, request), _SURVEY_SECONDS)
    except (LimitedError, NoAnswerError):
        return None


async def _told(target: Target, request: Request) -> Answer | None:
    """The answer, whatever it is; None if there is none."""
    try:
        return await target.ask(request, deadline_seconds=_SURVEY_SECONDS)
    except NoAnswerError:
        return None


def _counts(rank: Any, name: str) -> dict[str, int]:
    counts: dict[str, Any] = dig_or(rank, name, default={})
    return {kind: count for kind, count in counts.items() if _is_count(count)}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < LEAST_TOO_GREAT


def _plain(value: Any) -> bool | int | None:
    """The value, unless it is one that the proof never has: a report repeats it."""
    return value if _is_count(value) else None
