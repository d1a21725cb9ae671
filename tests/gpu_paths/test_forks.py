"""Where importing vLLM initialises CUDA's driver, no engine is forked from what has imported it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_paths.fake_machine import environment

PROGRAM = """
import json, logging, sys
from pathlib import Path
from holdfast.processes import forkserver, tree

def say(connection):
    torch = sys.modules.get("torch")
    spoilt = torch is not None and torch.cuda._is_in_bad_fork()
    connection.send((forkserver._is_forked(), spoilt))

def ask():
    receiver, sender = forkserver.CoreContext().Pipe(duplex=False)
    child = forkserver.CoreContext().Process(target=say, args=(sender,))
    child.start()
    said = receiver.recv()
    child.join()
    return said

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    forkserver.PRELOADED = ("gpu_paths.pretended", *sys.argv[2:], *forkserver.PRELOADED)
    forkserver.FORK_DEADLINE_SECONDS = 240
    with tree.owned(Path(sys.argv[1]), {}):
        first = ask()
        forkserver.ensure_running()
        answers = [first, ask()]
    print(json.dumps(answers), flush=True)
"""


def asked(directory: Path, board: str, *preloaded: str) -> tuple[list[list[bool]], str]:
    """Whether each of two children was forked, whether it could not use CUDA, and the log."""
    program = directory / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(directory), *preloaded],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=environment(board),
        cwd=directory,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("board", ["mig", "jetson"])
def test_engines_are_spawned_where_a_fork_could_not_use_the_gpu(tmp_path: Path, board: str) -> None:
    """At the first start and at every later one, and one warning says so."""
    answers, log = asked(tmp_path, board)
    assert answers == [[False, False], [False, False]]
    assert log.count("initialises CUDA's driver") == 1
    assert "does not answer" not in log


def test_engines_are_forked_where_nvml_counts_the_gpus(tmp_path: Path) -> None:
    """And can use them, without a word."""
    answers, log = asked(tmp_path, "h100")
    assert answers == [[True, False], [True, False]]
    assert "spawn" not in log


HANGS = """
import time, torch
from holdfast.processes import forkserver
forkserver.CHILD_DEADLINE_SECONDS = 1.0
torch.cuda._is_in_bad_fork = lambda: time.sleep(600)
"""


def test_engines_are_spawned_where_a_fork_hangs(tmp_path: Path) -> None:
    """The server ends by itself, and nobody waits for it until it is killed."""
    (tmp_path / "hangs.py").write_text(HANGS)
    answers, log = asked(tmp_path, "h100", "hangs")
    assert [is_forked for is_forked, _ in answers] == [False, False]
    assert "a forked process hangs" in log
    assert "does not answer" not in log
