"""Programs that a model wrote: each finds itself alone, and none outlives its run."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from holdfast.verify.checks.skill import sandbox


@pytest.fixture(scope="module", autouse=True)
def _allowed() -> None:
    """Skip where Linux refuses the namespaces."""
    if why := asyncio.run(sandbox.obstacle()):
        pytest.skip(why)


def passes(program: str) -> bool:
    return asyncio.run(sandbox.passes(program))


@pytest.mark.parametrize(
    "program",
    [
        "assert sorted([2, 1]) == [1, 2]",
        "import math, collections, re, hashlib\nassert math.gcd(4, 6) == 2",
        "open('/tmp/own', 'w').write('x')\nassert open('/tmp/own').read() == 'x'",
        "print('much\\n' * 100_000)",
        "name = 'naïve \\N{SNOWMAN} 北京'\nassert len(name) == 10",
    ],
)
def test_a_program_that_is_right_passes(program: str) -> None:
    """It may compute, use the standard library, write a few files and print what it likes."""
    assert passes(program)


@pytest.mark.parametrize(
    "program",
    [
        "assert False",
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
        "import os\nos.kill(os.getpid(), 9)",
        "def broken(:",
        "'''never closed",
        "x = bytearray(2**33)",
        "import nothing_of_the_kind",
    ],
)
def test_a_program_that_is_wrong_does_not(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that ends itself before the last line."""
    monkeypatch.setattr(sandbox, "_DEADLINE_SECONDS", 20.0)
    assert not passes(program)


def test_a_program_that_computes_without_an_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the limit of its own, which is before the deadline."""
    monkeypatch.setattr(sandbox, "_CPU_SECONDS", 1)
    ended, _ = asyncio.run(sandbox._run("while True: pass"))
    assert ended == -signal.SIGKILL & 0xFF


@pytest.mark.parametrize(
    "attempt",
    [
        "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
        "open('{secret}').read()",
        "open('/etc/passwd').read()",
        "open('/proc/1/environ').read()",
        "open('/usr/x', 'w')",
        "open('/x', 'w')",
        "open('/tmp/big', 'wb').write(bytes(20 * 2**20))",
        "[open(f'/tmp/{{i}}', 'wb').write(bytes(2**20)) for i in range(20)]",
        "[os.mkdir(f'/tmp/{{i}}') for i in range(2000)]",
        "[os.fork() or time.sleep(30) for _ in range(20)]",
        "os.kill({process}, 0)",
        "os.setuid(0)",
        "called(ctypes.CDLL(None).unshare(0x10000000))",
        "called(ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None))",
        "os.environ['HOLDFAST_SECRET']",
    ],
)
def test_a_program_reaches_nothing(
    attempt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No network, no file of the user, no other process, no disk, no rights, no environment."""
    secret = tmp_path / "key"
    secret.write_text("sk-1")
    monkeypatch.setenv("HOLDFAST_SECRET", "sk-1")
    tmp_path.chmod(0o755)
    secret.chmod(0o644)

    async def refused() -> bool:
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        said = attempt.format(port=port, secret=secret, process=os.getpid())
        program = (
            "import ctypes, os, time\n"
            "def called(result):\n    if result: raise OSError\n"
            f"try:\n    {said}\n"
            "except (OSError, KeyError, MemoryError):\n    pass\n"
            "else:\n    raise SystemExit('it could')\n"
        )
        async with server:
            return await sandbox.passes(program)

    assert asyncio.run(refused())


def test_nothing_that_a_program_writes_is_kept() -> None:
    """It could write more than the memory holds."""
    loud = "import sys\nprint('loud')\nsys.stderr.write('loud')\nraise SystemExit(3)"
    assert asyncio.run(sandbox._run(loud)) == (3, "")


def test_nothing_outlives_a_program() -> None:
    """Not even what has left its session and ignores every signal."""
    program = (
        "import os, signal, time\n"
        "for number in range(1, 32):\n"
        "    if number not in (9, 19):\n"
        "        signal.signal(number, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    time.sleep(3600)\n"
        "time.sleep(4)\n"
    )
    has_passed, found = watched(program)
    assert has_passed
    assert len(found) >= 5
    assert psutil.wait_procs(found, timeout=30)[1] == []


def test_a_program_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its children, at the deadline."""
    monkeypatch.setattr(sandbox, "_DEADLINE_SECONDS", 10.0)
    has_passed, found = watched("import os, time\nos.fork()\ntime.sleep(3600)")
    assert not has_passed
    assert len(found) >= 4
    assert psutil.wait_procs(found, timeout=30)[1] == []


def watched(program: str) -> tuple[bool, set[psutil.Process]]:
    """Whether it passes, and all processes of it that were seen while it ran."""
    others = set(psutil.Process().children(recursive=True))
    found: set[psutil.Process] = set()

    async def run() -> bool:
        passing = asyncio.create_task(sandbox.passes(program))
        while not passing.done():
            found.update({*psutil.Process().children(recursive=True)} - others)
            await asyncio.sleep(0.05)
        return await passing

    return asyncio.run(run()), found
