"""A number that processes share, and that one of them can sleep on until another changes it.

Linux's futex: the writer wakes the sleeper by one system call, with no thread or socket between
them. https://man7.org/linux/man-pages/man2/futex.2.html
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import weakref
from pathlib import Path
from types import MappingProxyType

_SYSCALLS = MappingProxyType({"x86_64": 202, "aarch64": 98})
"""Its number by the kind of machine; the C library has no function for it."""
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_WIDTH_BYTES = 4
_LOOK_AGAIN = frozenset({errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT})
"""It is another number already, a signal came, or time ran out."""

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedCounter:
    """Four bytes of a file that every process maps which opens it.

    One process adds. Whoever else does, to wake the others, may only make a sleeper look once more.
    """

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        """Map the file, or make it; what has made it removes it when it is gone itself.

        Raises:
            FileNotFoundError: nobody has made it.
            OSError: it exists already, there is no room for it, it cannot be mapped, or this
                machine lets nobody sleep on it.
        """
        self._syscall = _number_of_syscall()
        with path.open("x+b" if is_new else "r+b") as file:
            if is_new:
                weakref.finalize(self, path.unlink, missing_ok=True)
                # Not a hole: where there is no room later, a store would be a SIGBUS.
                os.posix_fallocate(file.fileno(), 0, _WIDTH_BYTES)
            mapped = mmap.mmap(file.fileno(), _WIDTH_BYTES)
        self._number = ctypes.c_uint32.from_buffer(mapped)
        self._address = ctypes.c_void_p(ctypes.addressof(self._number))
        self._wake()

    @property
    def value(self) -> int:
        """The number now, which wraps at 2 to the 32nd."""
        return self._number.value

    def add_one(self) -> None:
        """Change the number, and wake whoever sleeps on it. What was written before is seen."""
        self._number.value += 1
        self._wake()

    def until_other(self, than: int, timeout_ms: int | None) -> None:
        """Sleep while the number is `than`, for at most `timeout_ms`; it may end early."""
        limit = None if timeout_ms is None else _limit(timeout_ms)
        self._call(_WAIT, than, limit)

    def _wake(self) -> None:
        self._call(_WAKE, _EVERYBODY, None)

    def _call(self, operation: int, number: int, limit: object) -> None:
        done = _syscall(
            self._syscall, self._address, operation, ctypes.c_uint32(number), limit, None, 0
        )
        if done < 0 and (code := ctypes.get_errno()) not in _LOOK_AGAIN:
            raise OSError(code, os.strerror(code))


def _number_of_syscall() -> int:
    machine = platform.machine()
    if machine not in _SYSCALLS:
        raise OSError(errno.ENOSYS, f"no futex is known for {machine}")
    return _SYSCALLS[machine]


def _limit(timeout_ms: int) -> object:
    seconds, rest_ms = divmod(timeout_ms, 1000)
    return ctypes.byref(_Timespec(seconds, rest_ms * 1_000_000))
