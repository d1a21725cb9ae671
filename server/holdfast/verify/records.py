"""What a report is made of. `docs/schemas/holdfast-verify-1.schema.json` is its published shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, get_args

from holdfast.configuration_record import Configuration
from holdfast.labels import VerifyVerdict

SCHEMA = "holdfast-verify/1"
"""Rises when a reader of reports has to change."""
VLLM_OWNER = "vllm"
"""`owned_by` of every model that vLLM serves."""

Profile = Literal["quick", "standard", "full", "soak"]
PROFILES: tuple[Profile, ...] = get_args(Profile)

Group = Literal["wire", "chat", "tools", "self", "oracle", "skill", "survive", "soak"]
GROUPS: tuple[Group, ...] = get_args(Group)
"""The groups of checks, in the order in which they run."""

Source = Literal["constant", "A/A", "baseline"]
"""Where a limit comes from: this code, the server compared with itself, or a recorded run."""

Relation = Literal["at most", "at least", "equal to"]


class CheckStatus(StrEnum):
    """What came of a check."""

    PASSED = "passed"
    FAILED = "failed"
    WARNED = "warned"
    SKIPPED = "skipped"
    INCONCLUSIVE = "inconclusive"
    """It could not be judged: too noisy, too little, or what it builds on was broken."""


class Verdict(StrEnum):
    """What came of a run."""

    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Limit:
    """What a number must keep to."""

    relation: Relation
    value: float
    source: Source

    def is_met_by(self, number: float) -> bool:
        """Whether the number keeps to it; NaN keeps to nothing."""
        if self.relation == "at most":
            return number <= self.value
        if self.relation == "at least":
            return number >= self.value
        return number == self.value


def at_most(value: float, source: Source = "constant") -> Limit:
    """An upper limit."""
    return Limit("at most", value, source)


def at_least(value: float, source: Source = "constant") -> Limit:
    """A lower limit."""
    return Limit("at least", value, source)


def equal_to(value: float, source: Source = "constant") -> Limit:
    """The only value that is right."""
    return Limit("equal to", value, source)


@dataclass(frozen=True, slots=True)
class Number:
    """One number that a check measured."""

    name: str
    value: float
    unit: str = ""
    """Empty for a plain count."""
    limit: Limit | None = None
    """None if it is only reported."""
    of: float | None = None
    """How many tasks it is a share of, in %; None if it is not the share of right answers."""

    @property
    def standard_error(self) -> float | None:
        """The standard error of a share, in %; None if the number is not a share."""
        if not self.of:
            return None
        share = min(max(self.value / 100, 0.0), 1.0)
        return 100 * math.sqrt(share * (1 - share) / self.of)

    @property
    def is_within(self) -> bool:
        """Whether it keeps to its limit."""
        return self.limit is None or self.limit.is_met_by(self.value)


@dataclass(frozen=True, slots=True)
class Series:
    """Numbers that belong together, for a chart."""

    name: str
    x_name: str
    y_name: str
    """Each name with its unit in brackets, as an axis has it."""
    points: tuple[tuple[float, float], ...]
    limit: Limit | None = None
    """The limit of y."""


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request, as it is repeated; it has no headers, and so no key."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    raw: str = ""
    """The body, where it is not a JSON object on purpose."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong, and the request that shows it."""

    what: str
    request: Request | None = None
    answered: str = ""
    """The beginning of the answer, if that helps."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What came of one check."""

    name: str
    group: Group
    proves: str
    status: CheckStatus
    reason: str = ""
    """Why it was skipped, failed, warned or could not be judged; empty if it passed."""
    remedy: str = ""
    """What to do so that it is not skipped."""
    duration_seconds: float = 0.0
    numbers: tuple[Number, ...] = ()
    series: tuple[Series, ...] = ()
    faults: tuple[Fault, ...] = ()
    warnings: tuple[Fault, ...] = ()
    requests: tuple[Request, ...] = ()
    """The requests that repeat the check; the first few of many."""


@dataclass(frozen=True, slots=True)
class HoldfastFacts:
    """What only Holdfast says of itself, at one moment."""

    state: str
    proof: Mapping[str, Any]
    """What the probe reported: `passed`, `limited`, `proven_tokens`."""
    generation: int
    restarts: int
    growths: int
    """The growths of all ranks after the lock."""
    rejections: int
    running: int
    """Requests in the engine."""
    deaths: float | None = None
    """Deaths of engines that nobody asked for, since the server started; None if not looked at."""
    memory_bytes: float | None = None
    """The memory of the server's processes; None if not looked at."""
    started_at_seconds: float | None = None
    """Since 1970: when the server's own process started; None if not looked at."""


@dataclass(frozen=True, slots=True)
class Server:
    """What was verified."""

    url: str
    """Without user and password."""
    model: str
    models: tuple[str, ...]
    max_model_len: int | None
    owner: str
    """`owned_by` of the model."""
    vllm: str
    """Its version, if the server reports it; else empty."""
    abilities: tuple[str, ...]
    """Which of its routes answer."""
    routes: tuple[str, ...]
    """The routes of its OpenAPI document; empty if there is none."""
    holdfast: HoldfastFacts | None = None
    configuration: Configuration | None = None
    """What serves what; only Holdfast tells."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """What the server says to a request for an ability that it does not have, by its name.

    What it says to a chat with `max_tokens` is there, too, if it takes only the newer name of that.
    """

    @property
    def is_vllm(self) -> bool:
        """Whether vLLM's own API answers, as it does in Holdfast; others tell a version, too."""
        return self.holdfast is not None or bool(self.vllm and self.owner == VLLM_OWNER)


@dataclass(frozen=True, slots=True)
class Tool:
    """What made the report."""

    version: str
    packages: Mapping[str, str]
    """The version of each package of the extra `verify` that is installed."""


@dataclass(frozen=True, slots=True)
class Report:
    """One run."""

    tool: Tool
    profile: Profile
    started_at: str
    """UTC, ISO 8601."""
    duration_seconds: float
    server: Server
    verdict: Verdict
    reason: str
    """The reason for the verdict, in a sentence."""
    is_interrupted: bool
    checks: tuple[CheckResult, ...]
    after: HoldfastFacts | None = None
    """What Holdfast said after the last check."""
    has_key: bool = False
    """Whether the run used a key, which `$KEY` stands for in a command that repeats a request."""
    has_admin_key: bool = False
    """The same of an admin key, `$ADMIN_KEY`, which only paths below `/admin/` get."""
    schema: str = field(default=SCHEMA)

    def count(self, status: CheckStatus) -> int:
        """How many checks have this status."""
        return sum(check.status is status for check in self.checks)


@dataclass(frozen=True, slots=True)
class VerifyRun:
    """One run of `holdfast verify`, as an operator told the server of it."""

    verdict: VerifyVerdict
    profile: str
    passed: int
    """The number of checks that passed, as for the others."""
    failed: int
    inconclusive: int


def depth_of(profile: Profile) -> Profile:
    """How much the checks of a run ask: a soak begins with those of quick, as in quick."""
    return "quick" if profile == "soak" else profile
