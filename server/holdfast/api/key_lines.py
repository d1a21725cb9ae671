"""What does a key file say? Keys, their names and their limits.

    KEY
    NAME: KEY
    NAME: KEY max_tokens_per_day=1000000 max_requests_per_minute=60

People write these files by hand. So an error names the line and what to write instead, and never
quotes a word of it, which may be a part of a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from holdfast.errors import UsageError, reason_of
from holdfast.settings import flag
from holdfast.telemetry.key_usage import OTHER

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/+-]{0,47}")
"""It fits into a label, a log line and a record of suspicions, and has no space and no colon."""
_NO_KEY = "it contains no key"
_LARGEST = MappingProxyType({"max_tokens_per_day": 10**15, "max_requests_per_minute": 100_000})
"""The largest value of each limit; the times of the requests of a minute are kept in memory."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """How much a key may use; None for no limit."""

    max_tokens_per_day: int | None = None
    max_requests_per_minute: int | None = None


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class KeyLine:
    """One line of a key file."""

    number: int
    key: str = field(repr=False)
    name: str = ""
    """Empty if the line gives none."""
    limits: KeyLimits = NO_LIMITS

    @property
    def looks_named(self) -> bool:
        """Whether a space may be missing after the colon of a name."""
        name, colon, _ = self.key.partition(":")
        return not self.name and bool(colon) and _NAME.fullmatch(name) is not None


def key_lines(content: bytes) -> list[KeyLine]:
    """Read a key file; skip blank lines and those that begin with `#`.

    Raises:
        ValueError: a line is wrong, or there is no key. The text does not quote the file.
    """
    lines = []
    for number, line in enumerate(content.splitlines(), start=1):
        words = [word.decode("latin-1") for word in line.split()]
        if words and not words[0].startswith("#"):
            try:
                lines.append(_line(number, *words))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    if not lines:
        raise ValueError(_NO_KEY)
    _check_together(lines)
    return lines


def key_file_error(flag_name: str, path: Path, error: OSError | ValueError) -> UsageError:
    """Return the error of a command whose key file cannot be read, or is wrong."""
    reason = reason_of(error)
    if reason.startswith("line "):
        remedy = "correct that line."
    elif reason == _NO_KEY:
        remedy = "add a key, as a line `KEY` or `NAME: KEY`."
    else:
        remedy = "name a readable file with one key per line, as `KEY` or `NAME: KEY`."
    return UsageError(f"{flag_name}: {path}: {reason}.", remedy=remedy)


def _line(number: int, first: str, *words: str) -> KeyLine:
    if not first.endswith(":"):
        return KeyLine(number, _key(first), "", _limits(words))
    if not words:
        raise ValueError("expected a key after the name")
    return KeyLine(number, _key(words[0]), _name(first[:-1]), _limits(words[1:]))


def _key(word: str) -> str:
    if word.partition("=")[0] in _LARGEST:
        raise ValueError("expected a key before its limits")
    return flag.key(word)


def _name(word: str) -> str:
    if not _NAME.fullmatch(word):
        raise ValueError(
            "expected a name of 1 to 48 letters, digits and ._@/+-, which begins with a letter or "
            "a digit"
        )
    if word == OTHER:
        raise ValueError(f"choose another name: the metrics count further keys as {OTHER!r}")
    return word


def _limits(words: Iterable[str]) -> KeyLimits:
    found: dict[str, int] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in _LARGEST:
            raise ValueError(
                "expected a key, or a name with a colon and a key, and after that only "
                + " and ".join(f"{limit}=N" for limit in _LARGEST)
            )
        if name in found:
            raise ValueError(f"remove one {name}: it is given twice")
        if not re.fullmatch("[0-9]{1,16}", value) or not 0 < int(value) <= _LARGEST[name]:
            raise ValueError(
                f"expected {name} from 1 to {_LARGEST[name]} in digits alone (2M is written "
                "2000000); leave it out for no limit"
            )
        found[name] = int(value)
    return KeyLimits(**found)


def _check_together(lines: Iterable[KeyLine]) -> None:
    """Refuse lines that contradict each other: one would silently win."""
    by_key: dict[str, KeyLine] = {}
    by_name: dict[str, KeyLine] = {}
    for line in lines:
        first = by_key.setdefault(line.key, line)
        if (first.name, first.limits) != (line.name, line.limits):
            raise ValueError(
                f"line {line.number}: remove it or line {first.number}: they give one key "
                "different names or limits"
            )
        if line.name and by_name.setdefault(line.name, line).limits != line.limits:
            raise ValueError(
                f"line {line.number}: give it the limits of line {by_name[line.name].number}, "
                "which has the same name"
            )
