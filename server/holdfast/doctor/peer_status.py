"""What does a peer say of itself? Read from its `/statusz`, in which nothing is trusted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from holdfast.doctor.asking import PeerAnswer
from holdfast.nodes.channel import Role
from holdfast.nodes.messages import NodeFacts
from holdfast.verify.answers import dig_or, one_line

MAX_CHARACTERS = 200
"""The maximum of one text that is repeated."""
DATE_WIDTH_SECONDS = 2.0
"""What lies between the time in an answer's header and the time of the answer, at most: the header
has whole seconds, and uvicorn writes it once a second."""
_DATE = "%a, %d %b %Y %H:%M:%S GMT"
_FACTS = {one.name for one in fields(NodeFacts)} - {"model_digest"}
"""What can be compared without the model."""
_PACKAGES = {"holdfast": "holdfast_version", "vllm": "vllm_version", "torch": "torch_version"}
_MAX_NODES = 64
_MAX_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """What a peer says. An empty text means that it does not say it."""

    role: Role
    state: str
    name: str = ""
    """The name of a follower's node."""
    problem: str = ""
    """Why a follower has not joined; of a head, why nodes have not joined it."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """By the name of the field in `NodeFacts`, only those that it tells; empty where it has no such
    thing."""
    memory_available_bytes: int | None = None


def read_status(document: Mapping[str, Any]) -> PeerStatus | None:
    """Return what `/statusz` says; None if it is not one of ours."""
    state = _text(document, "state")
    if not state:
        return None
    if "engine" in document:
        return PeerStatus(
            "head",
            state,
            problem="; ".join(_missing_nodes(document)),
            facts=_facts_of_head(document),
            memory_available_bytes=_bytes(document),
        )
    if _text(document, "head"):
        return PeerStatus(
            "follower",
            state,
            name=_text(document, "node"),
            problem=_text(document, "problem"),
            facts=_facts_of_follower(document),
            memory_available_bytes=_bytes(document),
        )
    return None


def clock_bounds_seconds(answers: Iterable[PeerAnswer]) -> tuple[float, float] | None:
    """Return between which bounds the peer's clock is ahead of this one.

    None if no answer has a time, or if they contradict each other.
    """
    earliest, latest = float("-inf"), float("inf")
    for answer in answers:
        with suppress(ValueError):
            date_seconds = datetime.strptime(answer.date, _DATE).replace(tzinfo=UTC).timestamp()
            earliest = max(earliest, date_seconds - answer.answered_seconds)
            latest = min(latest, date_seconds + DATE_WIDTH_SECONDS - answer.asked_seconds)
    is_known = earliest != float("-inf") and earliest <= latest
    return (earliest, latest) if is_known else None


def _facts_of_head(document: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the facts in `configuration_record.Configuration`."""
    versions: dict[str, Any] = dig_or(document, "configuration", "versions", default={})
    facts = {fact: _text(versions, package) for package, fact in _PACKAGES.items()}
    if versions:
        variables: dict[str, Any] = dig_or(document, "configuration", "variables", default={})
        facts["plugins"] = _text(variables, "VLLM_PLUGINS") or "all"
    # Nothing is known about the driver before the engine has started.
    facts["driver_version"] = _text(dig_or(document, "configuration", default={}), "driver")
    return {name: value for name, value in facts.items() if value}


def _facts_of_follower(document: Mapping[str, Any]) -> Mapping[str, str]:
    given: dict[str, Any] = dig_or(document, "facts", default={})
    return {name: _text(given, name) for name in _FACTS if isinstance(given.get(name), str)}


def _missing_nodes(document: Mapping[str, Any]) -> Iterator[str]:
    nodes: list[Any] = dig_or(document, "nodes", default=[])
    for node in nodes[:_MAX_NODES]:
        if not dig_or(node, "is_joined", default=True):
            problem = dig_or(node, "problem", default="") or "it has not joined"
            yield _shown(f"{dig_or(node, 'name', default='a node')}: {problem}")


def _bytes(document: Mapping[str, Any]) -> int | None:
    told = dig_or(document, "memory_available_bytes", default=0)
    return told if 0 < told < _MAX_BYTES else None


def _text(document: Mapping[str, Any], name: str) -> str:
    return _shown(dig_or(document, name, default=""))


def _shown(text: str) -> str:
    """Return a text of a peer on one line, without what a terminal would obey."""
    shown = one_line(text)
    return shown if len(shown) <= MAX_CHARACTERS else f"{shown[:MAX_CHARACTERS]}..."
