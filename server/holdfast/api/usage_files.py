"""Keeps on disk what each key has used: one file a day, with one line of JSON for each key.

    {"day": "2026-11-23", "key": "alice", "requests": 3, "prompt_tokens": 90, "output_tokens": 210}

A thread writes them, so a slow or full disk delays no answer.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from holdfast.atomic_files import open_lock, write_atomically
from holdfast.errors import UsageError
from holdfast.telemetry.key_usage import KeyUsage, Used

logger = logging.getLogger(__name__)

WRITE_SECONDS = 5.0
"""A server that is killed loses what was used since the last write."""
END_SECONDS = 5.0
"""How long the end of the server waits for the last write."""
KEPT_FILES = 400
"""A year and a month."""
LOCK_FILE = ".usage-lock"
"""Locked as long as the server runs; others use that of `atomic_files`, briefly."""
MAX_FILE_BYTES = 64 * 1024 * 1024

_EPOCH = date(1970, 1, 1)
_LARGEST = 10**18


@contextmanager
def usage_kept(usage: KeyUsage, directory: Path | None) -> Iterator[None]:
    """While entered, write what is used to `directory`, which has what was used before.

    Without a directory nothing is written.

    Raises:
        UsageError: it cannot be used, or another server writes to it.
    """
    if directory is None:
        yield
        return
    with _owned(directory):
        usage.keep_days()
        writer = _Writer(usage, directory)
        writer.restore(usage.day)
        ended = threading.Event()
        # A daemon, because a network file system may hang for minutes.
        thread = threading.Thread(target=writer.run, args=(ended,), name="usage", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(END_SECONDS)


def usage_file(directory: Path, day: int) -> Path:
    """Return the file of a day, given in days since 1970."""
    return directory / f"usage-{_date(day)}.jsonl"


class _Writer:
    """Writes the file of each day that has changed, and reads it before it writes it first."""

    def __init__(self, usage: KeyUsage, directory: Path) -> None:
        self._usage = usage
        self._directory = directory
        self._written: dict[int, str] = {}
        self._damaged: set[int] = set()
        """Days with files that have lines which would be lost."""
        self._is_failing = False

    def run(self, ended: threading.Event) -> None:
        """Write every few seconds, and once more at the end."""
        while not ended.wait(WRITE_SECONDS):
            self._write()
        self._write()

    def restore(self, day: int) -> None:
        """Take over what the file of a day says.

        Raises:
            UsageError: it cannot be read, or is not a file.
        """
        used, wrong_lines = _read(usage_file(self._directory, day))
        if wrong_lines:
            self._damaged.add(day)
        self._usage.restore(day, used)

    def _write(self) -> None:
        # What earlier servers have counted today limits keys before this one has counted anything.
        days = sorted({*self._usage.days(), self._usage.day})
        problems = [self._try_day(day) for day in days]
        if (problem := next(filter(None, problems), None)) and not self._is_failing:
            logger.warning("--usage-dir: the usage of keys is not on disk: %s", problem)
        self._is_failing = problem is not None

    def _try_day(self, day: int) -> OSError | UsageError | None:
        try:
            if not self._usage.is_restored(day):  # the clock has come to it after the start
                self.restore(day)
            self._write_day(day)
        except (OSError, UsageError) as error:
            return error
        return None

    def _write_day(self, day: int) -> None:
        text = _lines(day, self._usage.days()[day])
        if text and text != self._written.get(day):
            path = usage_file(self._directory, day)
            if day in self._damaged:
                with suppress(FileNotFoundError):
                    shutil.copyfile(path, path.with_suffix(".broken"))
                self._damaged.remove(day)
            write_atomically(path, text)
            self._written[day] = text
            self._remove_old()
        elif day != self._usage.day:  # nothing came since the last time
            self._usage.forget(day)
            self._written.pop(day, None)

    def _remove_old(self) -> None:
        for path in sorted(self._directory.glob("usage-*.jsonl"))[:-KEPT_FILES]:
            path.unlink(missing_ok=True)


@contextmanager
def _owned(directory: Path) -> Iterator[None]:
    """Make the directory, and lock it while entered, if its file system has locks."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = open_lock(directory, LOCK_FILE)
    except OSError as error:
        raise _refusal(directory, error) from None
    try:
        if not os.access(directory, os.W_OK | os.X_OK):
            raise UsageError(
                f"--usage-dir: {directory}: it is not writable.", remedy="name another directory."
            )
        _lock(descriptor, directory)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"--usage-dir: {directory}: another server writes to it.",
            remedy="give each server a directory of its own.",
        ) from None
    except OSError:  # the file system has no locks
        return


def _refusal(directory: Path, error: OSError) -> UsageError:
    return UsageError(
        f"--usage-dir: {directory}: {error.strerror}.", remedy="name a directory that is writable."
    )


def _lines(day: int, used: Mapping[str, Used]) -> str:
    return "".join(
        json.dumps(
            {
                "day": _date(day),
                "key": name,
                "requests": one.requests,
                "prompt_tokens": one.prompt_tokens,
                "output_tokens": one.output_tokens,
            }
        )
        + "\n"
        for name, one in sorted(used.items())
    )


def _read(path: Path) -> tuple[dict[str, Used], int]:
    """Read what an earlier server has written, and count the lines that it did not write.

    Raises:
        UsageError: it cannot be read, or is not a file.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
            raise UsageError(
                f"--usage-dir: {path} is not a usage file.", remedy="move it elsewhere."
            )
        content = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return {}, 0
    except OSError as error:
        raise _refusal(path, error) from None
    used: dict[str, Used] = {}
    wrong = 0
    for line in content.splitlines():
        try:
            name, one = _parsed(line)
            used[name] = one
        except (ValueError, TypeError, KeyError, RecursionError):
            wrong += 1
    if wrong:
        logger.warning("%s: %d lines are not usage and are dropped", path, wrong)
    return used, wrong


def _parsed(line: str) -> tuple[str, Used]:
    record = json.loads(line)
    if not isinstance(record["key"], str):
        raise TypeError("the key has no name")
    return record["key"], Used(
        _count(record["requests"]), _count(record["prompt_tokens"]), _count(record["output_tokens"])
    )


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise ValueError("it is not a count")
    return value


def _date(day: int) -> str:
    return (_EPOCH + timedelta(days=day)).isoformat()
