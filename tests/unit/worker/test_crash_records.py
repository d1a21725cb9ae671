"""The cause of a failed engine process is kept, and its traceback is not printed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from holdfast.worker.crash_records import read_causes, record_termination, root_cause, tracebacks

FAILING = """
import logging, multiprocessing, sys
from pathlib import Path
from holdfast.worker.crash_records import record_causes

def fail(level):
    logger = logging.getLogger("vllm")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(level)
    record_causes(Path(sys.argv[1]))
    try:
        raise ValueError("the disk is round")
    except ValueError:
        logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start.")
        raise

if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=fail, args=(sys.argv[2],))
    child.start()
    child.join()
"""


def _fail(directory: Path, level: str) -> str:
    arguments = [sys.executable, "-c", FAILING, str(directory), level]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    return ended.stderr


def test_cause_is_kept_and_traceback_not_printed(tmp_path: Path) -> None:
    """The log line stands alone; cause and traceback are in the directory."""
    printed = _fail(tmp_path, "INFO")
    assert "EngineCore failed to start. (ValueError: the disk is round)" in printed
    assert "Traceback" not in printed
    assert root_cause(tmp_path) == "ValueError: the disk is round"
    assert "Traceback (most recent call last)" in tracebacks(tmp_path)


def test_traceback_is_printed_at_level_debug(tmp_path: Path) -> None:
    """Who debugs sees it where it happened."""
    assert "Traceback" in _fail(tmp_path, "DEBUG")


def test_echo_of_another_process_is_no_root_cause(tmp_path: Path) -> None:
    """Of two logged failures the one that names no other process is the cause."""
    _fail(tmp_path, "INFO")
    (first,) = read_causes(tmp_path)
    echo = replace(first, at_seconds=0.0, error="RuntimeError: it failed. See root cause above.")
    (tmp_path / "1.cause").write_text(json.dumps(asdict(echo)) + "\n")
    assert root_cause(tmp_path) == "ValueError: the disk is round"


def test_half_a_line_is_left_out(tmp_path: Path) -> None:
    """A process that was killed while it wrote hides nothing of the others."""
    _fail(tmp_path, "INFO")
    (tmp_path / "2.cause").write_text('{"pid": 2, "at_sec')
    assert root_cause(tmp_path) == "ValueError: the disk is round"


def test_a_request_to_end_is_noted_and_obeyed(tmp_path: Path) -> None:
    """The process leaves its note, and its own handler runs as before."""
    program = (
        "import signal, sys; from pathlib import Path\n"
        "from holdfast.worker.crash_records import record_termination, was_terminated\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "record_termination(Path(sys.argv[1]))\n"
        "assert not was_terminated(Path(sys.argv[1]))\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    assert ended.returncode == 7
    assert [path.suffix for path in tmp_path.iterdir()] == [".terminated"]


def test_a_process_without_a_handler_is_left_as_it_is(tmp_path: Path) -> None:
    """Nothing is installed where SIGTERM simply ends the process."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    record_termination(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
