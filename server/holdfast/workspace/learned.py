"""What did an earlier run need? One small JSON file for each fingerprint; never a reason to fail.

The fingerprint names everything that a need depends on, so a file is either right for a run or not
found by it. Knows neither vLLM nor torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from holdfast import __version__
from holdfast.workspace.plan import MIB, Slot
from holdfast.workspace.stats import MAX_SLOTS

SCHEMA = 1
MOST_BYTES = 1 << 40
"""A need is below 1 TiB; more is a mistake that would end every start."""
_LARGEST_FILE_BYTES = 64 * 1024
_FINGERPRINT = re.compile(r"[A-Za-z0-9_-]{1,128}")
logger = logging.getLogger(__name__)


def default_directory() -> Path:
    """Where this user's learned reservations and probe journals are kept."""
    return user_state_path("holdfast", appauthor=False)


def learned_path(directory: Path, fingerprint: str) -> Path:
    """The file of one fingerprint."""
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise ValueError(f"a fingerprint is letters, digits, - and _, not {fingerprint!r}")
    return directory / f"workspace-{fingerprint}.json"


def read(directory: Path, fingerprint: str) -> Mapping[Slot, int]:
    """The need of each slot in bytes, as learned; empty if nothing is known.

    A file that is broken, unreadable or of another make is renamed to `*.broken`, with a warning.
    """
    path = learned_path(directory, fingerprint)
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE_BYTES + 1)
        return _parsed(content, fingerprint)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        _set_aside(path, error)
        return {}


def write(directory: Path, fingerprint: str, slots: Mapping[Slot, int]) -> None:
    """Keep the larger of what is known and `slots`, whole or not at all.

    A directory that cannot be written is a warning: the next start learns again.
    """
    for slot, needed_bytes in slots.items():
        _checked(slot, needed_bytes)
    known = read(directory, fingerprint)
    merged = {slot: max(known.get(slot, 0), slots.get(slot, 0)) for slot in {*known, *slots}}
    if merged == known:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        _replace(learned_path(directory, fingerprint), _document(fingerprint, merged))
    except OSError as error:
        logger.warning("Learned reservations are not kept in %s: %s", directory, error)


def _document(fingerprint: str, slots: Mapping[Slot, int]) -> str:
    record = {
        "schema": SCHEMA,
        "holdfast": __version__,
        "fingerprint": fingerprint,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "slots": [
            {"ubatch": ubatch, "lane": lane, "needed_bytes": needed, "needed": _readable(needed)}
            for (ubatch, lane), needed in sorted(slots.items())
        ],
    }
    return json.dumps(record, indent=2) + "\n"


def _readable(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.2f} MiB"


def _replace(path: Path, text: str) -> None:
    """Write a file that is seen whole or not at all, also after a power failure."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _set_aside(path: Path, error: Exception) -> None:
    aside = path.with_suffix(".broken")
    try:
        path.replace(aside)
    except OSError as failure:
        logger.warning("%s is ignored: %s; it cannot be set aside: %s", path, error, failure)
    else:
        logger.warning("%s is set aside as %s: %s", path, aside.name, error)


def _parsed(content: bytes, fingerprint: str) -> Mapping[Slot, int]:
    """The slots of a file; a ValueError says what is wrong with it."""
    if len(content) > _LARGEST_FILE_BYTES:
        raise ValueError("it is too large")
    try:
        record = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError(f"it has not schema {SCHEMA}")
    if record.get("fingerprint") != fingerprint:
        raise ValueError("it has another fingerprint")
    entries = record.get("slots")
    if not isinstance(entries, list):
        raise ValueError("it has no list of slots")  # noqa: TRY004 - one error for a bad file
    slots = dict(_entry(entry) for entry in entries)
    if len(slots) != len(entries):
        raise ValueError("it has a slot twice")
    return slots


def _entry(entry: Any) -> tuple[Slot, int]:
    if not isinstance(entry, dict):
        raise ValueError(f"a slot is an object, not {entry!r}")  # noqa: TRY004 - as above
    slot = (entry.get("ubatch"), entry.get("lane"))
    return _checked(slot, entry.get("needed_bytes"))


def _checked(slot: tuple[Any, Any], needed_bytes: Any) -> tuple[Slot, int]:
    ubatch, lane = slot
    if not all(type(number) is int and 0 <= number < MAX_SLOTS for number in slot):
        raise ValueError(f"there is no slot {slot!r}")
    if type(needed_bytes) is not int or not 0 <= needed_bytes < MOST_BYTES:
        raise ValueError(f"slot {slot!r} cannot need {needed_bytes!r} bytes")
    return (ubatch, lane), needed_bytes
