"""An engine that is killed while it starts: what the last line says of it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from servers import SMALL, descendants, running

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("title", ["EngineCore", "VLLM::Worker"])
def test_a_killed_process_of_a_start_is_named_with_its_signal(title: str, tmp_path: Path) -> None:
    """The kernel does that to the largest one where memory is short; nobody else can tell."""
    with running(tmp_path, "--demo", *SMALL) as server:

        def found() -> list[psutil.Process]:
            return [p for p in descendants(server.process.pid) if title in _title(p)]

        server.until(found, title)[0].kill()
        assert server.wait() == 3
        assert "was killed by SIGKILL (probably for lack of memory). Remedy: " in server.last_line


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
