"""The tokenizer of the served model: where it is on this machine, if it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.configuration_record import Configuration, ModelFile
from holdfast.verify.records import Server
from holdfast.verify.tokenizer_files import tokenizer_directory

COMMIT, OTHER = "a1" * 20, "b2" * 20


def server(told: Configuration | None = None, model: str = "a-name") -> Server:
    return Server(
        url="http://x",
        model=model,
        models=(model,),
        max_model_len=None,
        owner="",
        vllm="",
        abilities=(),
        routes=(),
        configuration=told,
    )


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache of the Hub, with two commits of one model."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--org--small"
    for commit in (COMMIT, OTHER):
        (model / "snapshots" / commit).mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(OTHER)
    return model / "snapshots"


def test_a_directory_is_found(tmp_path: Path) -> None:
    """The one that Holdfast serves."""
    told = Configuration(model=str(tmp_path))
    assert tokenizer_directory(server(told)) == tmp_path


@pytest.mark.parametrize("model", ["/nowhere/at/all", "models/small", "org/other", "../.."])
def test_what_is_not_here_is_not_found(cached: Path, model: str) -> None:
    """A directory of the server's machine, one below its own, a name that nobody cached."""
    assert cached.is_dir()
    assert tokenizer_directory(server(Configuration(model=model))) is None


def test_a_directory_with_other_files_is_another_models(tmp_path: Path) -> None:
    """It only has the same name on this machine."""
    (tmp_path / "tokenizer.json").write_text("{}")
    for size, found in ((2, tmp_path), (3, None)):
        told = Configuration(model=str(tmp_path), files=(ModelFile("tokenizer.json", size),))
        assert tokenizer_directory(server(told)) == found


@pytest.mark.parametrize(("revision", "commit"), [(COMMIT, COMMIT), ("", OTHER), ("../x", OTHER)])
def test_a_name_of_the_hub_is_found_in_its_cache(cached: Path, revision: str, commit: str) -> None:
    """At the commit that is served; a server that names none serves the newest."""
    told = Configuration(model="org/small", revision=revision)
    assert tokenizer_directory(server(told)) == cached / commit


@pytest.mark.parametrize("flags", [("--tokenizer", "org/small"), ("--tokenizer=org/small",)])
def test_a_tokenizer_of_its_own_is_preferred(
    cached: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """The server was told another one than that of the model."""
    told = Configuration(model=str(tmp_path), flags=flags)
    assert tokenizer_directory(server(told)) == cached / OTHER


def test_another_server_names_its_model(cached: Path) -> None:
    """As `vllm serve` does without `--served-model-name`."""
    assert tokenizer_directory(server(model="org/small")) == cached / OTHER
    assert tokenizer_directory(server(model="gpt")) is None
