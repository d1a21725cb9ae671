"""What is the server? Its models, what it can do, its versions, and Holdfast's own status."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any
from urllib.parse import urljoin, urlsplit, urlunsplit

from pydantic import TypeAdapter, ValidationError

from holdfast.configuration_record import Configuration
from holdfast.errors import NotReachableError, UsageError
from holdfast.verify.abilities import (
    KEY_REFUSED,
    SURVEY_SECONDS,
    answer_or_none,
    key_refused,
    smallest,
    with_abilities,
)
from holdfast.verify.answers import (
    LEAST_TOO_GREAT,
    MalformedError,
    dig,
    dig_or,
    excerpt,
    shortened,
)
from holdfast.verify.records import HoldfastFacts, Request, Server
from holdfast.verify.redaction import redacted
from holdfast.verify.target import PATIENT_SECONDS, Answer, NoAnswerError, Target
from holdfast.verify.texts import with_texts
from holdfast.verify.trial import CHAT, COMPLETIONS, MODELS
from holdfast.verify.vitals import Vitals, ask_vitals
from holdfast.verify.waiting import (
    LIMITED_REMEDY,
    TOO_MANY,
    LimitedError,
    is_limited,
    is_too_many,
    until_admitted,
)

_OK, _REDIRECTS = 200, range(300, 400)
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
    return await with_abilities(target, bounded)


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


class Reach(Enum):
    """What comes of the smallest request."""

    ANSWERED = "answered"
    LIMITED = "limited"
    """Refused with 429 for as long as one may wait, or to come back later than that."""
    LOST = "lost"


async def reach_of(target: Target, server: Server) -> Reach:
    """Whether the server still answers the smallest request there is, or limits such requests.

    One that is away, as a gateway says with 503 and `Retry-After`, is waited for. So is one that
    limits requests, as a gateway also says of one that is dead, and one that holds the request: it
    may have one slot, or be on its way back.
    """
    path = CHAT if "chat" in server.abilities else COMPLETIONS
    if path == COMPLETIONS and "completions" not in server.abilities:
        path = MODELS
    request = Request("GET", MODELS) if path == MODELS else smallest(path, server)
    answer = first = await _told(target, request)
    try:
        # Only a request shows that a connection that is kept was closed, as behind an error.
        if answer is None or is_limited(answer):
            answer = await until_admitted(partial(target.ask, request), PATIENT_SECONDS)
    except LimitedError as error:
        return Reach.LIMITED if error.status == TOO_MANY else Reach.LOST
    except NoAnswerError:  # a gateway may close one of the connections of a long wait, too
        answer = await _told(target, request) if first is not None else None
    if answer is not None and is_too_many(answer):
        return Reach.LIMITED
    return Reach.ANSWERED if answer is not None and answer.status == _OK else Reach.LOST


def without_secrets(url: str) -> str:
    """The address without user, password, query and fragment."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


async def _models(target: Target) -> list[Any]:
    where = f"{without_secrets(target.url)}{MODELS}"
    ask = partial(target.ask, Request("GET", MODELS))
    try:
        # A server that is not ready says 503, and may say when it will be.
        answer = await until_admitted(ask, SURVEY_SECONDS, is_refused=is_too_many)
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
    if answer.status in KEY_REFUSED:
        raise key_refused(target, answer.status)
    if answer.status in _REDIRECTS and (location := _location(where, answer)):
        told = f"{where} answered HTTP {answer.status}, a redirect to {location}"
        raise NotReachableError(
            f"{redacted(told, target.secrets)}.",
            remedy="if the server is there, give that address without /models.",
        )
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


def _location(where: str, redirect: Answer) -> str:
    """Where a redirect leads to; empty if it does not say."""
    if not redirect.location:
        return ""
    try:
        return excerpt(without_secrets(urljoin(where, redirect.location)))
    except ValueError:
        return ""


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


async def _configuration(target: Target) -> Configuration | None:
    """What Holdfast says that serves what; None if it says nothing, or in another shape."""
    status = await _document(target, "/statusz")
    try:
        return _CONFIGURATION.validate_python(dig(status, "configuration", kind=dict))
    except (MalformedError, ValidationError):
        return None


async def _document(target: Target, path: str) -> Mapping[str, Any]:
    """The JSON object there; an empty one if there is none."""
    answer = await answer_or_none(target, Request("GET", path))
    if answer is None or answer.status != _OK:
        return {}
    try:
        return answer.document
    except MalformedError:
        return {}


async def _told(target: Target, request: Request) -> Answer | None:
    """The answer, whatever it is; None if there is none."""
    try:
        return await target.ask(request, deadline_seconds=SURVEY_SECONDS)
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
