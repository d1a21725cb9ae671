"""On a disk that is full something is not kept, and no process ends for it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.api.usage_files import LOCK_FILE, usage_kept
from holdfast.telemetry.key_usage import KeyUsage
from holdfast.worker import crash_records
from holdfast.worker.crash_records import read_causes, record_causes
from holdfast.worker.step_requests import StepRequests
from holdfast.workspace.stats import StatsWriter, read_stats

MEBIBYTE = 1 << 20


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory, without a byte left."""
    place = tmp_path / "full"
    place.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=8", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mounted, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (place / "filler").write_bytes(bytes(MEBIBYTE))
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process that does what one of an engine does."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


LOGS = """
import logging, sys
from pathlib import Path
from holdfast.worker.crash_records import record_causes
record_causes(Path(sys.argv[1]))
try:
    raise ValueError("a request of a client")
except ValueError:
    logging.getLogger("vllm").exception("it could not be prepared")
print("goes on")
"""


def test_an_exception_that_cannot_be_kept_ends_no_thread(full_disk: Path) -> None:
    """vLLM logs what is wrong with one request in the thread that takes in all of them."""
    done = run(LOGS, str(full_disk))
    assert (done.returncode, done.stdout) == (0, "goes on\n")


ENDS = """
import os, signal, sys, time
from pathlib import Path
from holdfast.worker.crash_records import record_termination
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
record_termination(Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(20)
"""


def test_what_a_worker_maps_is_at_its_path_where_shared_memory_is_full(
    full_disk: Path, tmp_path: Path
) -> None:
    """As in a container with 64 MiB of it, which vLLM has filled."""
    with StatsWriter(tmp_path, engine=0, rank=0, generation=1, shared=full_disk / "hf") as writer:
        writer.step_started()
        assert not writer.path.is_symlink()
        assert not list(full_disk.glob("hf*"))
        stats = read_stats(writer.path)
    assert stats is not None
    assert stats.running_step_started_seconds is not None


def test_a_worker_whose_files_have_no_room_says_so(full_disk: Path) -> None:
    """Once, and at the start: a store into a hole of a file would be a SIGBUS."""
    with pytest.raises(OSError, match="No space left"):
        StatsWriter(full_disk, engine=0, rank=0, generation=1, shared=full_disk / "hf")
    with pytest.raises(OSError, match="No space left"):
        StepRequests(
            full_disk, engine=0, rank=0, max_requests=100, max_steps=1, shared=full_disk / "hf"
        )


def test_a_signal_that_cannot_be_noted_is_heeded(full_disk: Path) -> None:
    """The process ends as it would without us."""
    for number in range(8):  # every file that it takes
        try:
            (full_disk / str(number)).touch()
        except OSError:
            break
    assert run(ENDS, str(full_disk)).returncode == 7


STATS = """
import sys
from pathlib import Path
from holdfast.workspace.stats import StatsWriter
try:
    StatsWriter(Path(sys.argv[1]), engine=0, rank=0, generation=1)
except OSError as error:
    print(error.strerror)
"""


def test_stats_that_cannot_be_kept_are_an_error_and_no_signal(full_disk: Path) -> None:
    """The start fails with the reason: without stats no engine is let in."""
    done = run(STATS, str(full_disk))
    assert (done.returncode, done.stdout) == (0, "No space left on device\n"), done.stderr


def test_usage_that_cannot_be_kept_is_counted(
    full_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server serves, and its limits hold, until it ends."""
    usage = KeyUsage()
    with usage_kept(usage, full_disk):
        usage.count("alice", requests=1, output_tokens=5)
        assert usage.tokens_today("alice") == 5
    assert "No space left" in caplog.text
    assert {path.name for path in full_disk.iterdir()} <= {"filler", LOCK_FILE}


STACKS = """
import os, sys
from pathlib import Path
from holdfast.worker.lifetime import write_stacks_on_signal
write_stacks_on_signal(Path(sys.argv[1]) / "none", os.getpid())
print("goes on")
"""


def test_a_process_starts_without_a_file_for_its_stacks(tmp_path: Path) -> None:
    """They are for the log alone."""
    assert run(STACKS, str(tmp_path)).stdout == "goes on\n"


def test_exceptions_of_requests_do_not_fill_the_disk(tmp_path: Path) -> None:
    """Each client can cause one; what ends the process is kept all the same."""
    logger = logging.getLogger("vllm")
    before = list(logger.handlers)
    record_causes(tmp_path)
    kept = next(handler for handler in logger.handlers if handler not in before)
    try:
        for _ in range(30):
            kept.handle(_record("of one request", ValueError("x" * MEBIBYTE)))
        kept.handle(_record("EngineCore encountered a fatal error.", ValueError("the end")))
    finally:
        logger.removeHandler(kept)
    written = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert crash_records.MAX_BYTES < written < 2 * crash_records.MAX_BYTES
    assert read_causes(tmp_path)[-1].error == "ValueError: the end"


def _record(message: str, error: Exception) -> logging.LogRecord:
    wrong = (type(error), error, None)
    return logging.LogRecord("vllm", logging.ERROR, "", 0, message, None, wrong)


CHANNELS = """
import os, sys
from holdfast.cli import main
main(["serve", "/no/such/model"])
"""


def test_the_exit_code_stands_where_nothing_can_be_said(tmp_path: Path) -> None:
    """Standard output and error are files of a disk that is full."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", CHANNELS],
            stdout=full,
            stderr=full,
            cwd=tmp_path,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert done.returncode != -signal.SIGBUS
