"""The bodies of the admin routes, as their OpenAPI document shows them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Body
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from holdfast.labels import SLEEP_TAGS, CacheKind, SleepLevel, SleepTag, VerifyVerdict
from holdfast.lifecycle.commands import ProvenSuite
from holdfast.records import Lora, RankMemory
from holdfast.telemetry.logs import LogLevel

MAX_NAME_CHARACTERS = 256
MAX_PATH_CHARACTERS = 4096
MAX_CHECKS = 1_000_000
DEFAULT_AGE_SECONDS = 60.0


def _printable(text: str) -> str:
    """Return the text if it may appear in a log line."""
    if not text.isprintable():
        raise ValueError("control characters are not allowed")
    return text


Printable = Annotated[str, AfterValidator(_printable)]
Name = Annotated[Printable, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]


def _unambiguous(name: str) -> str:
    """Return the name of an adapter if a path and a list of names can have it."""
    if "," in name or name.endswith("/"):
        raise ValueError("the name of an adapter has no comma, and no slash at its end")
    return name


class AdminRequest(BaseModel):
    """A body with exactly these fields."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _has_known_fields(cls, given: Any) -> Any:
        """Refuse a field that does not exist, and name those that do."""
        names = given if isinstance(given, dict) else ()
        unknown = [name for name in names if name not in cls.model_fields]
        if unknown:
            known = ", ".join(cls.model_fields)
            raise ValueError(
                f"there is no field {unknown[0][:MAX_NAME_CHARACTERS]!r}; the fields are: {known}"
            )
        return given


class ProbeRequest(AdminRequest):
    """Run the probe again."""

    suite: ProvenSuite = "quick"
    max_age_seconds: float = Field(default=DEFAULT_AGE_SECONDS, ge=0, allow_inf_nan=False)
    """Answer with the last requested proof if it is not older; 0 always runs the suite."""


class RestartRequest(AdminRequest):
    """Restart the engine."""

    reason: Annotated[Printable, Field(min_length=1, max_length=200)]


class SleepRequest(AdminRequest):
    """Free the memory of the device. At level 2, waking reads the weights from disk again."""

    level: SleepLevel = 1
    mode: Literal["wait", "abort"] = "wait"
    """Whether to wait for running requests, within --drain-timeout, or to abort them."""


class WakeRequest(AdminRequest):
    """Reclaim all of the memory, or a part."""

    tags: list[SleepTag] = Field(default=sorted(SLEEP_TAGS), min_length=1)


class ProfileRequest(AdminRequest):
    """Start the profiler."""

    prefix: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


class LoraRequest(AdminRequest):
    """Load an adapter from a path on the server, or by its name on a model hub."""

    name: Annotated[Name, AfterValidator(_unambiguous)]
    path: Annotated[Printable, Field(min_length=1, max_length=MAX_PATH_CHARACTERS)]
    replace: bool = False
    """Whether to replace an adapter of the same name."""


class CacheRequest(AdminRequest):
    """Empty caches."""

    caches: list[CacheKind] = Field(default=["prefix"], min_length=1)


class VerifyRunRequest(AdminRequest):
    """Show the verdict of `holdfast verify` on the status page."""

    verdict: VerifyVerdict
    profile: Name
    passed: int = Field(default=0, ge=0, le=MAX_CHECKS)
    """The number of checks that passed, as for the others."""
    failed: int = Field(default=0, ge=0, le=MAX_CHECKS)
    inconclusive: int = Field(default=0, ge=0, le=MAX_CHECKS)


class LogLevelRequest(AdminRequest):
    """Change what the front end logs."""

    level: LogLevel
    logger: Literal["holdfast", "vllm"] | None = None
    """The logger to change; both if omitted."""


class SaveRequest(AdminRequest):
    """Write the weights of each rank to a directory on its host."""

    path: Annotated[Printable, Field(pattern=r"^/", max_length=MAX_PATH_CHARACTERS)]
    pattern: Annotated[Printable, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)] | None = None
    max_size_bytes: int | None = Field(default=None, gt=0, lt=2**63)


ProbeBody = Annotated[ProbeRequest, Body(default_factory=ProbeRequest)]
RestartBody = Annotated[RestartRequest, Body()]
SleepBody = Annotated[SleepRequest, Body(default_factory=SleepRequest)]
WakeBody = Annotated[WakeRequest, Body(default_factory=WakeRequest)]
ProfileBody = Annotated[ProfileRequest, Body(default_factory=ProfileRequest)]
LoraBody = Annotated[LoraRequest, Body()]
CacheBody = Annotated[CacheRequest, Body(default_factory=CacheRequest)]
LogLevelBody = Annotated[LogLevelRequest, Body()]
VerifyRunBody = Annotated[VerifyRunRequest, Body()]
SaveBody = Annotated[SaveRequest, Body()]


class Reply(BaseModel):
    """An answer, read from a record of the same names."""

    model_config = ConfigDict(from_attributes=True)


class StateReply(Reply):
    """The state of the server after the call."""

    state: str
    reason: str


class WorkspaceReply(Reply):
    """The workspaces of every rank, from its stats."""

    state: str
    ranks: tuple[RankMemory, ...]


class LorasReply(Reply):
    """Every adapter."""

    loras: tuple[Lora, ...]


class CacheReply(Reply):
    """The caches that were emptied."""

    caches: list[CacheKind]


class LogLevelReply(Reply):
    """The level of each logger of the front end."""

    levels: dict[str, str]


class ErrorDetail(Reply):
    """The error, as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorReply(Reply):
    """Why the call failed."""

    error: ErrorDetail
