"""Processes that have one of the fake boards each, with vLLM and its GPU worker imported.

Each question is asked in a fork of one, so that none sees what another has changed; it stands for a
process that was spawned, so the driver can be used there. A question is a function of a test with
all its imports inside; what it is given and answers passes through JSON.
"""

from __future__ import annotations
import __future__

import inspect
import json
import os
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TextIO, TypeVar

from gpu_paths.fake_boards import BOARDS
from gpu_paths.fake_platform import BOARD_VARIABLE, import_torch, pretend

TESTS = Path(__file__).parent.parent
DEADLINE_SECONDS = 240
"""For one question, and for a board to import what it needs."""

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def environment(board: str = "") -> dict[str, str]:
    """Of a process that finds these modules, and has `board` once it imports `pretended`."""
    path = os.pathsep.join(
        filter(None, (str(TESTS), str(TESTS / "support"), os.environ.get("PYTHONPATH")))
    )
    return {**os.environ, BOARD_VARIABLE: board, "PYTHONPATH": path}


class FakeMachines:
    """Answer questions until they are closed. They share a process that has imported torch."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpu_paths.fake_machine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
        )

    def ask(
        self,
        board: str,
        question: Callable[Given, Answer],
        *given: Given.args,
        **named: Given.kwargs,
    ) -> Answer:
        """What `question` answers on `board`; an AssertionError with its traceback if it fails."""
        source = textwrap.dedent(inspect.getsource(question))
        function = {"name": question.__name__, "source": source}
        asked = {"board": board, **function, "given": given, "named": named}
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("it was started with both")
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline() or '{"failure": "the machines ended"}')
        if "failure" in said:
            raise AssertionError(said["failure"])
        answer: Answer = said["answer"]
        return answer

    def close(self) -> None:
        """End them all."""
        self._process.communicate()


@dataclass(frozen=True, slots=True)
class _Fork:
    """A process forked from this one, and what is said to it and by it."""

    pid: int
    lines: TextIO
    answers: TextIO

    @classmethod
    def of(cls, work: Callable[[TextIO, TextIO], None]) -> _Fork:
        """One that does `work` with its lines and its answers, and ends."""
        (its_lines, our_lines), (our_answers, its_answers) = os.pipe(), os.pipe()
        pid = os.fork()
        if not pid:
            os.close(our_lines)
            os.close(our_answers)
            with os.fdopen(its_lines) as lines, os.fdopen(its_answers, "w", 1) as answers:
                work(lines, answers)
            os._exit(0)
        os.close(its_lines)
        os.close(its_answers)
        return cls(pid, os.fdopen(our_lines, "w", 1), os.fdopen(our_answers))

    def said_to(self, line: str) -> str:
        """What it answers."""
        self.lines.write(line)
        return self.answers.readline() or _failure("the fork ended, or its time was over")

    def close(self) -> None:
        """Tell it that there is no more, and wait for its end."""
        self.lines.close()
        self.answers.close()
        os.waitpid(self.pid, 0)


def _answer_all(lines: TextIO, answers: TextIO) -> None:
    """Pass each question on to the process of its board."""
    boards: dict[str, _Fork] = {}
    for line in lines:
        name = json.loads(line)["board"]
        if name not in boards:
            boards[name] = _Fork.of(partial(_be, name))
        answers.write(boards[name].said_to(line))
    for fork in reversed(boards.values()):  # a later one holds open what is said to those before
        fork.close()


def _be(name: str, lines: TextIO, answers: TextIO) -> None:
    """Have the board of that name, and answer each question in a fork."""
    signal.alarm(DEADLINE_SECONDS)
    driver = pretend(BOARDS[name])
    sys.modules["gpu_paths.pretended"] = pretended = type(sys)("gpu_paths.pretended")
    pretended.DRIVER = driver  # type: ignore[attr-defined]  # as the module has it
    from holdfast.patches.engine import import_engine
    from holdfast.processes import imports

    with imports.uncollected():
        import_engine()
    signal.alarm(0)

    def answer_once(lines: TextIO, answers: TextIO) -> None:
        signal.alarm(DEADLINE_SECONDS)
        driver.is_in_bad_fork = False
        answers.write(_answer(lines.readline()))

    for line in lines:
        fork = _Fork.of(answer_once)
        answers.write(fork.said_to(line))
        fork.close()


def _answer(line: str) -> str:
    asked = json.loads(line)
    names: dict[str, Any] = {"__name__": "question"}
    flags = __future__.annotations.compiler_flag
    try:
        exec(compile(asked["source"], asked["name"], "exec", flags=flags), names)  # noqa: S102 - a function of a test
        answer = names[asked["name"]](*asked["given"], **asked["named"])
        return json.dumps({"answer": answer}) + "\n"
    except BaseException:  # noqa: BLE001 - the outermost edge of the fork
        return _failure(traceback.format_exc())


def _failure(text: str) -> str:
    return json.dumps({"failure": text}) + "\n"


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w", 1) as answers:
        os.dup2(2, 1)  # vLLM logs to standard output
        import_torch()
        _answer_all(sys.stdin, answers)
