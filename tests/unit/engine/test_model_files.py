"""Weights that are cut off, missing or never fetched are named, of those that vLLM will read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.engine.model import model_files
from holdfast.errors import UsageError


def shard(path: Path, *, lost_bytes: int = 0) -> Path:
    """A safetensors file with one tensor, whole or cut off."""
    tensor = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "weight": tensor}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(16)
    path.write_bytes(content[: len(content) - lost_bytes])
    return path


def pointer(path: Path) -> Path:
    """What git-lfs leaves where nothing was fetched."""
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 17\n")
    return path


def index(directory: Path, *names: str, kind: str = "model") -> None:
    """An index of shards."""
    content = {"weight_map": dict(enumerate(names))}
    (directory / f"{kind}.safetensors.index.json").write_text(json.dumps(content))


def told(directory: Path, load_format: str = "auto") -> str:
    """Why the weights are refused."""
    with pytest.raises(UsageError) as caught:
        model_files.check_weights(directory, load_format)
    return caught.value.line


@pytest.mark.parametrize("lost_bytes", [1, 16, 40, 10_000])
def test_of_many_shards_the_one_that_is_cut_off_is_named(tmp_path: Path, lost_bytes: int) -> None:
    """In its data, its header, or at its beginning."""
    shard(tmp_path / "model-1.safetensors")
    broken = shard(tmp_path / "model-2.safetensors", lost_bytes=lost_bytes)
    assert str(broken) in told(tmp_path)


@pytest.mark.parametrize("names", [["model-1.safetensors", 3, None, "x"], [["x"], {}], [None, 4]])
def test_an_index_that_names_no_files_is_named(tmp_path: Path, names: list[object]) -> None:
    """Whatever it has in their place."""
    shard(tmp_path / "model-1.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": dict(enumerate(names))}))
    assert str(path) in told(tmp_path)


def test_what_lies_beside_the_weights_does_not_matter(tmp_path: Path) -> None:
    """A model may have been fetched in one of its forms alone."""
    shard(tmp_path / "model-1.safetensors")
    index(tmp_path, "model-1.safetensors")
    pointer(tmp_path / "other.safetensors")
    pointer(tmp_path / "pytorch_model.bin")
    model_files.check_weights(tmp_path, "auto")
    model_files.check_weights(tmp_path, "dummy")


def test_the_consolidated_form_comes_first(tmp_path: Path) -> None:
    """As in vLLM, unless a format is given."""
    shard(tmp_path / "consolidated.safetensors")
    pointer(tmp_path / "model-1.safetensors")
    index(tmp_path, "model-1.safetensors")
    model_files.check_weights(tmp_path, "auto")
    assert "model-1.safetensors is a git-lfs pointer" in told(tmp_path, "safetensors")


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    """The index knows of it."""
    shard(tmp_path / "model-1.safetensors")
    index(tmp_path, "model-1.safetensors", "model-2.safetensors")
    assert f"{tmp_path / 'model-2.safetensors'} is missing" in told(tmp_path)


def test_pointers_to_older_weights_are_named(tmp_path: Path) -> None:
    """Where there are no others."""
    pointer(tmp_path / "pytorch_model.bin")
    assert "git lfs pull" in told(tmp_path)


@pytest.mark.parametrize("content", [b"", b"<html>", b"\x02" + bytes(7) + b"[]", b"\xff" * 64])
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes) -> None:
    """A page of an error that was saved under its name, for one."""
    (tmp_path / "model.safetensors").write_bytes(content)
    assert str(tmp_path / "model.safetensors") in told(tmp_path)


def test_a_directory_that_is_not_there_is_not_ours_to_judge(tmp_path: Path) -> None:
    """Its name may be that of a model of the Hub."""
    model_files.check_weights(tmp_path / "owner" / "name", "auto")
