"""What a start-up is doing: a live view on a terminal, otherwise one log line per step."""

from __future__ import annotations

import logging
import sys
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

from holdfast.labels import Outcome
from holdfast.records import ProbeStep
from holdfast.settings import LogFormat
from holdfast.terminal import is_terminal

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
_BETWEEN_ACTIVITIES = "working"
"""The live view shows this from the end of one activity to the start of the next."""


class Progress(Protocol):
    """Receives every event between start and ready, in order and from any thread.

    It is entered before the first event and left after the last, so that it releases the terminal.
    """

    def __enter__(self) -> Self:
        """Expect events from now on."""

    def __exit__(self, *_: object) -> None:
        """Release the terminal."""

    def phase_started(self, name: str) -> None:
        """Show that a phase of the engine's start has begun."""

    def phase_finished(self, name: str, seconds: float) -> None:
        """Show that a phase of the engine's start is over."""

    def step_started(self, step: str, detail: str, tokens: int) -> None:
        """Show that a step of the probe has begun, or continues with another size."""

    def step_finished(self, step: ProbeStep) -> None:
        """Show that a step of the probe is over."""

    def state_changed(self, state: str, reason: str) -> None:
        """Show that the server has moved to another state."""

    def ready(self, summary: str) -> None:
        """Show that the server admits requests."""


def progress_in(log_format: LogFormat) -> Progress:
    """Return the progress for standard error: with `auto`, a live view if that is a terminal."""
    if log_format == "auto":
        return progress_for(sys.stderr)
    return LogProgress(logging.getLogger("holdfast.progress"))


def progress_for(stream: TextIO) -> Progress:
    """Return the live view if `stream` is a terminal that can move its cursor, else log lines."""
    if is_terminal(stream):
        terminal = cast("TextIO", _Terminal(stream))
        return LiveProgress(Console(file=terminal, highlight=False))
    return LogProgress(logging.getLogger(__name__))


class _Terminal:
    """A terminal that may be closed while the server drains: it drops what it cannot show."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text, unless the terminal is gone."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what was written, unless the terminal is gone."""
        with suppress(OSError):
            self._stream.flush()


class LogProgress:
    """Writes one log line for each phase, step and state; at level debug, also when one begins."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def phase_started(self, name: str) -> None:
        """Log the phase at level debug."""
        self._logger.debug("start: %s", _label(name), extra={"fields": {"phase": name}})

    def phase_finished(self, name: str, seconds: float) -> None:
        """Log the phase and its duration."""
        fields = {"phase": name, "seconds": seconds}
        self._logger.info("start: %s, %.1f s", _label(name), seconds, extra={"fields": fields})

    def step_started(self, step: str, detail: str, tokens: int) -> None:
        """Log the step at level debug."""
        fields = {"step": step, "detail": detail, "tokens": tokens}
        self._logger.debug("probe: %s", _activity(step, detail, tokens), extra={"fields": fields})

    def step_finished(self, step: ProbeStep) -> None:
        """Log the step, its size, its duration and why it is incomplete."""
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
        """Log the state and its reason."""
        self._logger.info("state: %s: %s", state, reason, extra={"fields": {"state": state}})

    def ready(self, summary: str) -> None:
        """Log the summary."""
        self._logger.info("%s", summary)


class LiveProgress:
    """Prints finished phases and steps, and below them one live line with the current activity.

    Other processes write to the same terminal. The live line is one row high and leaves the cursor
    at its beginning, so their output starts in the first column and is never erased.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live_line = _LiveLine()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_live()

    def phase_started(self, name: str) -> None:
        """Show the phase in the live line."""
        self._show(_label(name))

    def phase_finished(self, name: str, seconds: float) -> None:
        """Print the phase."""
        self._live_line.begin(_BETWEEN_ACTIVITIES)
        self._say("done", "green", f"{_label(name)}, {seconds:.1f} s")

    def step_started(self, step: str, detail: str, tokens: int) -> None:
        """Show the step in the live line."""
        self._show(f"probe {_activity(step, detail, tokens)}")

    def step_finished(self, step: ProbeStep) -> None:
        """Print the step."""
        self._live_line.begin(_BETWEEN_ACTIVITIES)
        style = "yellow" if _is_passed_in_part(step) else _STYLES[step.outcome]
        self._say("probe", style, _result(step))

    def state_changed(self, state: str, reason: str) -> None:
        """Print the state, and end the live line if nothing is being done in this state."""
        if state in _QUIET_STATES:
            self._end_live()
        self._say(state, "bold", reason)

    def ready(self, summary: str) -> None:
        """Print the summary, and end the live line."""
        self._end_live()
        self._say("ready", "bold green", summary)

    def _show(self, what: str) -> None:
        self._live_line.begin(what)
        if self._live is None:
            # The streams are not redirected, since those of the child processes cannot be.
            self._live = Live(
                self._live_line,
                console=self._console,
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start(refresh=True)

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say(self, word: str, style: str, text: str) -> None:
        self._console.print(Text.assemble((f"{word:<10}", style), " ", text), soft_wrap=True)


class _LiveLine:
    """The live line: a sign of life, the activity and its duration so far."""

    def __init__(self) -> None:
        self._what = ""
        self._since_seconds = 0.0

    def begin(self, what: str) -> None:
        self._since_seconds = time.monotonic()
        self._what = what

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        seconds = time.monotonic() - self._since_seconds
        sign = "|/-\\"[int(seconds * 4) % 4]
        # One column less than the width: a full row would make the terminal wrap.
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
