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
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), target],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == [answer, left], done.stderr
