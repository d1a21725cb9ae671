"""Can clients enter without a key, and can other users or child processes read the keys?"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from holdfast.loopback import WILDCARDS, is_loopback
from holdfast.settings import Settings, flags

logger = logging.getLogger(__name__)

MASK = "***"
_SELF = Path("/proc/self")
_ARG_START = 45
"""The index of arg_start among the fields of `stat` after the name; arg_end, env_start and env_end
follow it, see https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html."""

Word = tuple[int, bytes]
"""The address and content of an argument or variable that the process was started with."""


def open_access(settings: Settings) -> tuple[str, str] | None:
    """Return why anyone on the network may use the server, and the remedy; None if nobody may."""
    listen = settings.listen
    if not settings.is_open or listen.uds or is_loopback(listen.host):
        return None
    where = "every address of this machine" if listen.host in WILDCARDS else listen.host
    return (
        f"the server listens on {where} without an API key.",
        "add --api-key-file, or listen on --host 127.0.0.1 behind a proxy that checks keys.",
    )


def hide_keys(given: Collection[str]) -> None:
    """Remove every key from the environment, from `sys.argv`, and from what the kernel shows.

    `given` are `Settings.given_keys`; the keys in variables are found here. So no child inherits a
    key, and neither `/proc/PID/cmdline`, which `ps` prints, nor `/proc/PID/environ` contains one;
    if that cannot be done, a warning is logged. Call it before there are child processes.
    """
    variables = ["VLLM_API_KEY", *(flag.variable for flag in flags() if flag.is_secret)]
    of_variables = {os.environ.pop(name) for name in variables if name in os.environ}
    keys = {*given, *of_variables} - {""}
    if not keys:
        return
    sys.argv = masked(sys.argv, keys)
    sys.orig_argv = masked(sys.orig_argv, keys)
    names = [os.fsencode(name) for name in variables]
    if not _is_overwritten({key.encode(errors="surrogateescape") for key in keys}, names):
        logger.warning(
            "the keys given as flags or variables can be read in /proc/%d; give them in files "
            "(--api-key-file, --admin-api-key-file)",
            os.getpid(),
        )


def masked(arguments: Sequence[str], keys: Collection[str]) -> list[str]:
    """Return the command line with each key masked, as a whole argument or after an equals sign."""
    return [_masked(argument, keys) for argument in arguments]


def _masked(argument: str, keys: Collection[str]) -> str:
    name, equals, value = argument.partition("=")
    if argument in keys:
        return MASK
    return f"{name}={MASK}" if equals and value in keys else argument


def _is_overwritten(keys: Collection[bytes], names: Collection[bytes]) -> bool:
    """Overwrite the keys in the memory that `/proc` shows as arguments and environment.

    It returns False if the kernel does not say where that is, as in some sandboxes. Only `/proc`
    still reads these bytes: Python has copied the arguments, and the variables are gone.

    `setproctitle` hides arguments only: it leaves an environment unchanged if a variable was
    changed or removed before, and otherwise erases all of it.
    """
    try:
        # The name before the bracket may have spaces.
        fields = (_SELF / "stat").read_text().rpartition(")")[2].split()
        bounds = [int(field) for field in fields[_ARG_START : _ARG_START + 4]]
    except (OSError, ValueError):
        return False
    if len(bounds) != 4 or not all(bounds):
        return False
    for address, word in _words(*bounds[:2]):
        value = word if word in keys else word.partition(b"=")[2]
        if value in keys:
            _overwrite(address, word, value)
    for address, word in _words(*bounds[2:]):
        name, _, value = word.partition(b"=")
        # Another variable with the same value may still be in use.
        if name in names:
            _overwrite(address, word, value)
    return True


def _words(start: int, end: int) -> Iterator[Word]:
    for word in ctypes.string_at(start, end - start).split(b"\0"):
        yield start, word
        start += len(word) + 1


def _overwrite(address: int, word: bytes, value: bytes) -> None:
    ctypes.memset(address + len(word) - len(value), ord("*"), len(value))
