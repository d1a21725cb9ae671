"""What a start-up is doing, for who waits: live on a terminal, else one log line a step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Protocol, Self, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from holdfast.records import Outcome, ProbeStep

PHASE_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "import": "import vLLM",
        "processes": "start the engine's processes",
        "load": "load the weights",
        "kv_sizing": "size the KV cache",
        "kv_cache": "allocate the KV cache",
        "warmup": "warm up",
        "locked": "lock the workspaces",
        "probe": "prove the worst case",
    }
)
_LEVELS = MappingProxyType[Outcome, int](
    {"passed": logging.INFO, "skipped": logging.INFO, "failed": logging.ERROR}
)
_STYLES = MappingProxyType[Outcome, str]({"passed": "green", "skipped": "dim", "failed": "red"})
_QUIET_STATES = frozenset({"READY", "SLEEPING", "FAILED", "STOPPED"})
_REFRESHES_PER_SECOND = 8
_BETWEEN = "working"
"""Shown live from the end of one activity to the begin of the next."""


class Progress(Protocol):
    """Hears of everything that happens between start and ready, in order and from any thread.

    Entered before the first event and left after the last, so that a terminal is given back.
    """

    def __enter__(self) -> Self:
        """Begin to listen."""

    def __exit__(self, *_: object) -> None:
        """Give the terminal back."""

    def phase_started(self, name: str) -> None:
        """A phase of the engine's start began."""

    def phase_finished(self, name: str, seconds: float) -> None:
        """A phase of the engine's start is over."""

    def step_started(self, step: str, detail: str, tokens: int) -> None:
        """A step of the probe began, or goes on with another size."""

    def step_finished(self, step: ProbeStep) -> None:
        """A step of the probe is over."""

    def state_changed(self, state: str, reason: str) -> None:
        """The server moved to another state."""

    def ready(self, summary: str) -> None:
        """The server lets requests in."""


def progress_for(stream: TextIO) -> Progress:
    """The live view if `stream` is a terminal that can move its cursor, else log lines."""
    if stream.isatty() and os.environ.get("TERM", "dumb") not in {"dumb", "unknown"}:
        terminal = cast("TextIO", _Terminal(stream))
        return LiveProgress(Console(file=terminal, highlight=False))
    return LogProgress(logging.getLogger(__name__))


class _Terminal:
    """A terminal that may be closed while the server drains: what it cannot show is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Show the text, if there is still anything to show it on."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As above."""
        with suppress(OSError):
            self._stream.flush()


class LogProgress:
    """One log line for each phase, step and state; that something began is said at level debug."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def phase_started(self, name: str) -> None:
        """Said at level debug."""
        self._logger.debug("start: %s", _label(name), extra={"fields": {"phase": name}})

    def phase_finished(self, name: str, seconds: float) -> None:
        """The phase and its time on one line."""
        fields = {"phase": name, "seconds": seconds}
        self._logger.info("start: %s, %.1f s", _label(name), seconds, extra={"fields": fields})

    def step_started(self, step: str, detail: str, tokens: int) -> None:
        """Said at level debug."""
        fields = {"step": step, "detail": detail, "tokens": tokens}
        self._logger.debug("probe: %s", _activity(step, detail, tokens), extra={"fields": fields})

    def step_finished(self, step: ProbeStep) -> None:
        """The step, its size, its time and why it is not whole, on one line."""
        level = logging.WARNING if _is_passed_in_part(step) else _LEVELS[step.outcome]
        fields = {
            "step": step.name,
            "outcome": step.outcome,
            "limited": step.limited,
            "tokens": step.tokens,
            "seconds": step.duration_seconds,
        }
        self._logger.log(level, "probe: %s", _result(step), extra={"fields": fields})

    def state_changed(self, state: str, reason: str) -> None:
        """State and reason on one line."""
        self._logger.info("state: %s: %s", state, reason, extra={"fields": {"state": state}})

    def ready(self, summary: str) -> None:
        """The summary as it is."""
        self._logger.info("%s", summary)


class LiveProgress:
    """Finished phases and steps as lines that stay, under them one line of what is being done.

    Other processes write to the same terminal. The live line is one row high and leaves the cursor
    at its beginning, so what they write starts in the first column and no line of theirs is erased.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._doing = _Doing()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._rest()

    def phase_started(self, name: str) -> None:
        """Shown live."""
        self._do(_label(name))

    def phase_finished(self, name: str, seconds: float) -> None:
        """A line that stays."""
        self._doing.begin(_BETWEEN)
        self._say("done", "green", f"{_label(name)}, {seconds:.1f} s")

    def step_started(self, step: str, detail: str, tokens: int) -> None:
        """Shown live."""
        self._do(f"probe {_activity(step, detail, tokens)}")

    def step_finished(self, step: ProbeStep) -> None:
        """A line that stays."""
        self._doing.begin(_BETWEEN)
        style = "yellow" if _is_passed_in_part(step) else _STYLES[step.outcome]
        self._say("probe", style, _result(step))

    def state_changed(self, state: str, reason: str) -> None:
        """A line that stays; the live line ends with a state in which nothing is being done."""
        if state in _QUIET_STATES:
            self._rest()
        self._say(state, "bold", reason)

    def ready(self, summary: str) -> None:
        """A line that stays, and the end of the live line."""
        self._rest()
        self._say("ready", "bold green", summary)

    def _do(self, what: str) -> None:
        self._doing.begin(what)
        if self._live is None:
            # The streams are not redirected: the children's could not be, and one way is enough.
            self._live = Live(
                self._doing,
                console=self._console,
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start(refresh=True)

    def _rest(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say(self, word: str, style: str, text: str) -> None:
        self._console.print(Text.assemble((f"{word:<10}", style), " ", text), soft_wrap=True)


class _Doing:
    """The live line: a sign of life, the activity and its time so far."""

    def __init__(self) -> None:
        self._what = ""
        self._since_seconds = 0.0

    def begin(self, what: str) -> None:
        self._since_seconds = time.monotonic()
        self._what = what

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        seconds = time.monotonic() - self._since_seconds
        sign = "|/-\\"[int(seconds * 4) % 4]
        # One short of the width: a full row would make the terminal wrap.
        text = Text(f"{sign} {self._what}, {seconds:.0f} s", style="dim", end="")
        text.truncate(max(1, options.max_width - 1), overflow="ellipsis")
        yield text
        yield Control(ControlType.CARRIAGE_RETURN)


def _label(phase: str) -> str:
    return PHASE_LABELS.get(phase, phase)


def _activity(step: str, detail: str, tokens: int) -> str:
    size = f"{tokens:,} tokens" if tokens else ""
    return ", ".join(part for part in (step, size, detail) if part)


def _is_passed_in_part(step: ProbeStep) -> bool:
    return step.outcome == "passed" and step.limited


def _result(step: ProbeStep) -> str:
    outcome = "passed in part" if _is_passed_in_part(step) else step.outcome
    size = f", {step.tokens:,} tokens" if step.tokens else ""
    seconds = "" if step.outcome == "skipped" else f", {step.duration_seconds:.1f} s"
    reason = f": {step.reason}" if step.reason else ""
    return f"{step.name} {outcome}{size}{seconds}{reason}"
