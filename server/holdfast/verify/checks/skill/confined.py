"""Runs one Python program where it can do no harm. `sandbox` starts this file as a script.

It is a program of its own, in the standard library alone, because it gives up what it has: it
makes Linux namespaces in which there is no network, no other process and no file but Python's own,
read-only, and a `/tmp` of 16 MiB in memory. Its argument is how many seconds of the processor the
program may take. It reads the program from standard input, and ends with its exit code, or with
`UNAVAILABLE` and the reason on standard error if Linux refuses a namespace.
A user without privileges may do all this; some containers and distributions forbid it.
https://man7.org/linux/man-pages/man7/user_namespaces.7.html
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path
from typing import NoReturn

UNAVAILABLE = 251
_MEMORY_BYTES = 512 * 1024 * 1024
_FILE_BYTES = 8 * 1024 * 1024
_PROCESSES = 8
_OPEN_FILES = 64
_NOBODY = 65534
_TMP = Path("/tmp")  # noqa: S108 - what is mounted there is only this program's
_PROGRAM = _TMP / "program.py"
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin")

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_NAMESPACES = (
    _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNET
)
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_READ_ONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Take the steps in the order in which each is still allowed."""
    program, python = sys.stdin.buffer.read(), os.path.realpath(sys.executable)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        _enter_namespaces()
        _wait_if_parent()  # only a child is in the new namespace of processes
        _change_root()
        _write(_PROGRAM, program)
        _wait_if_parent()  # with the first process of a namespace all others end
        _limit(int(sys.argv[1]))
    except (OSError, KeyError) as error:
        os.write(2, f"{error}\n".encode())
        os._exit(UNAVAILABLE)
    words = [python, "-I", "-S", "-B", str(_PROGRAM)]
    os.dup2(nowhere, 2)  # its reader would have to hold all that the program writes
    os.execve(python, words, {})  # noqa: S606 - no shell is wanted


def _enter_namespaces() -> None:
    """Go on in a child that is in new namespaces, whose users this process can still choose."""
    is_apart, have_users = os.pipe(), os.pipe()
    if child := os.fork():
        os.close(is_apart[1])
        if os.read(is_apart[0], 1):
            _map_users(child)
            os.write(have_users[1], b"+")
        _wait_for(child)
    _die_with_parent()
    _call("unshare", _NAMESPACES)
    os.write(is_apart[1], b"+")
    os.close(have_users[1])
    if not os.read(have_users[0], 1):
        raise OSError("the users of the namespace could not be mapped")
    # A further namespace would give the program the rights that it loses before it starts.
    _write("/proc/sys/user/max_user_namespaces", b"0")


def _map_users(process: int) -> None:
    """Map the users of a child's namespace, so that its program runs as nobody.

    Root gets a second user for that, because limits on processes do not bind root.
    """
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        _write(f"/proc/{process}/uid_map", f"0 0 1\n{_NOBODY} {_NOBODY} 1\n".encode())
        _write(f"/proc/{process}/gid_map", f"0 0 1\n{_NOBODY} {_NOBODY} 1\n".encode())
        return
    _write(f"/proc/{process}/setgroups", b"deny")
    _write(f"/proc/{process}/uid_map", f"{_NOBODY} {user} 1\n".encode())
    _write(f"/proc/{process}/gid_map", f"{_NOBODY} {group} 1\n".encode())


def _wait_if_parent() -> None:
    """Go on in a child; this process ends with its exit code."""
    if child := os.fork():
        _wait_for(child)
    _die_with_parent()


def _wait_for(child: int) -> NoReturn:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)


def _die_with_parent() -> None:
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _change_root() -> None:
    """Leave nothing to see but Python, read-only, and an empty /tmp of a few megabytes."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE, None)
    libraries = Path("/etc/ld.so.cache")
    found = libraries.read_bytes() if libraries.exists() else b""
    seen = _python_directories()
    root = _TMP  # every system has it, and it is seen no more
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path in seen:
        target = root / path.relative_to("/")
        if path.is_symlink():
            target.symlink_to(path.readlink())
            continue
        target.mkdir(parents=True, exist_ok=True)
        _mount(path, target, None, _MS_BIND | _MS_REC, None)
    (root / "etc").mkdir()
    _write(root / "etc" / "ld.so.cache", found)
    inner = root / "tmp"
    inner.mkdir()
    _make_read_only(root)
    limits = "size=16m,nr_inodes=1000,mode=1777"
    _mount("tmpfs", inner, "tmpfs", _MS_NOSUID | _MS_NODEV, limits)
    os.chdir(root)
    # With the same directory twice, the old root lies on top of the new one, to be taken off.
    _syscall(_SYS_PIVOT_ROOT[os.uname().machine], b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir(_TMP)


def _limit(cpu_seconds: int) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    for kind, most in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NPROC, _PROCESSES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _python_directories() -> list[Path]:
    """The directories that Python runs from, none within another."""
    found = [Path(path) for path in _SYSTEM if os.path.lexists(path)]
    for prefix in (sys.base_prefix, sys.base_exec_prefix):
        path = Path(prefix).resolve()
        if not any(path.is_relative_to(one) for one in found):
            found.append(path)
    return found


def _make_read_only(path: Path) -> None:
    """All that is mounted there, also what was mounted below a directory that is shown again."""
    wanted = _MOUNT_ATTR_READ_ONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV
    attributes = (ctypes.c_uint64 * 4)(wanted, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    _syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, bytes(path), _AT_RECURSIVE, attributes, size)


def _mount(
    source: Path | str | None, target: Path | str, kind: str | None, flags: int, data: str | None
) -> None:
    words = [None if one is None else str(one).encode() for one in (source, target, kind, data)]
    _call("mount", words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) == -1:
        _raise(name)


def _syscall(number: int, *arguments: object) -> None:
    if _libc.syscall(ctypes.c_long(number), *arguments) == -1:
        _raise(f"system call {number}")


def _raise(what: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")


def _write(path: Path | str, content: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        while content:
            content = content[os.write(file, content) :]
    finally:
        os.close(file)


if __name__ == "__main__":
    main()
