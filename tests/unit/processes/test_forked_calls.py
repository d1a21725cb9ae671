"""A call in a forked process returns what it sent, or nothing if it sent nothing in time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, time
from pathlib import Path
from holdfast.processes import forkserver, tree
from holdfast.processes.forked_calls import call_forked

def echo(connection, argument):
    connection.send_bytes(argument * 300_000)

def fail(connection, argument):
    raise ValueError(argument)

def die(connection, argument):
    os._exit(0)

def hang(connection, argument):
    time.sleep(600)

if __name__ == "__main__":
    forkserver.PRELOADED = ()
    has_server = sys.argv[2] != "without"
    with tree.owned(Path(sys.argv[1]), {}, has_fork_server=has_server):
        target = {"without": echo}.get(sys.argv[2]) or globals()[sys.argv[2]]
        answer = call_forked(target, b"x", 1.0 if target is hang else 60.0)
        print(answer and len(answer), len(tree.children()), flush=True)
"""


def run(directory: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of this file in a directory that it is told, and that it may import from."""
    program = directory / "program.py"
    program.write_text(source)
    return subprocess.run(
        [sys.executable, str(program), str(directory), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=directory,
    )


@pytest.mark.parametrize(
    ("target", "answer", "left"),
    [
        ("echo", "300000", "1"),
        ("fail", "None", "1"),
        ("die", "None", "1"),
        ("hang", "None", "1"),
        ("without", "None", "0"),
    ],
)
def test_only_an_answer_in_time_counts(tmp_path: Path, target: str, answer: str, left: str) -> None:
    """Whatever became of the process, only the fork server is left afterwards, if there is one."""
    done = run(tmp_path, PROGRAM, target)
    assert done.stdout.split() == [answer, left], done.stderr


LEAVING = """
import sys, threading, time
from pathlib import Path
import psutil
from holdfast.errors import EngineStartError
from holdfast.processes import forkserver, tree
from holdfast.processes.forked_calls import call_forked

def hang(connection, argument):
    Path(argument.decode()).touch()
    time.sleep(600)

def load():
    try:
        said.append(call_forked(hang, str(begun).encode()))
    except EngineStartError as error:
        said.append(type(error).__name__)

if __name__ == "__main__":
    forkserver.PRELOADED = tuple(sys.argv[2:])
    begun, said = Path(sys.argv[1]) / "begun", []
    thread = threading.Thread(target=load, name="load_0")
    with tree.owned(Path(sys.argv[1]), {}):
        thread.start()
        while not begun.exists():
            time.sleep(0.01)
    thread.join(60)
    print(*said, len(psutil.Process().children(recursive=True)), flush=True)
"""


@pytest.mark.parametrize("preloaded", [(), ("slow_import",)])
def test_nothing_is_started_once_the_server_ends(
    tmp_path: Path, preloaded: tuple[str, ...]
) -> None:
    """A thread that imports cannot be cancelled, and what it started then would be left behind."""
    (tmp_path / "slow_import.py").write_text(
        f"from pathlib import Path\nimport time\nPath({str(tmp_path / 'begun')!r}).touch()\n"
        "time.sleep(600)\n"
    )
    done = run(tmp_path, LEAVING, *preloaded)
    assert done.stdout.split() == ["EngineStartError", "0"], done.stderr
    assert "spawned" not in done.stderr
