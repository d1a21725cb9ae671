"""When is an engine replaced as planned? The limits that `--recycle-after` names."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from types import MappingProxyType

from holdfast.settings.flag import positive_size_bytes

MIN_AGE_SECONDS = 60.0
"""A server with less would be in a restart most of the time."""
_YEAR_SECONDS = 31_536_000
_UNIT_SECONDS = MappingProxyType({"s": 1, "m": 60, "h": 3600, "d": 86_400})
_AGE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([smhd])")
_REQUESTS = re.compile(r"([0-9]{1,12})\s*requests?")


@dataclass(frozen=True, slots=True)
class RecycleLimits:
    """What an engine may reach until it is replaced as planned; None where nothing limits it."""

    age_seconds: float | None = None
    """Time in READY."""
    host_memory_bytes: int | None = None
    """The memory of all its processes on this machine, as `processes.memory` measures it."""
    requests: int | None = None
    """Counted from READY; each prompt of a client's request is one, in its first engine."""

    @property
    def are_set(self) -> bool:
        """Whether there is any limit."""
        return self != RecycleLimits()

    def brought_forward(self, share: float) -> RecycleLimits:
        """Return limits of age and requests that are lower by this share; memory keeps its own."""
        age_seconds, requests = self.age_seconds, self.requests
        return replace(
            self,
            age_seconds=None if age_seconds is None else age_seconds * (1 - share),
            requests=None if requests is None else math.ceil(requests * (1 - share)),
        )


def recycle_limits(text: str) -> RecycleLimits:
    """Parse limits such as `24h,8GiB,100000requests`, or `none`; ValueError for anything else."""
    text = text.strip().lower()
    limits = RecycleLimits()
    if text != "none":
        for limit in text.split(","):
            limits = _with_limit(limits, limit.strip())
    return limits


def _with_limit(limits: RecycleLimits, text: str) -> RecycleLimits:
    if found := _AGE.fullmatch(text):
        _require_first(limits.age_seconds)
        return replace(limits, age_seconds=_age_seconds(float(found[1]), found[2]))
    if found := _REQUESTS.fullmatch(text):
        _require_first(limits.requests)
        if not (requests := int(found[1])):
            raise ValueError("expected a number of requests above 0")
        return replace(limits, requests=requests)
    if not text.endswith("b"):
        raise ValueError("expected limits such as 24h, 8GiB or 100000requests, or none")
    _require_first(limits.host_memory_bytes)
    return replace(limits, host_memory_bytes=positive_size_bytes(text))


def _age_seconds(number: float, unit: str) -> float:
    age_seconds = number * _UNIT_SECONDS[unit]
    if not MIN_AGE_SECONDS <= age_seconds < _YEAR_SECONDS:
        raise ValueError("expected an age of a minute or more, and less than a year")
    return age_seconds


def _require_first(limit: float | None) -> None:
    if limit is not None:
        raise ValueError("expected each kind of limit once")
