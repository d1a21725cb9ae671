"""What vLLM logs of a request is bounded and commands no terminal; what it keeps is bounded."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import logger as vllm_logger
from vllm.entrypoints.openai.chat_completion import protocol
from vllm.logging_utils import ColoredFormatter, NewLineFormatter

from holdfast.patches import log_lines
from holdfast.patches.log_lines import (
    MAX_ARGUMENT_CHARACTERS,
    MAX_CHARACTERS,
    MAX_VARIANTS,
    bound_log_lines,
    escape_controls,
)
from holdfast.workspace.plan import SPEC_VARIABLE, WorkspaceSpec

LINE = "%(levelname)s [%(fileinfo)s:%(lineno)d] %(message)s"
LOGGER = logging.getLogger("vllm.tests")


class Lines(logging.Handler):
    """Keeps what vLLM's formatter makes of each record."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(NewLineFormatter(LINE))
        self.written: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.written.append(self.format(record))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What vLLM's loggers write, bounded as two starts would."""
    for name in log_lines._LEVELS:
        monkeypatch.setattr(vllm_logger, name, getattr(vllm_logger, name))
    factory, handler = logging.getLogRecordFactory(), Lines()
    logging.getLogger("vllm").addHandler(handler)
    bound_log_lines()
    bound_log_lines()
    yield handler.written
    logging.getLogger("vllm").removeHandler(handler)
    logging.setLogRecordFactory(factory)


def read_parts(*kinds: Any) -> None:
    """Have vLLM read a system message with a part of each kind."""
    content = [{"type": kind, "text": "hold"} for kind in kinds]
    data = {"model": "m", "messages": [{"role": "system", "content": content}]}
    protocol.ChatCompletionRequest.check_system_message_content_type(data)


def test_a_client_is_quoted_in_part(lines: list[str]) -> None:
    """The types of content of a system message are a client's words."""
    read_parts("x" * 100_000)
    [line] = lines
    assert "Found content type: 'xxx" in line
    assert len(line) < 2 * MAX_ARGUMENT_CHARACTERS


def test_a_message_is_logged_once_for_each_of_a_few_arguments(lines: list[str]) -> None:
    """A message may have a million parts of other types."""
    read_parts("a", "a", "b")
    assert len(lines) == 2
    read_parts(*map(str, range(1000)))
    assert len(lines) == MAX_VARIANTS


def test_what_no_set_can_hold_is_named_by_its_type(lines: list[str]) -> None:
    """vLLM raises TypeError for a list, which is a 500."""
    read_parts([1, 2], {"a": 1})
    assert [line.rpartition("type: ")[2] for line in lines] == ["'<list>'.", "'<dict>'."]


def test_a_warning_names_the_line_of_vllm_that_gives_it(lines: list[str]) -> None:
    """As it did before."""
    read_parts("image")
    assert "[protocol.py:" in lines[0]


def test_a_long_message_is_written_without_its_middle(lines: list[str]) -> None:
    """The model is a client's, of any length."""
    LOGGER.error("Error with model %s: %s", "x" * 1_000_000, "not found")
    [line] = lines
    assert len(line) < MAX_CHARACTERS + 200
    assert line.endswith("not found")
    assert "characters left out" in line


def test_many_lines_become_one(lines: list[str]) -> None:
    """vLLM's formatter writes a prefix before each."""
    LOGGER.error("Error with model %s", "\n" * 1_000_000)
    [line] = lines
    assert len(line) < 3 * MAX_CHARACTERS


def test_a_traceback_keeps_its_end(lines: list[str]) -> None:
    """The message of an exception may be a client's, too."""
    error = ValueError("x" * 1_000_000 + " is not found")
    LOGGER.error("failed", exc_info=error)
    [line] = lines
    assert "failed" in line
    assert line.endswith("is not found")
    assert len(line) < MAX_CHARACTERS + 1000


def test_what_is_short_is_written_as_it_is(lines: list[str]) -> None:
    """Arguments and tracebacks stay what they were."""
    LOGGER.error("%s has %d\nlines", "it", 2, exc_info=ValueError("no"))
    [line] = lines
    assert "it has 2\r\nERROR" in line
    assert line.endswith("ValueError: no")


@pytest.mark.usefixtures("lines")
def test_a_message_whose_arguments_do_not_fit_is_left_to_its_handler() -> None:
    """Most handlers report it, and go on."""
    with pytest.raises(TypeError, match="number"):
        LOGGER.error("%d", "x")


@pytest.mark.usefixtures("lines")
def test_a_record_without_a_name_can_be_made() -> None:
    """Python makes one to fill it from a dictionary."""
    assert logging.makeLogRecord({"name": "vllm.engine"}).name == "vllm.engine"


def test_other_loggers_are_left_alone() -> None:
    """Their formatters may read the arguments."""
    record = logging.getLogRecordFactory()(
        "uvicorn.access", logging.INFO, "", 0, "%s", ("x" * 100_000,), None
    )
    assert record.args == ("x" * 100_000,)


QUOTED = "role \x1b]0;owned\x07\x9b2J\r\x00"
SHOWN = r"role \x1b]0;owned\x07\x9b2J\r\x00"


@pytest.fixture
def _without_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As each process of a server has it, twice if it configures its log again."""
    monkeypatch.setattr(NewLineFormatter, "format", NewLineFormatter.format)
    escape_controls()
    escape_controls()


def record_of(error: Exception | None = None) -> logging.LogRecord:
    given = (type(error), error, None) if error is not None else None
    return logging.LogRecord("vllm.x", logging.ERROR, "x.py", 1, "a %s\nb", (QUOTED,), given)


@pytest.mark.usefixtures("_without_controls")
def test_a_line_of_vllm_commands_no_terminal() -> None:
    """A client is quoted in the message, in its arguments or in a traceback; lines stay lines."""
    formatter = NewLineFormatter("%(levelname)s %(message)s")
    assert formatter.format(record_of()) == f"ERROR a {SHOWN}\r\nERROR b"
    assert formatter.format(record_of(ValueError(QUOTED))).endswith(f"ValueError: {SHOWN}")
    quiet = record_of()
    quiet.exc_text = f"ValueError: {QUOTED}"
    assert formatter.format(quiet).endswith(f"ValueError: {SHOWN}")


ENGINE_PROCESS = """
import logging
from vllm import logger
from holdfast.worker.plugin import register
logger._configure_vllm_root_logger()
register()
logging.getLogger("vllm.holdfast").warning("%s", "one \\x1b]0;owned")
try:
    raise ValueError("two \\x1b]0;owned")
except ValueError:
    logging.getLogger("vllm.x").exception("failed")
"""


def test_a_process_of_an_engine_commands_no_terminal(tmp_path: Path) -> None:
    """Nor in the line that stands for a traceback."""
    WorkspaceSpec(str(tmp_path), 1, 0, 0.0, "deny", None).write(tmp_path / "spec.json")
    variables = os.environ | {SPEC_VARIABLE: str(tmp_path / "spec.json"), "NO_COLOR": "1"}
    command = [sys.executable, "-c", ENGINE_PROCESS]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert "one \\x1b]0;owned" in ran.stdout
    assert "failed (ValueError: two \\x1b]0;owned)" in ran.stdout
    assert "\x1b" not in ran.stdout


@pytest.mark.usefixtures("_without_controls")
def test_the_colours_of_vllm_stay() -> None:
    """The terminal obeys its formatter, and the record is for other handlers as it was."""
    record = record_of(ValueError(QUOTED))
    line = ColoredFormatter("%(levelname)s %(message)s").format(record)
    assert line.startswith(f"\x1b[31mERROR\x1b[0m a {SHOWN}\r\n")
    assert QUOTED not in line
    assert (record.getMessage(), record.exc_text) == (f"a {QUOTED}\nb", None)


@pytest.mark.usefixtures("_without_controls")
def test_a_message_whose_arguments_do_not_fit_is_still_left_to_its_handler() -> None:
    """As without this."""
    record = logging.LogRecord("vllm.x", logging.ERROR, "x.py", 1, "%d", ("x",), None)
    with pytest.raises(TypeError, match="number"):
        NewLineFormatter("%(message)s").format(record)
