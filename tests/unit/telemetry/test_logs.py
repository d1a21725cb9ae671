from __future__ import annotations

import json
import logging
import logging.config
import re
import warnings
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from holdfast.errors import ExitCode, UsageError
from holdfast.telemetry.logs import (
    ROOT,
    JSONLines,
    LogStyle,
    clean_uvicorn_lines,
    configure_logging,
    quieten_access_log,
    set_log_level,
    write_uvicorn_alike,
)

GUIDE = Path(__file__).parents[3] / "docs" / "operating.md"


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    logger = logging.getLogger(ROOT)
    before = (logger.level, logger.propagate, tuple(logger.handlers))
    yield
    configure_logging(stream=StringIO())  # Python's warnings, too
    logger.level, logger.propagate = before[:2]
    logger.handlers[:] = before[2]


def test_a_console_line_names_level_logger_and_message() -> None:
    """A line says what happened, how bad it is and which logger says it."""
    stream = StringIO()
    configure_logging("info", stream=stream)
    logging.getLogger("holdfast.lifecycle").warning("growth of %d bytes", 7)
    line = stream.getvalue()
    assert line.startswith("WARNING ")
    assert line.endswith("holdfast.lifecycle: growth of 7 bytes\n")


def test_the_level_is_the_least_that_is_said() -> None:
    """What is below the level is not printed."""
    stream = StringIO()
    configure_logging("warning", stream=stream)
    logging.getLogger("holdfast.x").info("hidden")
    assert stream.getvalue() == ""


def test_no_level_silences_the_log_of_admin_calls() -> None:
    """Neither the flag nor an admin call, which would otherwise be the last one that is logged."""
    stream = StringIO()
    configure_logging("error", stream=stream)
    logging.getLogger("holdfast.admin").info("admin drain")
    set_log_level("holdfast", "critical")
    logging.getLogger("holdfast.admin").info("admin restart")
    logging.getLogger("holdfast.x").error("hidden")
    assert [line.partition(": ")[2] for line in stream.getvalue().splitlines()] == [
        "admin drain",
        "admin restart",
    ]


def test_a_console_line_commands_no_terminal() -> None:
    """A library's error may quote a client: in the message, in its arguments or in a traceback."""
    stream = StringIO()
    configure_logging("info", stream=stream)
    quoted = "bad backend \x1b]0;owned\x07\x9b2J\r\x7f\x00"
    logging.getLogger("holdfast.x").error(
        "cannot decode: %s \u202egnp.\u2066", quoted, exc_info=ValueError(quoted)
    )
    assert {letter for letter in stream.getvalue() if not letter.isprintable()} == {"\n"}
    assert stream.getvalue().count(r"\x1b]0;owned\x07\x9b2J\r\x7f\x00") == 2
    assert r"\u202egnp.\u2066" in stream.getvalue()


def test_a_console_line_keeps_every_other_letter() -> None:
    """Newlines, tabs, and the letters of all languages."""
    stream = StringIO()
    configure_logging("info", stream=stream)
    told = "one\n\ttwo: äöü 日本語 👩\u200d🚀 a\u00a0b"
    logging.getLogger("holdfast.x").info(told)
    assert stream.getvalue().endswith(f": {told}\n")


def test_a_json_line_holds_the_fields() -> None:
    """A machine reads one object per line, with the values next to the message."""
    stream = StringIO()
    configure_logging("info", style="json", stream=stream)
    logging.getLogger("holdfast.x").info("one\ntwo", extra={"fields": {"tokens": 7}})
    record = json.loads(stream.getvalue())
    assert stream.getvalue().count("\n") == 1
    assert record["message"] == "one\ntwo"
    assert (record["level"], record["logger"], record["tokens"]) == ("info", "holdfast.x", 7)


def test_a_json_line_holds_the_traceback() -> None:
    """An exception that is logged stays on the line of its message."""
    stream = StringIO()
    configure_logging("info", style="json", stream=stream)
    try:
        int("no number")
    except ValueError:
        logging.getLogger("holdfast.x").exception("failed")
    assert "ValueError: invalid literal" in json.loads(stream.getvalue())["traceback"]
    assert stream.getvalue().count("\n") == 1


def test_a_json_line_holds_a_traceback_that_was_shortened() -> None:
    """It is then a text, see `patches.log_lines`."""
    record = logging.makeLogRecord({"msg": "failed", "exc_text": "Traceback: ... ValueError"})
    assert json.loads(JSONLines().format(record))["traceback"] == record.exc_text


def test_a_traceback_of_uvicorn_commands_no_terminal() -> None:
    """An exception of an application may quote what a client sent."""
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(handler)
    try:
        clean_uvicorn_lines()
        getattr(stream, "\x1b]0;owned\x07")
    except AttributeError:
        logger.exception("failed for %s", "/x?key=\x1b")
    finally:
        logger.removeHandler(handler)
    assert stream.getvalue().startswith("failed for /x\n")
    assert r"no attribute '\x1b]0;owned\x07'" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_warnings_are_json_lines_too_where_ours_are() -> None:
    """They would break what reads the lines."""
    stream = StringIO()
    configure_logging("info", style="json", stream=stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old", FutureWarning, stacklevel=1)
    record = json.loads(stream.getvalue())
    assert (record["level"], record["logger"]) == ("warning", "py.warnings")
    assert "FutureWarning: old" in record["message"]


@pytest.mark.parametrize(("style", "is_json"), [("json", True), ("console", False)])
def test_uvicorn_writes_json_lines_where_we_do(style: LogStyle, *, is_json: bool) -> None:
    """On the streams that it has chosen."""
    stream = StringIO()
    configure_logging("info", style=style, stream=StringIO())
    theirs = logging.StreamHandler(stream)
    logger = logging.getLogger("uvicorn")
    logger.addHandler(theirs)
    try:
        write_uvicorn_alike()
        logger.warning("Shutting down")
    finally:
        logger.removeHandler(theirs)
    assert stream.getvalue().startswith('{"time"') is is_json


def test_the_file_that_the_guide_shows_gives_vllm_json_lines() -> None:
    """An operator copies it."""
    block = re.search(r"## JSON lines\n.*?```json\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert block is not None
    shown = json.loads(block.group(1))
    shown["loggers"] = {"a.test.of.logs": shown["loggers"].pop("vllm")}
    logging.config.dictConfig(shown)
    (handler,) = logging.getLogger("a.test.of.logs").handlers
    assert isinstance(handler.formatter, JSONLines)


def test_configuring_again_says_nothing_twice() -> None:
    """Only the last call counts."""
    first, second = StringIO(), StringIO()
    configure_logging("info", stream=first)
    configure_logging("info", stream=second)
    logging.getLogger("holdfast.x").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_the_root_logger_does_not_repeat_a_line() -> None:
    """Whatever configures the root logger prints none of our lines a second time."""
    stream = StringIO()
    at_root = logging.StreamHandler(stream)
    logging.getLogger().addHandler(at_root)
    try:
        configure_logging("info", stream=StringIO())
        logging.getLogger("holdfast.x").info("once")
    finally:
        logging.getLogger().removeHandler(at_root)
    assert stream.getvalue() == ""


def test_other_loggers_are_left_alone() -> None:
    """vLLM's loggers and the root logger keep their handlers and levels."""
    others = [logging.getLogger(), logging.getLogger("vllm")]
    before = [(logger.level, list(logger.handlers), logger.propagate) for logger in others]
    configure_logging("debug", stream=StringIO())
    assert before == [(logger.level, list(logger.handlers), logger.propagate) for logger in others]


def test_an_unknown_level_is_bad_usage() -> None:
    """The error says which levels there are."""
    with pytest.raises(UsageError) as caught:
        configure_logging("loud")
    assert caught.value.exit_code is ExitCode.USAGE
    assert "debug" in caught.value.line


def test_the_default_stream_is_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output stays free for what a command prints."""
    configure_logging("info")
    logging.getLogger("holdfast.x").info("hello")
    out, error = capfd.readouterr()
    assert out == ""
    assert "hello" in error


@pytest.mark.parametrize(
    ("target", "status", "is_probing", "is_logged"),
    [
        ("/v1/completions", 200, False, True),
        ("/v1/completions?x=1", 200, True, False),
        ("/v1/completions", 503, True, True),
        ("/readyz", 503, False, False),
        ("/metrics?name=up", 200, False, False),
    ],
)
def test_access_log_leaves_out_checks_and_probe(
    target: str, status: int, is_probing: bool, is_logged: bool
) -> None:
    """Health checks, scrapes and the probe's own requests are left out; refusals stay."""
    logger = logging.getLogger("uvicorn.access")
    before = list(logger.filters)
    quieten_access_log({"/readyz", "/metrics"}, is_probing=lambda: is_probing)
    record = logger.makeRecord(
        logger.name, logging.INFO, "", 0, "%s", ("client", "GET", target, "1.1", status), None
    )
    try:
        assert bool(logger.filter(record)) is is_logged
    finally:
        logger.filters = before
