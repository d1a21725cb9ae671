"""The kit's runner: each check has its result, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from gpu_check import __main__ as kit
from gpu_check import process_tree, runner
from gpu_check.checks import Check, Subject
from gpu_check.records import Measured
from gpu_check_runs import MACHINE, ROOT
from servers import descendants, title_of, wait_until

FAKE_SUBJECT = """
import os, signal, subprocess, sys, threading
from contextlib import contextmanager
from gpu_check.records import CheckFailedError, Measured

class Bench:
    def tail(self): return "its last words"

@contextmanager
def opened(errand):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield Bench()

@contextmanager
def broken(errand):
    raise OSError("it cannot be made")
    yield

@contextmanager
def unready(errand):
    raise CheckFailedError("it is not ready", log_tail="its last words")
    yield

def right(bench): return [Measured("answer", 42)]
def wrong(bench): raise CheckFailedError("it is not")
def broke(bench): return 1 / 0
def died(bench): os.kill(os.getpid(), signal.SIGKILL)
def hung(bench): threading.Event().wait()
def last(bench): return []
def told(bench):
    names = ("HOLDFAST_", "VLLM_", "PYTORCH_ALLOC", "PYTORCH_CUDA_ALLOC")
    return [Measured(name, value) for name, value in os.environ.items() if name.startswith(names)]
"""


@pytest.fixture
def work(tmp_path: Path) -> runner.Workplace:
    """A run that has minutes."""
    return runner.Workplace(tmp_path, None, MACHINE, 1.0, time.monotonic() + 280)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Check]]:
    """Makes the table of a run out of functions of `FAKE_SUBJECT`."""
    package = tmp_path / "gpu_check_fakes"
    package.mkdir()
    (package / "gpu_check_fakes.py").write_text(FAKE_SUBJECT)

    def made(*names: str, opened: str = "opened") -> list[Check]:
        subject = Subject("stock", f"fakes:{opened}", (), 60.0)
        table = [
            Check(n, "stock", f"fakes:{n}", "something", (), 5.0 if n == "hung" else 60.0)
            for n in names
        ]
        monkeypatch.setattr(runner, "SUBJECTS", (subject,))
        _serve_fakes(package, subject, table, monkeypatch)
        return table

    return made


def _serve_fakes(
    package: Path, subject: Subject, table: Sequence[Check], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have the process of a subject find the fakes: by a module that Python runs at its start."""
    (package / "sitecustomize.py").write_text(
        "import gpu_check, gpu_check_fakes, sys\n"
        "from gpu_check import checks\n"
        "from gpu_check.checks import Check, Subject\n"
        "sys.modules['gpu_check.fakes'] = gpu_check_fakes\n"
        f"checks.SUBJECTS = ({subject!r},)\n"
        f"checks.CHECKS = {tuple(table)!r}\n"
    )
    path = [str(ROOT), str(package), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


def sleepers() -> set[int]:
    """The processes that the fake subjects have started, and any other below this one."""
    return set(process_tree.descendants(os.getpid()))


def test_each_check_has_its_result_and_the_others_go_on(
    work: runner.Workplace, fakes: Callable[..., list[Check]]
) -> None:
    """One that fails, raises, hangs or takes its process down costs no other its result."""
    before = sleepers()
    table = fakes("right", "wrong", "broke", "died", "hung", "last")
    results = {result.name: result for result in runner.results(table, work)}
    assert {name: result.status for name, result in results.items()} == {
        "right": "passed",
        "wrong": "failed",
        "broke": "failed",
        "died": "failed",
        "hung": "failed",
        "last": "passed",
    }
    assert results["right"].measured == (Measured("answer", 42),)
    assert results["wrong"].reason == "it is not"
    assert results["wrong"].log_tail == "its last words"
    assert results["broke"].reason == "ZeroDivisionError: division by zero"
    assert results["died"].reason == "the process ended by signal SIGKILL in check died"
    assert results["hung"].reason == "check hung took more than 5 s"
    assert sleepers() <= before


def test_a_subject_that_cannot_be_made_fails_its_checks_once(
    work: runner.Workplace, fakes: Callable[..., list[Check]]
) -> None:
    """Every check of it fails for the cause, and it is not tried again for each."""
    results = list(runner.results(fakes("right", "wrong", opened="broken"), work))
    assert [result.status for result in results] == ["failed", "failed"]
    assert {result.reason for result in results} == {"OSError: it cannot be made"}
    assert len(list(work.directory.glob("*.errand"))) == 1


def test_a_server_that_is_not_ready_says_its_last_words(
    work: runner.Workplace, fakes: Callable[..., list[Check]]
) -> None:
    """The reason is a line, and the log stands apart."""
    (result,) = runner.results(fakes("right", opened="unready"), work)
    assert (result.status, result.reason) == ("failed", "it is not ready")
    assert result.log_tail == "its last words"


def test_no_setting_of_the_shell_reaches_a_subject(
    work: runner.Workplace, fakes: Callable[..., list[Check]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a deployment sets is not what is checked; what the machine needs is kept.

    That usage is not to be reported is set for all, whatever the shell says of it.
    """
    for name in [name for name in os.environ if name.startswith(("HOLDFAST_", "VLLM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_API_KEY", "a key")
    monkeypatch.setenv("HOLDFAST_PROBE", "off")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/large")
    monkeypatch.setenv("VLLM_DO_NOT_TRACK", "1")
    (result,) = runner.results(fakes("told"), work)
    told = {one.name: one.value for one in result.measured}
    assert told == {"VLLM_CACHE_ROOT": "/large", "VLLM_NO_USAGE_STATS": "1"}


def test_when_the_time_of_the_run_is_over_what_is_left_fails(
    work: runner.Workplace, fakes: Callable[..., list[Check]]
) -> None:
    """Nothing is started any more, and the reason names what gives more time."""
    over = replace(work, ends_at_seconds=time.monotonic() - 1)
    (result,) = runner.results(fakes("right"), over)
    assert result.status == "failed"
    assert result.reason.startswith("the time for the whole run was over")
    assert "--patience" in result.reason
    assert "--run-seconds" in result.reason


@pytest.mark.parametrize(
    ("given", "seconds"),
    [((), 600), (("--patience=3",), 1800), (("--patience=3", "--run-seconds=900"), 900)],
)
def test_patience_gives_time_to_the_whole_run(given: Sequence[str], seconds: float) -> None:
    """Or a slow machine would fail checks that never ran; unless the user says how much."""
    assert kit.run_seconds(kit.parsed(given)) == seconds


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_when_the_kit_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    """Asked to, or killed so that it can do nothing itself."""
    command = [sys.executable, "-m", "gpu_check", "--output", str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # one that is killed leaves its files
    started = subprocess.Popen([*command, "--only", "random_lives"], cwd=ROOT, env=environment)
    with started as process:
        (below,) = wait_until(
            lambda: [p for p in descendants(process.pid) if "subject_process" in title_of(p)],
            deadline_seconds=120,
            what=lambda: "the process of the subject",
        )
        process.send_signal(number)
        process.wait(60)
    wait_until(
        lambda: not below.is_running() or below.status() == psutil.STATUS_ZOMBIE,
        deadline_seconds=60,
        what=lambda: f"{below} is left",
    )
