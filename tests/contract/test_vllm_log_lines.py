"""What vLLM logs of a request has a bound, and so has what it keeps of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from vllm import logger as vllm_logger
from vllm.entrypoints.openai.chat_completion import protocol
from vllm.logging_utils import NewLineFormatter

from holdfast.patches import log_lines
from holdfast.patches.log_lines import (
    MAX_ARGUMENT_CHARACTERS,
    MAX_CHARACTERS,
    MAX_VARIANTS,
    bound_log_lines,
)

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
