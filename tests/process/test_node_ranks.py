"""The process that runs the ranks of a follower, as far as it comes without a GPU or a head."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast.errors import ExitCode
from holdfast.nodes import strict_json
from holdfast.nodes.facts import model_digest
from holdfast.nodes.messages import Start
from holdfast.worker.crash_records import Cause, read_causes, refusal, root_of
from node_pairs import SPEC
from stream_features import PARSER_FILE, PARSER_NAME

FLAGS = ("--demo", "--enforce-eager", "--tensor-parallel-size=2")
OF_ANOTHER_GPU = (
    "this node resolves the flags differently from the head. Remedy: use the same GPUs on "
    "every node, and set the same VLLM_* variables."
)
DEADLINE_SECONDS = 240.0


def exit_code(tmp_path: Path, order: Start, variables: Mapping[str, str]) -> int:
    """With what the process of the order ends; its files are in the directory 1."""
    file, directory = tmp_path / "order.json", tmp_path / "1"
    file.write_bytes(strict_json.written(order))
    directory.mkdir()
    command = [sys.executable, "-m", "holdfast.engine.launch.node_ranks"]
    files = [str(file), str(directory), str(tmp_path / "baseline.json")]
    environment = {**os.environ, **variables}
    return subprocess.run(
        [*command, *files], env=environment, timeout=DEADLINE_SECONDS, check=False
    ).returncode


def refused(tmp_path: Path, order: Start) -> str:
    """Why the process does not run the ranks of the order."""
    assert exit_code(tmp_path, order, {}) == ExitCode.USAGE
    return refusal(tmp_path / "1")


def cause_of_failure(tmp_path: Path, variables: Mapping[str, str]) -> Cause:
    """Why a start fails on a node with these variables, as the follower tells the head."""
    order = Start(1, 1, 2, "127.0.0.1", 29500, FLAGS, "of another GPU", SPEC)
    assert exit_code(tmp_path, order, variables) == ExitCode.ENGINE_START
    cause = root_of(read_causes(tmp_path / "1"))
    assert cause is not None
    return cause


def test_flags_that_this_node_resolves_otherwise_are_refused(tmp_path: Path) -> None:
    """Before weights are read: the fingerprint is that of another GPU, or of other variables."""
    order = Start(1, 1, 2, "127.0.0.1", 29500, FLAGS, "of another GPU", SPEC)
    assert refused(tmp_path, order) == OF_ANOTHER_GPU


def test_a_reasoning_parser_of_the_operators_own_is_known_on_each_node(tmp_path: Path) -> None:
    """vLLM looks for it as soon as it makes the configuration, whose fingerprint is compared."""
    plugin = f"--reasoning-parser-plugin={PARSER_FILE}"
    flags = (*FLAGS, plugin, f"--reasoning-parser={PARSER_NAME}")
    order = Start(1, 1, 2, "127.0.0.1", 29500, flags, "of another GPU", SPEC)
    assert refused(tmp_path, order) == OF_ANOTHER_GPU


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


@pytest.mark.parametrize(
    ("file", "variables"),
    [
        ("cache", {"TORCHINDUCTOR_CACHE_DIR": "{}/cache/of-torch"}),  # as vLLM is imported
        ("builds", {}),  # as the start is prepared
    ],
)
def test_a_directory_that_cannot_be_made_fails_the_start(
    tmp_path: Path, file: str, variables: dict[str, str]
) -> None:
    """As on one node: without a record of the exception, the head would see a lost node."""
    (tmp_path / file).touch()
    cause = cause_of_failure(
        tmp_path, {name: value.format(tmp_path) for name, value in variables.items()}
    )
    assert str(tmp_path / file) in cause.error
    assert cause.is_fatal
