"""Which files a model is, without reading its weights, and what it runs on."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import ResolvedRevision

from holdfast.configuration_record import ModelFile
from holdfast.engine.model import identity
from holdfast.engine.model.identity import (
    AdapterFiles,
    ModelFiles,
    commit_of,
    directory_of,
    driver_version,
    model_files,
)

SHA256 = hashlib.sha256(b"weights").hexdigest()
COMMIT = "c" * 40
HANG_SECONDS = 20.0


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of the Hub with one model: a small file, and weights, which are a large one."""
    root = tmp_path / "models--org--name"
    blobs, snapshot = root / "blobs", root / "snapshots" / COMMIT
    for directory in (blobs, snapshot, root / "refs"):
        directory.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for name, blob, content in (
        ("config.json", "a" * 40, b"{}"),
        ("model.safetensors", SHA256, b"other" * 10),
    ):
        (blobs / blob).write_bytes(content)
        (snapshot / name).symlink_to(Path("..", "..", "blobs", blob))
    return tmp_path


@pytest.fixture
def only_tiny_files_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if what is larger than 8 bytes were weights."""
    monkeypatch.setattr(identity, "_MAX_FILE_BYTES", 8)


@pytest.mark.usefixtures("only_tiny_files_are_read")
def test_weights_have_the_hash_that_the_hub_knows(cache: Path) -> None:
    """They are not read: here they have another content. Small files are."""
    directory = directory_of("org/name", None, str(cache))
    assert directory is not None
    assert directory.name == COMMIT
    small = hashlib.sha256(b"{}").hexdigest()
    assert model_files(directory) == (
        ModelFile("config.json", 2, small, "holdfast"),
        ModelFile("model.safetensors", 50, SHA256, "hub"),
    )


@pytest.mark.usefixtures("only_tiny_files_are_read")
def test_large_files_of_a_directory_have_no_hash(tmp_path: Path) -> None:
    """Nor do links whose target is not named by one, and what is not of the model is left out."""
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    (tmp_path / "vocab.txt").symlink_to(tmp_path / "model.safetensors")
    (tmp_path / "README.md").write_text("Hello!")
    (tmp_path / "original").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    assert model_files(tmp_path) == (
        ModelFile("model.safetensors", 100),
        ModelFile("vocab.txt", 100),
    )


def test_only_a_model_of_the_hub_has_a_commit(cache: Path, tmp_path: Path) -> None:
    """Not a directory of the user's, whatever it is called and wherever it is."""
    assert commit_of("org/name", directory_of("org/name", None, str(cache))) == COMMIT
    own = tmp_path / "snapshots" / "mine"
    own.mkdir(parents=True)
    assert commit_of(str(own), directory_of(str(own), None, str(cache))) == ""
    assert commit_of("org/missing", None) == ""


def test_the_commit_is_the_one_that_vllm_has_resolved(cache: Path) -> None:
    """A download by another process moves the branch, but not what the engine loads."""
    (cache / "models--org--name" / "refs" / "main").write_text("f" * 40)
    resolved = ResolvedRevision(COMMIT, None, "org/name")
    assert commit_of("org/name", directory_of("org/name", resolved, str(cache))) == COMMIT


def test_a_model_may_be_one_file(tmp_path: Path) -> None:
    """As with GGUF."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    assert directory_of(str(path), None, None) == path
    assert model_files(path) == (ModelFile("model.gguf", 7, SHA256, "holdfast"),)


def test_not_more_is_read_than_a_start_bears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What exceeds the limit of all files together has no hash."""
    monkeypatch.setattr(identity, "_MAX_TOTAL_BYTES", 10)
    for name in ("a.json", "b.json", "c.json"):
        (tmp_path / name).write_bytes(bytes(6))
    assert [bool(one.sha256) for one in model_files(tmp_path)] == [True, False, False]


@pytest.mark.parametrize("model", ["org/missing", "s3://bucket/model", "not a name/of/the Hub"])
def test_a_model_that_is_nowhere_has_no_files(model: str, tmp_path: Path) -> None:
    """And nothing is asked of the network."""
    assert directory_of(model, None, str(tmp_path)) is None


@pytest.mark.parametrize(
    ("name", "content", "version"),
    [
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\nGCC 13.3",
            "580.95.05",
        ),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 2024\n",
            "535.183.01",
        ),
        ("sys/module/amdgpu/version", "6.10.5\n", "6.10.5"),
        ("proc/driver/nvidia/version", "", ""),
        ("etc/other", "1.2.3", ""),
    ],
)
def test_the_driver_says_its_version(name: str, content: str, version: str, tmp_path: Path) -> None:
    """As its kernel module does, with no library of a vendor."""
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert driver_version(tmp_path) == version


def test_a_file_that_was_written_again_is_another_one(tmp_path: Path) -> None:
    """Also with the same size; what no model consists of does not count."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"0" * 8)
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(tmp_path), revision=None),
        load_config=SimpleNamespace(download_dir=None),
    )
    files = ModelFiles(config)
    assert not asyncio.run(files.have_changed())
    (tmp_path / "notes.log").write_text("x")
    assert not asyncio.run(files.have_changed())
    weights.write_bytes(b"1" * 8)
    os.utime(weights, ns=(0, 1))
    assert asyncio.run(files.have_changed())
    assert not asyncio.run(files.have_changed())


def test_files_that_cannot_be_listed_have_not_changed() -> None:
    """A file system that fails does not end the server."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="x" * 300, revision=None),
        load_config=SimpleNamespace(download_dir=None),
    )
    assert not asyncio.run(ModelFiles(config).have_changed())


@pytest.mark.parametrize(
    "look_at_files",
    [
        ModelFiles(
            SimpleNamespace(
                model_config=SimpleNamespace(model="model", revision=None),
                load_config=SimpleNamespace(download_dir=None),
            )
        ).have_changed,
        partial(AdapterFiles().have_changed, 1, "adapter"),
    ],
    ids=["model", "adapter"],
)
def test_files_that_hang_do_not_keep_the_server_from_ending(
    look_at_files: Callable[[], Awaitable[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a share whose server is away do; the loop would wait for its own threads."""
    hangs, has_ended = threading.Event(), threading.Event()

    def look(*_: object) -> None:
        hangs.wait(HANG_SECONDS)
        has_ended.set()

    monkeypatch.setattr(identity, "directory_of", look)

    async def act() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(look_at_files(), timeout=0.1)

    asyncio.run(act())
    assert not has_ended.is_set()
    hangs.set()


def test_an_adapter_is_found_where_vllm_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory, below the home, or in the cache of the Hub."""
    home, snapshots = tmp_path / "home", tmp_path / "snapshots"
    monkeypatch.setenv("HOME", str(home))
    commit = "first"
    monkeypatch.setattr(
        identity,
        "try_to_load_from_cache",
        lambda name, file, **_: str(snapshots / commit / file) if name == "org/adapter" else None,
    )
    for place in (home / "adapter", snapshots / "first", snapshots / "second"):
        place.mkdir(parents=True)
        (place / "adapter_config.json").write_text("{}")
    files = AdapterFiles()
    for number, path in enumerate((str(home / "adapter"), "~/adapter", "org/adapter", "org/none")):
        assert not asyncio.run(files.have_changed(number, path))
        assert not asyncio.run(files.have_changed(number, path))
    os.utime(home / "adapter" / "adapter_config.json", ns=(0, 1))
    commit = "second"
    assert asyncio.run(files.have_changed(0, str(home / "adapter")))
    assert asyncio.run(files.have_changed(1, "~/adapter"))
    assert asyncio.run(files.have_changed(2, "org/adapter"))
    assert not asyncio.run(files.have_changed(3, "org/none"))


def test_the_files_of_adapters_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    """Each loading has an ID of its own."""
    weights = tmp_path / "adapter.safetensors"
    weights.write_bytes(b"0")
    files = AdapterFiles()
    for number in (1, 2):
        asyncio.run(files.have_changed(number, str(tmp_path)))
    files.forget_all_but({1})
    os.utime(weights, ns=(0, 1))
    assert asyncio.run(files.have_changed(1, str(tmp_path)))
    assert not asyncio.run(files.have_changed(2, str(tmp_path)))
