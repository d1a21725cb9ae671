"""What an operator is told if a vLLM is not one that Holdfast was made for."""

from __future__ import annotations

import sys
from pathlib import Path

import stand_in_engine
from servers import running

COMMAND = (sys.executable, str(Path(stand_in_engine.__file__)), "serve")


def test_a_vllm_without_what_a_guarantee_needs_is_exit_3(tmp_path: Path) -> None:
    """The last line names what is missing, what it is for, and the versions that have it."""
    variables = {"STAND_IN": "another-vllm"}
    arguments = ("model", "--probe=off")
    with running(tmp_path, *arguments, command=COMMAND, environment=variables) as server:
        assert server.wait() == 3
        for part in ("vllm.v1.utils:kill_process_tree", "the rest of the shutdown", "vLLM 0.32"):
            assert part in server.last_line
