"""Two networks with a cable between them that can be pulled, and shared memory for each side."""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACES = ("hf-one", "hf-two")
DEADLINE_SECONDS = 30.0
CLONE_NEWNET = 0x40000000
HOLD = 'mount -t tmpfs tmpfs /dev/shm && exec sleep "$1"'


@dataclass(frozen=True)
class Cable:
    """The namespaces, by the pid of a process in each."""

    pids: tuple[int, int]

    def inside(self, side: int, *, shares_memory: bool = True) -> list[str]:
        """What goes before a command that is to run on that side.

        A command that does not share this machine's memory sees only the /dev/shm of its side, with
        what earlier commands have left there.
        """
        memory = [] if shares_memory else ["--mount"]
        return ["nsenter", f"--target={self.pids[side]}", "--net", *memory]

    def ip(self, side: int, words: str) -> None:
        """Run `ip` on that side."""
        command = [*self.inside(side), "ip", *words.split()]
        subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_SECONDS)

    def pull(self) -> None:
        """Let nothing through any more, and say nothing of it to either side."""
        self.ip(0, f"link set {INTERFACES[0]} down")

    def plug(self) -> None:
        """Let everything through again."""
        self.ip(0, f"link set {INTERFACES[0]} up")


@contextmanager
def joined(pid: int) -> Iterator[None]:
    """While entered, what this thread opens and starts is in the network of that process."""
    its = Path(f"/proc/{pid}/ns/net")
    with Path("/proc/thread-self/ns/net").open() as own, its.open() as other:
        _set_namespace(other)
        try:
            yield
        finally:
            _set_namespace(own)


def _set_namespace(file: IO[str]) -> None:
    # `os.setns` is newer than the oldest Python that we support.
    if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot join the network of another process")


@contextmanager
def cable(life_seconds: int = 600) -> Iterator[Cable | None]:
    """Make both namespaces, for as long as that; None where this machine or user cannot."""
    with ExitStack() as stack:
        holders = [stack.enter_context(_namespace(life_seconds)) for _ in ADDRESSES]
        made = Cable((holders[0].pid, holders[1].pid))
        try:
            _connect(made)
        except (OSError, subprocess.SubprocessError):
            yield None
        else:
            yield made


def _connect(made: Cable) -> None:
    one, two = INTERFACES
    made.ip(0, f"link add name {one} type veth peer name {two} netns {made.pids[1]}")
    for side, (name, address) in enumerate(zip(INTERFACES, ADDRESSES, strict=True)):
        made.ip(side, f"addr add {address}/24 dev {name}")
        made.ip(side, f"link set {name} up")
        made.ip(side, "link set lo up")


@contextmanager
def _namespace(life_seconds: int) -> Iterator[subprocess.Popen[bytes]]:
    command = ["unshare", "--net", "--mount", "sh", "-c", HOLD, "sh", str(life_seconds)]
    with subprocess.Popen(command) as holder:
        try:
            _wait_for_namespace(holder)
            yield holder
        finally:
            holder.kill()


def _wait_for_namespace(holder: subprocess.Popen[bytes]) -> None:
    """Return once the process is in namespaces of its own, or has failed to get there."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while holder.poll() is None and time.monotonic() < deadline:
        with suppress(OSError):
            if Path(f"/proc/{holder.pid}/comm").read_text() == "sleep\n":
                return
        time.sleep(0.01)
