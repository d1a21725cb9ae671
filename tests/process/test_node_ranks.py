"""The process that runs the ranks of a follower, as far as it comes without a GPU or a head."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from holdfast.errors import ExitCode
from holdfast.nodes import strict_json
from holdfast.nodes.facts import model_digest
from holdfast.nodes.messages import Start
from holdfast.worker.crash_records import refusal
from node_pairs import SPEC

FLAGS = ("--demo", "--enforce-eager", "--tensor-parallel-size=2")
DEADLINE_SECONDS = 240.0


def refused(tmp_path: Path, order: Start) -> str:
    """Why the process does not run the ranks of the order."""
    file, directory = tmp_path / "order.json", tmp_path / "1"
    file.write_bytes(strict_json.written(order))
    command = [sys.executable, "-m", "holdfast.engine.node_ranks"]
    files = [str(file), str(directory), str(tmp_path / "baseline.json")]
    done = subprocess.run([*command, *files], timeout=DEADLINE_SECONDS, check=False)
    assert done.returncode == ExitCode.USAGE
    return refusal(directory)


def test_flags_that_this_node_resolves_otherwise_are_refused(tmp_path: Path) -> None:
    """Before weights are read: the fingerprint is that of another GPU, or of other variables."""
    order = Start(1, 1, 2, "127.0.0.1", 29500, FLAGS, "of another GPU", SPEC)
    assert refused(tmp_path, order) == (
        "this node resolves the flags differently from the head. Remedy: use the same GPUs on "
        "every node, and set the same VLLM_* variables."
    )


def test_a_model_that_was_replaced_on_one_node_is_refused(tmp_path: Path) -> None:
    """The follower has joined with the files from before."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"12345678")
    digest = model_digest(str(model))
    (model / "model.safetensors").write_bytes(b"123456789")
    flags = (str(model), "--tensor-parallel-size=2")
    order = Start(1, 1, 2, "127.0.0.1", 29500, flags, "f", SPEC, str(model), digest)
    assert refused(tmp_path, order) == (
        "the model differs between the head and this node. Remedy: copy the same files of the "
        "model to every node."
    )
