"""The process of one subject: makes it, and makes the checks on it one after the other.

python -m gpu_check.subject_process ERRAND ANSWERS
"""

from __future__ import annotations

import importlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from gpu_check import process_tree
from gpu_check.checks import CHECKS, SUBJECTS, Check
from gpu_check.records import (
    TAIL_CHARACTERS,
    CheckFailedError,
    CheckResult,
    CheckSkippedError,
    Measured,
    Status,
)
from gpu_check.subject_protocol import Answers, Bench, Errand


def main(errand_path: str, answers_path: str) -> None:
    """Run the errand, and tell each step of it."""
    errand, answers = Errand.read(Path(errand_path)), Answers(Path(answers_path))
    process_tree.end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    opened = _named(next(s.opened for s in SUBJECTS if s.name == errand.subject))
    is_open = False
    try:
        with cast("AbstractContextManager[Bench]", opened(errand)) as bench:
            is_open = True
            answers.tell(opened=True)
            for check in (check for check in CHECKS if check.name in errand.checks):
                answers.tell(ended=asdict(made(check, bench)))
    except Exception as error:
        if is_open:  # it could not be closed, which the exit code says
            raise
        if isinstance(error, CheckFailedError):
            answers.tell(refused=str(error), log_tail=error.log_tail)
        else:
            answers.tell(refused=_text(error), log_tail=traceback.format_exc()[-TAIL_CHARACTERS:])


def made(check: Check, bench: Bench) -> CheckResult:
    """The result of one check; whatever it raises is one."""
    began_seconds = time.monotonic()
    status, reason, tail, measured = _outcome(check, bench)
    return CheckResult(
        check.name,
        check.subject,
        check.proves,
        status,
        reason,
        round(time.monotonic() - began_seconds, 3),
        measured,
        tail[-TAIL_CHARACTERS:],
    )


def _outcome(check: Check, bench: Bench) -> tuple[Status, str, str, tuple[Measured, ...]]:
    function = cast("Callable[[Bench], Sequence[Measured]]", _named(check.function))
    try:
        return "passed", "", "", tuple(function(bench))
    except CheckSkippedError as error:
        return "skipped", str(error), "", ()
    except CheckFailedError as error:
        return "failed", str(error), bench.tail(), ()
    except Exception as error:  # noqa: BLE001 - whatever a check raises is what came of it
        return "failed", _text(error), f"{bench.tail()}\n{traceback.format_exc()}", ()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _named(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"gpu_check.{module}"), name)
    return function


if __name__ == "__main__":
    main(*sys.argv[1:])
