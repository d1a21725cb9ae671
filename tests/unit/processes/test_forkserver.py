"""A process that the fork server starts is as if spawned, whatever became of the server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.processes.forkserver import START_METHOD_VARIABLE as METHOD

PROGRAM = """
import logging, multiprocessing.forkserver, os, signal, sys, tempfile
from pathlib import Path
from holdfast.processes import environment, exits, forkserver, tree

def say(connection):
    connection.send((os.environ.get("SAID"), os.environ.get("UNSAID"), tempfile.gettempdir()))

def ask():
    receiver, sender = forkserver.Context().Pipe(duplex=False)
    child = forkserver.Context().Process(target=say, args=(sender,))
    child.start()
    print(*receiver.recv(), flush=True)
    child.join()
    print(child.exitcode, exits.is_alive(psutil.Process(forkserver.server_pid())), flush=True)

if __name__ == "__main__":
    import psutil
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    forkserver.PRELOADED = tuple(sys.argv[3:])
    os.environ["UNSAID"] = "once"
    with tree.owned(Path(sys.argv[1]), {}):
        del os.environ["UNSAID"]
        if sys.argv[2] == "killed":
            os.kill(forkserver.server_pid(), signal.SIGKILL)
            psutil.Process(forkserver.server_pid()).wait(30)
            forkserver.ensure_running()
        if sys.argv[2] == "unreachable":
            os.unlink(multiprocessing.forkserver._forkserver._forkserver_address)
            forkserver.ensure_running(native_variables={})
        if sys.argv[2] == "stopped":
            os.kill(forkserver.server_pid(), signal.SIGSTOP)
        if sys.argv[2] in {"stopped", "stuck"}:
            forkserver.FORK_DEADLINE_SECONDS = 0.5
        with environment.overridden({"SAID": "now", "TMPDIR": sys.argv[1]}):
            ask()
        assert len(tree.children()) <= 1
    assert not tree.children()
"""


def asked(
    directory: Path, case: str, *preloaded: str, path: Path | None = None
) -> tuple[list[str], str]:
    """Return what a process reported of its environment, and what was logged."""
    program = directory / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(directory), case, *preloaded],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=path,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_a_child_has_the_environment_of_the_moment(tmp_path: Path) -> None:
    """Not that of the server's start: what came since is there, and what went is not."""
    reported, log = asked(tmp_path, "running")
    assert reported == [f"now None {tmp_path}", "0 True"]
    assert log == ""


@pytest.mark.parametrize("case", ["killed", "unreachable"])
def test_a_server_that_cannot_be_asked_is_replaced(tmp_path: Path, case: str) -> None:
    """The next child comes from another one, and a warning says so."""
    reported, log = asked(tmp_path, case)
    assert reported == [f"now None {tmp_path}", "0 True"]
    assert "had ended and was replaced" in log


def test_a_child_is_spawned_where_no_server_answers(tmp_path: Path) -> None:
    """A server that fails while it imports costs time, and no start."""
    (tmp_path / "broken_import.py").write_text("raise RuntimeError('broken')\n")
    reported, log = asked(tmp_path, "running", "broken_import", path=tmp_path)
    assert reported[0] == f"now None {tmp_path}"
    assert reported[1].startswith("0 ")
    assert "so this one is spawned" in log


@pytest.mark.parametrize(("case", "preloaded"), [("stopped", ()), ("stuck", ("endless_import",))])
def test_a_server_that_does_not_answer_is_ended(
    tmp_path: Path, case: str, preloaded: tuple[str, ...]
) -> None:
    """A start does not wait for one that is stopped, or that hangs in an import."""
    (tmp_path / "endless_import.py").write_text("import time\ntime.sleep(600)\n")
    reported, log = asked(tmp_path, case, *preloaded, path=tmp_path)
    assert reported == [f"now None {tmp_path}", "0 False"]
    assert "so this one is spawned" in log


STOPPED = """
import asyncio, os, signal, sys
from pathlib import Path
from holdfast.processes import forkserver, tree
from holdfast.engine.launch.startup import until_stuck

async def main():
    pid = forkserver.server_pid()
    os.kill(pid, signal.SIGSTOP)
    reason = await until_stuck(forkserver.server, 0.0)
    forkserver.end_if_stopped()
    os.waitpid(pid, 0)
    forkserver.ensure_running()
    print(f"process {pid} was stopped" in reason, forkserver.server_pid() != pid)

if __name__ == "__main__":
    forkserver.PRELOADED = ()
    with tree.owned(Path(sys.argv[1]), {}):
        asyncio.run(main())
"""


def test_a_start_sees_a_server_that_is_stopped(tmp_path: Path) -> None:
    """It is named as what the start waits for, ended, and replaced at the next start."""
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


@pytest.mark.parametrize("case", ["running", "killed"])
def test_a_server_leaves_no_socket(tmp_path: Path, case: str) -> None:
    """It lies in the directory that is removed with the front end."""
    asked(tmp_path, case)
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} <= {
        "exit",
        "program.py",
        "listener",
    }


def test_a_directory_with_a_long_path_has_no_server(tmp_path: Path) -> None:
    """A socket's path is short: its engines are spawned, and the log says that this is slower."""
    directory = tmp_path / ("long" * 25)
    directory.mkdir()
    reported, log = asked(directory, "running")
    assert reported == [f"now None {directory}", "0 True"]
    assert "so they start more slowly" in log


UNCOLLECTED = """
import sys
from pathlib import Path
from holdfast.processes import forkserver, tree

if __name__ == "__main__":
    import gc_at_import  # not in a child, which imports what is above this line first
    with tree.owned(Path(sys.argv[1]), {}, has_fork_server=False):
        receiver, sender = forkserver.Context().Pipe(duplex=False)
        child = forkserver.Context().Process(target=gc_at_import.say, args=(sender,))
        child.start()
        print(gc_at_import.WAS_ON, *receiver.recv(), flush=True)
        child.join()
"""


def test_a_spawned_child_imports_without_the_collector(tmp_path: Path) -> None:
    """What its function needs is imported while it is unpickled; then the collector is on."""
    (tmp_path / "gc_at_import.py").write_text(
        "import gc\nWAS_ON = gc.isenabled()\n"
        "def say(connection):\n    connection.send((WAS_ON, gc.isenabled()))\n"
    )
    program = tmp_path / "program.py"
    program.write_text(UNCOLLECTED)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["True", "False", "True"], done.stderr


ASKED_FOR_SPAWN = """
import os, sys
from pathlib import Path
from holdfast.processes import forkserver, tree

def say(connection):
    connection.send(forkserver._is_forked())

def ask():
    receiver, sender = forkserver.Context().Pipe(duplex=False)
    child = forkserver.Context().Process(target=say, args=(sender,))
    child.start()
    is_forked = receiver.recv()
    child.join()
    return is_forked

if __name__ == "__main__":
    forkserver.PRELOADED = ()
    with tree.owned(Path(sys.argv[1]), {}):
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # as vLLM itself does
        forkserver.ensure_running()
        print(forkserver.is_enabled(), forkserver.server_pid() is not None, ask(), flush=True)
"""


@pytest.mark.parametrize(("method", "is_forked"), [("spawn", False), ("fork", True), (None, True)])
def test_a_user_can_rule_out_forks(tmp_path: Path, method: str | None, is_forked: bool) -> None:
    """By vLLM's own variable, if it was set before vLLM is imported: then no server is started."""
    program = tmp_path / "program.py"
    program.write_text(ASKED_FOR_SPAWN)
    variables = {name: value for name, value in os.environ.items() if name != METHOD}
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=variables | ({METHOD: method} if method else {}),
    )
    assert (done.stdout.split(), done.stderr) == ([str(is_forked)] * 3, "")


UNFORKED = """
import sys
from pathlib import Path
from holdfast.processes import forkserver, tree

with tree.owned(Path(sys.argv[1]), {}, has_fork_server=False):
    print(forkserver.exit_codes_directory(), forkserver.server_pid())
"""


def test_exit_codes_are_kept_where_nobody_else_writes(tmp_path: Path) -> None:
    """Also without a server, as on a follower: another user could say why a process ended."""
    done = subprocess.run(
        [sys.executable, "-c", UNFORKED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == [str(tmp_path / "exit-codes"), "None"]


SIGNALLED = """
import os, signal, sys
from pathlib import Path
from holdfast.processes import forkserver, tree

def say(connection):
    connection.send(os.getpgid(0))

def ask():
    receiver, sender = forkserver.Context().Pipe(duplex=False)
    child = forkserver.Context().Process(target=say, args=(sender,))
    child.start()
    group = receiver.recv()
    child.join()
    return group

if __name__ == "__main__":
    came = []
    signal.signal(signal.SIGTERM, lambda number, _frame: came.append(number))
    with tree.owned(Path(sys.argv[1]), {}):
        group = ask()
        os.killpg(0, signal.SIGTERM)
        print(len(came), group == ask() == forkserver.server_pid())
"""


def test_a_signal_to_the_process_group_is_for_the_front_end(tmp_path: Path) -> None:
    """The server goes on in a group of its own, which its children belong to."""
    program = tmp_path / "program.py"
    program.write_text(SIGNALLED)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        start_new_session=True,
    )
    assert done.stdout.split() == ["1", "True"], done.stderr
