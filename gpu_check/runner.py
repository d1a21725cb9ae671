"""Makes the checks: each subject in a process of its own, each check within its deadline.

A check that fails, hangs or takes its subject down is reported so, and the others go on: those that
are left of the subject in a new one. Where the subject cannot be made at all, they fail for that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_check import process_tree
from gpu_check.checks import SUBJECTS, Check, Subject
from gpu_check.records import TAIL_CHARACTERS, CheckResult, Machine
from gpu_check.subject_protocol import Answers, Errand
from gpu_check.survey import ROOT

_POLL_SECONDS = 0.1
_END_SECONDS = 40.0
"""For a subject to end by itself once its checks are made, or once it is asked to."""
_SETTINGS = ("HOLDFAST_", "VLLM_", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""How variables begin that no subject gets. With segments that expand, torch takes memory in steps
of 20 MiB, and the kit compares bytes."""
_OF_THE_MACHINE = frozenset(
    {
        "VLLM_CACHE_ROOT",
        "VLLM_CONFIG_ROOT",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_CUDA_COMPATIBILITY_PATH",
        "VLLM_CUDART_SO_PATH",
        "VLLM_ENABLE_CUDA_COMPATIBILITY",
        "VLLM_NCCL_SO_PATH",
    }
)
"""What vLLM may need to run here at all."""
_TIME_IS_OVER = (
    "the time for the whole run was over; on a slow machine raise --patience, or --run-seconds"
)


@dataclass(frozen=True, slots=True)
class Workplace:
    """What all subjects of one run share."""

    directory: Path
    workspace_file: Path | None
    machine: Machine
    patience: float
    ends_at_seconds: float
    """Of `time.monotonic()`: when the time for the whole run is over."""

    def errand(self, subject: Subject, checks: Iterable[Check]) -> Errand:
        """What the process of `subject` is told."""
        return Errand(
            subject.name,
            tuple(check.name for check in checks),
            str(self.directory),
            str(self.workspace_file or ""),
            self.machine,
            self.patience,
        )


@dataclass(frozen=True, slots=True)
class _End:
    """How the process of a subject ended."""

    cause: str
    """Empty if all its checks were made."""
    log_tail: str = ""
    is_hopeless: bool = False
    """Whether another process of it would end so too."""


def results(checks: Sequence[Check], workplace: Workplace) -> Iterator[CheckResult]:
    """The result of each of `checks`, subject by subject; no process of one is left behind it."""
    for subject in SUBJECTS:
        of_subject = [check for check in checks if check.subject == subject.name]
        if of_subject:
            yield from _of_subject(subject, of_subject, workplace)


def _of_subject(
    subject: Subject, checks: Sequence[Check], workplace: Workplace
) -> Iterator[CheckResult]:
    waiting = list(checks)
    while waiting:
        made = 0
        end = _End(_TIME_IS_OVER, is_hopeless=True)
        if time.monotonic() < workplace.ends_at_seconds:
            with _begun(subject, waiting, workplace) as life:
                for step in life.steps():
                    if isinstance(step, _End):
                        end = step
                    else:
                        made += 1
                        yield step
        waiting = waiting[made:]
        lost = waiting if end.is_hopeless else waiting[:1]
        for check in lost:
            yield _failed(check, end)
        waiting = waiting[len(lost) :]


@contextmanager
def _begun(subject: Subject, checks: Sequence[Check], workplace: Workplace) -> Iterator[_Life]:
    """A process of the subject; when left, it and all that it made are gone."""
    name = f"{subject.name}-{time.monotonic_ns()}"
    errand_path, log_path, answers = (
        workplace.directory / f"{name}.{kind}" for kind in ("errand", "log", "answers")
    )
    workplace.errand(subject, checks).write(errand_path)
    module = "gpu_check.subject_process"
    command = [sys.executable, "-m", module, str(errand_path), str(answers)]
    with process_tree.nothing_left(), log_path.open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=workplace.directory,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # what a terminal sends is for the runner to act on
        )
        try:
            yield _Life(process, Answers(answers), log_path, subject, tuple(checks), workplace)
        finally:
            _stop(process)


def _environment() -> Mapping[str, str]:
    """That of the shell without the settings of a deployment, which its servers would take.

    They report no usage, whether the shell forbade it or not: they serve nobody.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _OF_THE_MACHINE or not name.startswith(_SETTINGS)
    }
    paths = [str(ROOT / "server"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    made = {"VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return {**kept, **made}


@dataclass(frozen=True, slots=True)
class _Life:
    """One process of a subject."""

    process: subprocess.Popen[bytes]
    answers: Answers
    log_path: Path
    subject: Subject
    checks: tuple[Check, ...]
    workplace: Workplace

    def steps(self) -> Iterator[CheckResult | _End]:
        """Each result as it is told, and last how the process ended, if that was too early."""
        read = done = 0
        is_open = False
        since_seconds = time.monotonic()
        while True:
            has_ended = self.process.poll() is not None  # before the reading of its last words
            told = self.answers.told()
            for answer in told[read:]:
                if "refused" in answer:
                    yield _End(str(answer["refused"]), str(answer["log_tail"]), is_hopeless=True)
                    return
                is_open, since_seconds = True, time.monotonic()
                if "ended" in answer:
                    done += 1
                    yield CheckResult.from_record(answer["ended"])
            read = len(told)
            if done == len(self.checks):
                with suppress(subprocess.TimeoutExpired):  # else it is told to end
                    self.process.wait(_END_SECONDS)
                return
            check = self.checks[done] if is_open else None
            if cause := self._obstacle(check, since_seconds, has_ended=has_ended):
                is_hopeless = not is_open or cause == _TIME_IS_OVER
                yield _End(cause, self._tail(), is_hopeless=is_hopeless)
                return
            time.sleep(_POLL_SECONDS)

    def _obstacle(self, check: Check | None, since_seconds: float, *, has_ended: bool) -> str:
        """Why it does not go on with `check`, or with its opening; empty if it does."""
        now_seconds = time.monotonic()
        what = f"check {check.name}" if check else f"making subject {self.subject.name}"
        limit_seconds = check.deadline_seconds if check else self.subject.opening_seconds
        limit_seconds *= self.workplace.patience
        if has_ended:
            return f"the process ended by {_how(self.process.returncode)} in {what}"
        if now_seconds > self.workplace.ends_at_seconds:
            return _TIME_IS_OVER
        if now_seconds - since_seconds > limit_seconds:
            return f"{what} took more than {limit_seconds:.0f} s"
        return ""

    def _tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-TAIL_CHARACTERS:]


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _failed(check: Check, end: _End) -> CheckResult:
    result = CheckResult(check.name, check.subject, check.proves, "failed")
    return replace(result, reason=end.cause, log_tail=end.log_tail)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, so that it ends what it has started in order; what is left is killed."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
