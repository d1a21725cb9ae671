"""What did an earlier run need? One small JSON file per fingerprint, which never fails a start.

The fingerprint covers everything that a need depends on, so a run finds the right file or none.
Knows neither vLLM nor torch.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from platformdirs import user_state_path

from holdfast import __version__
from holdfast.atomic_files import directory_lock, read_record, write_atomically
from holdfast.settings import WorkspaceSettings
from holdfast.workspace.plan import MIB, Slot
from holdfast.workspace.stats import MAX_SLOTS

SCHEMA = 1
MAX_NEEDED_BYTES = 1 << 40
"""More than 1 TiB is a mistake that would end every start. Times in seconds stay below it, too."""
TOO_LARGE_SECONDS = 7 * 24 * 3600.0
"""How long a size is not tried again. The start may have failed for another reason, and memory may
have been freed since: `--gpu-memory-utilization` is not in the fingerprint."""
_NOTHING: Mapping[Slot, int] = MappingProxyType({})
_FINGERPRINT = re.compile(r"[A-Za-z0-9_-]{1,128}")
logger = logging.getLogger(__name__)


class _TooLarge(NamedTuple):
    """A size of a slot with which a start failed, when that was last found, and how often."""

    size_bytes: int
    since_unix_seconds: int
    failures: int = 1

    @property
    def is_certain(self) -> bool:
        """Whether the size is to blame: one start may have failed for a reason that has passed."""
        return self.failures > 1


class _Content(NamedTuple):
    """What is known of the slots: what they need, and what is too large for them."""

    needed: Mapping[Slot, int] = MappingProxyType({})
    too_large: Mapping[Slot, _TooLarge] = MappingProxyType({})


def default_directory() -> Path:
    """Return the directory of this user's learned reservations and probe journals."""
    return user_state_path("holdfast", appauthor=False)


def learned_directory(settings: WorkspaceSettings) -> Path | None:
    """Return the directory of learned reservations and the probe journal; None for nowhere."""
    if settings.learned_directory == "default":
        return default_directory()
    return settings.learned_directory


def learned_path(directory: Path, fingerprint: str) -> Path:
    """Return the file of a fingerprint."""
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise ValueError(
            f"a fingerprint consists of letters, digits, - and _, unlike {fingerprint!r}"
        )
    return directory / f"workspace-{fingerprint}.json"


def read(directory: Path, fingerprint: str) -> Mapping[Slot, int]:
    """Return the learned need of each slot in bytes; empty if nothing is known.

    A broken or foreign file, or anything else in its place, is renamed to `*.broken` with a
    warning. A file that cannot be read is left alone.
    """
    return _read(directory, fingerprint).needed


def read_too_large(directory: Path, fingerprint: str) -> Mapping[Slot, int]:
    """Return the size of each slot that no engine starts with; a bad file is treated as in `read`.

    What `read` returns is smaller.
    """
    too_large = _read(directory, fingerprint).too_large
    return {slot: found.size_bytes for slot, found in too_large.items() if found.is_certain}


def _read(directory: Path, fingerprint: str) -> _Content:
    path = learned_path(directory, fingerprint)
    try:
        return _load(path, fingerprint)
    except OSError as error:
        logger.warning("%s is ignored: %s", path, error)
        return _Content()


def write(
    directory: Path,
    fingerprint: str,
    slots: Mapping[Slot, int],
    too_large: Mapping[Slot, int] = _NOTHING,
) -> bool:
    """Keep the larger of what is known and `slots`, atomically and beside other writers.

    A slot that is listed in `too_large` by two writers within a week is kept below that size, then
    and for a week. A directory that cannot be written causes a warning, and False: the next start
    learns again.
    """
    for slot, size_bytes in (*slots.items(), *too_large.items()):
        _checked(slot, size_bytes)
    path = learned_path(directory, fingerprint)
    found = {slot: _TooLarge(size, int(time.time())) for slot, size in too_large.items()}
    new = _Content(slots, found)
    try:
        known = _load(path, fingerprint)
        if _merged(known, new) == known:
            return True
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with directory_lock(directory):
            known = _load(path, fingerprint, is_alone=True)
            write_atomically(path, _document(fingerprint, _merged(known, new)))
    except OSError as error:
        logger.warning("cannot save learned reservations in %s: %s", directory, error)
        return False
    return True


def _merged(known: _Content, new: _Content) -> _Content:
    too_large = dict(known.too_large)
    for slot, found in new.too_large.items():
        before = too_large[slot].failures if slot in too_large else 0
        too_large[slot] = found._replace(failures=before + found.failures)
    limits = {slot: found.size_bytes for slot, found in too_large.items() if found.is_certain}
    needed: dict[Slot, int] = {}
    for slot, size_bytes in (*known.needed.items(), *new.needed.items()):
        if size_bytes < limits.get(slot, MAX_NEEDED_BYTES):
            needed[slot] = max(needed.get(slot, 0), size_bytes)
    return _Content(needed, too_large)


def _load(path: Path, fingerprint: str, *, is_alone: bool = False) -> _Content:
    """Return what is known; set a broken file aside.

    Only one process at a time does that, and reads the file again before: another process may have
    just written a good one.
    """
    try:
        return _parsed(read_record(path), fingerprint)
    except (FileNotFoundError, NotADirectoryError):
        return _Content()
    except ValueError as error:
        if is_alone:
            _set_aside(path, error)
            return _Content()
    with directory_lock(path.parent):
        return _load(path, fingerprint, is_alone=True)


def _document(fingerprint: str, content: _Content) -> str:
    record = {
        "schema": SCHEMA,
        "holdfast": __version__,
        "fingerprint": fingerprint,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "slots": [
            {"ubatch": ubatch, "lane": lane, "needed_bytes": needed, "needed": _readable(needed)}
            for (ubatch, lane), needed in sorted(content.needed.items())
        ],
    }
    if content.too_large:
        record["too_large"] = [
            {
                "ubatch": ubatch,
                "lane": lane,
                "too_large_bytes": found.size_bytes,
                "too_large": _readable(found.size_bytes),
                "since_unix_seconds": found.since_unix_seconds,
                "failures": found.failures,
            }
            for (ubatch, lane), found in sorted(content.too_large.items())
        ]
    return json.dumps(record, indent=2) + "\n"


def _readable(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.2f} MiB"


def _set_aside(path: Path, error: Exception) -> None:
    # The second name is needed if a directory has the first.
    for aside in (path.with_suffix(".broken"), path.with_suffix(f".{time.time_ns()}.broken")):
        try:
            path.replace(aside)
        except OSError as failure:
            problem = failure
        else:
            logger.warning("%s is set aside as %s: %s", path, aside.name, error)
            return
    logger.warning("%s is ignored: %s; it cannot be set aside: %s", path, error, problem)


def _parsed(record: Any, fingerprint: str) -> _Content:
    """Return the content of a file; a ValueError says what is wrong with it."""
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError(f"its schema version is not {SCHEMA}")
    if record.get("fingerprint") != fingerprint:
        raise ValueError("its fingerprint does not match")
    entries = record.get("too_large", [])
    since, failures = _numbers(entries, "since_unix_seconds"), _numbers(entries, "failures")
    too_large = {
        slot: _TooLarge(size_bytes, since[slot], failures[slot])
        for slot, size_bytes in _numbers(entries, "too_large_bytes").items()
        # Not from the future: a clock that was wrong would delay the end.
        if 0 <= time.time() - since[slot] < TOO_LARGE_SECONDS
    }
    return _Content(_numbers(record.get("slots"), "needed_bytes"), too_large)


def _numbers(entries: Any, name: str) -> dict[Slot, int]:
    """Return the number with this name of each slot that is listed."""
    if not isinstance(entries, list):
        raise ValueError("it has no list of slots")  # noqa: TRY004 - one error for a bad file
    numbers = dict(_entry(entry, name) for entry in entries)
    if len(numbers) != len(entries):
        raise ValueError("it lists a slot twice")
    return numbers


def _entry(entry: Any, name: str) -> tuple[Slot, int]:
    if not isinstance(entry, dict):
        raise ValueError(f"a slot must be an object, not {entry!r}")  # noqa: TRY004 - as above
    return _checked((entry.get("ubatch"), entry.get("lane")), entry.get(name))


def _checked(slot: tuple[Any, Any], number: Any) -> tuple[Slot, int]:
    ubatch, lane = slot
    if not all(type(index) is int and 0 <= index < MAX_SLOTS for index in slot):
        raise ValueError(f"there is no slot {slot!r}")
    if type(number) is not int or not 0 <= number < MAX_NEEDED_BYTES:
        raise ValueError(f"slot {slot!r} cannot have {number!r}")
    return (ubatch, lane), number
