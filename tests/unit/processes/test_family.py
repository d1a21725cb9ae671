"""Who belongs to a process, and who was only adopted by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from file_limits import no_more_files
from holdfast.processes import family
from sleepers import sleeping

ADOPTS = """
import asyncio, os, signal, subprocess, sys, time
from pathlib import Path
from holdfast.processes import tree
from holdfast.worker import lifetime

def until(condition):
    deadline = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

def orphan(**variables):
    command = "setsid sleep 600 > /dev/null & echo $!"
    done = subprocess.run(["sh", "-c", command], env=variables, stdout=subprocess.PIPE)
    pid = int(done.stdout)
    until(lambda: b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return pid

async def until_reaped(pid):
    tree.TRACKER_LOOK_SECONDS = 0.01
    async with tree.resource_tracker_kept(), asyncio.timeout(50):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.01)

lifetime.adopt_orphans()
stranger = orphan(PATH=os.environ["PATH"])
engines = orphan(PATH=os.environ["PATH"], HOLDFAST_WORKSPACE_SPEC="spec.json")
found = tree.children()
print([process.pid for process in found] == [engines])
tree.kill(found)
print(Path(f"/proc/{stranger}/stat").read_text().split()[2])
os.kill(stranger, signal.SIGKILL)
asyncio.run(until_reaped(stranger))
"""


def test_what_was_started_in_another_session_is_not_the_engines() -> None:
    """As PID 1 of a container, a server adopts it, leaves it alone, and reaps it in the end."""
    done = subprocess.run(
        [sys.executable, "-c", ADOPTS], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["True", "S"], "")


def test_a_process_that_must_not_be_looked_at_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `hidepid`, /proc lists the processes of other users, and refuses to read them."""
    with sleeping() as child:
        for pid in ("1", str(child.pid)):
            (tmp_path / pid).mkdir()
        (tmp_path / "1" / "stat").mkdir()  # cannot be read either, not even by root
        (tmp_path / str(child.pid) / "stat").write_bytes(
            Path(f"/proc/{child.pid}/stat").read_bytes()
        )
        monkeypatch.setattr(family, "_PROC", tmp_path)
        assert family.descendants(os.getpid()) == [psutil.Process(child.pid)]


def test_none_is_missing_where_only_one_file_can_be_opened() -> None:
    """The look needs one descriptor at a time."""
    with sleeping() as process, no_more_files(at_once=1):
        assert process.pid in {child.pid for child in family.children(os.getpid())}


def test_a_look_without_a_descriptor_fails() -> None:
    """None is taken for ended because it could not be looked at."""
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        family.children(os.getpid())


def test_descendants_are_found_at_any_depth() -> None:
    """Children are those of the first generation alone."""
    nested = "sh -c 'echo; sleep 600; :'; :"
    with subprocess.Popen(["sh", "-c", nested], stdout=subprocess.PIPE) as first:
        assert first.stdout
        first.stdout.readline()
        shown = psutil.Process(first.pid)
        try:
            assert len(family.children(first.pid)) == 1
            assert set(family.descendants(first.pid)) >= set(family.children(first.pid))
            assert set(family.descendants(first.pid)) == set(shown.children(recursive=True))
        finally:
            for process in (*shown.children(recursive=True), shown):
                process.kill()
