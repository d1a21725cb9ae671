"""What can the server do? Which of its routes answer, and what it says of the rest."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from holdfast.errors import UsageError
from holdfast.verify.answers import MalformedError, dig_or, excerpt, is_absent
from holdfast.verify.denials import denies_chats, denies_tools
from holdfast.verify.naming import MAX_TOKENS, NEW_MAX_TOKENS, body_for
from holdfast.verify.records import Request, Server
from holdfast.verify.target import Answer, NoAnswerError, Target
from holdfast.verify.trial import CHAT, COMPLETIONS, TOKENIZE
from holdfast.verify.waiting import TOO_MANY, LimitedError, until_admitted

KEY_REFUSED = (401, 403)
SURVEY_SECONDS = 60.0
_OK = 200
_LATER = (408, TOO_MANY)
"""Statuses of a route that is there, and has no time now."""
_UNAVAILABLE = 503
"""The status of a server that is busy, or lacks a part: it says nothing of what it can do."""


async def with_abilities(target: Target, server: Server) -> Server:
    """The server with what it can do, and what it says of the rest.

    Raises:
        UsageError: it lists its models without a key, and asks for one where they answer.
    """
    chat = await answer_or_none(target, smallest(CHAT, server))
    completion = await answer_or_none(target, smallest(COMPLETIONS, server))
    tokenize = Request("POST", TOKENIZE, {"model": server.model, "prompt": "Hello"})
    found = ["chat"] if _is_there(chat, server) else []
    if chat is not None and not found and not is_absent(chat.status):
        server = await _with_refusal_of_chats(target, server, chat)
        found = ["chat"] if MAX_TOKENS in server.refusals else []
    if _is_there(completion, server):
        found.append("completions")
    if _tells_tokens(await answer_or_none(target, tokenize), server):
        found.append("tokenize")
    if not {"chat", "completions"} & set(found):
        for answer in (chat, completion):
            if answer is not None and answer.status in KEY_REFUSED:
                raise key_refused(target, answer.status)
    refusals = dict(server.refusals)
    if "chat" in found:
        if refusal := await _refusal_of_tools(target, server):
            refusals["tools"] = refusal
        else:
            found.append("tools")
    if server.holdfast:
        found.append("holdfast")
    return replace(server, abilities=tuple(found), refusals=refusals)


async def _with_refusal_of_chats(target: Target, server: Server, refused: Answer) -> Server:
    """The server with what it says of chats; of `max_tokens`, if it takes the newer name of that.

    OpenAI's own models that think take no other name.
    """
    renaming = replace(server, refusals={MAX_TOKENS: _refusal(refused)})
    answer = await answer_or_none(target, smallest(CHAT, renaming))
    if answer is not None and answer.status == _OK:
        return renaming
    first = _refusal(refused)
    second = first if answer is None else _refusal(answer)
    # One that takes no chats may name the request, or not know the newer name.
    told = next(filter(denies_chats, (first, second)), "")
    if not told:
        told = first if first == second else f"{first}; with {NEW_MAX_TOKENS}: {second}"
    return replace(server, refusals={"chat": told})


async def _refusal_of_tools(target: Target, server: Server) -> str:
    """What the server says to a chat that offers a function; empty if it may offer one.

    A server must be told to parse calls. One that was not may say so with a status of its own
    failure, as llama.cpp does with 500; vLLM says it with 400.
    """
    asked = smallest(CHAT, server)
    function = {"name": "nothing", "parameters": {"type": "object", "properties": {}}}
    body = {**(asked.body or {}), "tools": [{"type": "function", "function": function}]}
    answer = await answer_or_none(target, Request("POST", CHAT, body))
    if answer is None or answer.status == _OK:
        return ""
    said = _error_of(answer)
    is_told = answer.status != _UNAVAILABLE and not server.is_vllm
    is_denied = is_told and denies_tools(said)
    return _refusal(answer) if is_denied or not _is_there(answer, server) else ""


def _refusal(answer: Answer) -> str:
    return f"{_error_of(answer)} (HTTP {answer.status})"


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


def smallest(path: str, server: Server) -> Request:
    """The smallest chat or completion that there is."""
    asked: dict[str, Any] = {"model": server.model, MAX_TOKENS: 1, "temperature": 0}
    if path == CHAT:
        asked["messages"] = [{"role": "user", "content": "Hi"}]
    else:
        asked["prompt"] = "Hi"
    return Request("POST", path, body_for(server, path, asked))


async def answer_or_none(target: Target, request: Request) -> Answer | None:
    """The answer; None if there is none, or the server lets no request in for that long."""
    try:
        return await until_admitted(partial(target.ask, request), SURVEY_SECONDS)
    except (LimitedError, NoAnswerError):
        return None


def key_refused(target: Target, status: int) -> UsageError:
    """The error of a server that wants a key, or another one."""
    told = "refused the key" if target.api_key else "asks for a key"
    return UsageError(
        f"the server {told} (HTTP {status}).",
        remedy="give --api-key-file a file with a key of this server.",
    )
