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
from typing import Any

from platformdirs import user_state_path

from holdfast import __version__
from holdfast.atomic_files import directory_lock, read_record, write_atomically
from holdfast.settings import WorkspaceSettings
from holdfast.workspace.plan import MIB, Slot
from holdfast.workspace.stats import MAX_SLOTS

SCHEMA = 1
MAX_NEEDED_BYTES = 1 << 40
"""More than 1 TiB is a mistake that would end every start."""
_FINGERPRINT = re.compile(r"[A-Za-z0-9_-]{1,128}")
logger = logging.getLogger(__name__)


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
    path = learned_path(directory, fingerprint)
    try:
        return _load(path, fingerprint)
    except OSError as error:
        logger.warning("%s is ignored: %s", path, error)
        return {}


def write(directory: Path, fingerprint: str, slots: Mapping[Slot, int]) -> bool:
    """Keep the larger of what is known and `slots`, atomically and beside other writers.

    A directory that cannot be written causes a warning, and False: the next start learns again.
    """
    for slot, needed_bytes in slots.items():
        _checked(slot, needed_bytes)
    path = learned_path(directory, fingerprint)
    try:
        known = _load(path, fingerprint)
        if _merged(known, slots) == known:
            return True
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with directory_lock(directory):
            known = _load(path, fingerprint, is_alone=True)
            write_atomically(path, _document(fingerprint, _merged(known, slots)))
    except OSError as error:
        logger.warning("cannot save learned reservations in %s: %s", directory, error)
        return False
    return True


def _merged(known: Mapping[Slot, int], slots: Mapping[Slot, int]) -> Mapping[Slot, int]:
    return {slot: max(known.get(slot, 0), slots.get(slot, 0)) for slot in {*known, *slots}}


def _load(path: Path, fingerprint: str, *, is_alone: bool = False) -> Mapping[Slot, int]:
    """Return what is known; set a broken file aside.

    Only one process at a time does that, and reads the file again before: another process may have
    just written a good one.
    """
    try:
        return _parsed(read_record(path), fingerprint)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        if is_alone:
            _set_aside(path, error)
            return {}
    with directory_lock(path.parent):
        return _load(path, fingerprint, is_alone=True)


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


def _parsed(record: Any, fingerprint: str) -> Mapping[Slot, int]:
    """Return the slots of a file; a ValueError says what is wrong with it."""
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError(f"its schema version is not {SCHEMA}")
    if record.get("fingerprint") != fingerprint:
        raise ValueError("its fingerprint does not match")
    entries = record.get("slots")
    if not isinstance(entries, list):
        raise ValueError("it has no list of slots")  # noqa: TRY004 - one error for a bad file
    slots = dict(_entry(entry) for entry in entries)
    if len(slots) != len(entries):
        raise ValueError("it lists a slot twice")
    return slots


def _entry(entry: Any) -> tuple[Slot, int]:
    if not isinstance(entry, dict):
        raise ValueError(f"a slot must be an object, not {entry!r}")  # noqa: TRY004 - as above
    slot = (entry.get("ubatch"), entry.get("lane"))
    return _checked(slot, entry.get("needed_bytes"))


def _checked(slot: tuple[Any, Any], needed_bytes: Any) -> tuple[Slot, int]:
    ubatch, lane = slot
    if not all(type(number) is int and 0 <= number < MAX_SLOTS for number in slot):
        raise ValueError(f"there is no slot {slot!r}")
    if type(needed_bytes) is not int or not 0 <= needed_bytes < MAX_NEEDED_BYTES:
        raise ValueError(f"slot {slot!r} cannot need {needed_bytes!r} bytes")
    return (ubatch, lane), needed_bytes
