"""What has to be equal on all nodes, and the line that says what is not."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from holdfast import __version__
from holdfast.errors import UsageError
from holdfast.nodes.facts import (
    FACT_NAMES,
    difference,
    differences,
    model_digest,
    node_facts,
)
from holdfast.nodes.messages import NodeFacts
from node_pairs import FACTS

DRIVER = """\
NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build  (dvs-builder)
GCC version:  gcc version 13.3.0
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory as a model has it."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (directory / "model-1.safetensors").write_bytes(b"12345678")
    (directory / "README.md").write_text("about")
    return directory


def test_equal_nodes_do_not_differ() -> None:
    """So the follower may join."""
    assert difference(FACTS, FACTS, "spark-2") == ""


@pytest.mark.parametrize("name", [field.name for field in fields(NodeFacts)])
def test_each_fact_that_differs_is_one_line_with_a_remedy(name: str) -> None:
    """It names the node."""
    line = difference(FACTS, replace(FACTS, **{name: "other"}), "spark-2")
    assert "spark-2" in line
    assert " Remedy: " in line
    assert "\n" not in line


def test_both_versions_are_in_the_line() -> None:
    """And what is missing is called so."""
    other = replace(FACTS, vllm_version="0.33.0")
    assert "vLLM is 0.32.0 on the head and 0.33.0 on node b." in difference(FACTS, other, "b")
    other = replace(FACTS, driver_version="580.1")
    assert "is missing on the head and 580.1 on node b." in difference(FACTS, other, "b")


def test_builds_of_one_version_may_differ() -> None:
    """Their digests would say nothing to people."""
    other = replace(FACTS, holdfast_digest="12")
    line = difference(FACTS, other, "b")
    assert line.startswith("the code of Holdfast differs between the head and node b. Remedy: ")
    assert "12" not in line


def test_every_difference_is_found() -> None:
    """The first of them is the line, with the same remedy."""
    other = replace(FACTS, torch_version="", model_digest="other")
    found = list(differences(FACTS, other, "b"))
    assert len(found) == 2
    assert " Remedy: ".join(found[0]) == difference(FACTS, other, "b")
    assert list(FACT_NAMES) == [field.name for field in fields(NodeFacts)]


def test_the_facts_of_this_node_are_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From files and package metadata."""
    monkeypatch.setenv("VLLM_PLUGINS", "holdfast")
    driver = tmp_path / "version"
    driver.write_text(DRIVER)
    facts = node_facts(str(model), driver)
    assert facts.holdfast_version == __version__
    assert re.fullmatch("[0-9a-f]{64}", facts.holdfast_digest)
    assert (facts.plugins, facts.driver_version) == ("holdfast", "580.95.05")
    assert facts.model_digest == model_digest(str(model))


def test_a_node_without_a_driver_has_no_version(model: Path, tmp_path: Path) -> None:
    """As on the CPU."""
    assert node_facts(str(model), tmp_path / "missing").driver_version == ""


def test_the_digest_does_not_depend_on_the_path_or_on_other_files(
    model: Path, tmp_path: Path
) -> None:
    """Each node may have the model elsewhere."""
    digest = model_digest(str(model))
    (model / "README.md").write_text("more about")
    assert model_digest(str(model.rename(tmp_path / "moved"))) == digest


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", '{"a": 1}'),
        ("model.safetensors.index.json", "{}"),
        ("model-1.safetensors", "123456789"),
        ("model-2.safetensors", ""),
    ],
)
def test_another_configuration_index_or_size_is_another_digest(
    model: Path, name: str, content: str
) -> None:
    """A shard that is missing too."""
    digest = model_digest(str(model))
    (model / name).write_text(content)
    assert model_digest(str(model)) != digest


def test_a_model_may_be_a_single_file(tmp_path: Path) -> None:
    """As those for llama.cpp are; its size is compared."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"12345678")
    digest = model_digest(str(path))
    assert digest == model_digest(str(path))
    path.write_bytes(b"123456789")
    assert model_digest(str(path)) != digest


def test_a_model_that_is_missing_is_named(tmp_path: Path) -> None:
    """With a remedy."""
    with pytest.raises(UsageError, match="cannot be read: No such file") as error:
        model_digest(str(tmp_path / "none"))
    assert "same path" in error.value.remedy
