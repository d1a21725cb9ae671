"""What the head expects of the configurations of other nodes is what vLLM makes of its flags."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from huggingface_hub import ResolvedRevision
from vllm.engine.arg_utils import AsyncEngineArgs

from holdfast.demo.files import ensure_demo_model
from holdfast.engine.launch import head_node as module
from holdfast.engine.launch.head_node import (
    SharedModel,
    head_node,
    run_over_nodes,
    shared_model,
)
from holdfast.engine.model.facts import common_fingerprint, fingerprint
from holdfast.errors import UsageError
from holdfast.nodes.listener import NodePort
from holdfast.nodes.remote_ranks import RemoteRanks
from holdfast.settings import Settings

COMMIT = "c0ffee" * 6 + "c0ff"
OTHER_COMMIT = "decaf0" * 6 + "deca"
NAME, OTHER_NAME = "org/name", "org/other"
HANG_SECONDS = 20.0
NGRAMS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model."""
    return ensure_demo_model(tmp_path_factory.mktemp("models"))


def configuration(model: object, **flags: Any) -> Any:
    """What vLLM makes of flags."""
    return AsyncEngineArgs(model=str(model), max_model_len=256, **flags).create_engine_config()


@pytest.fixture
def offline(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, dict[str, str]], None]:
    """Makes the home of a user, with commits of repositories in its cache, and HF_HUB_OFFLINE=1."""

    def use(home: str, commits: dict[str, str]) -> None:
        cache = tmp_path / home
        for name, commit in commits.items():
            repository = cache / f"models--{name.replace('/', '--')}"
            shutil.copytree(demo, repository / "snapshots" / commit)
            (repository / "refs").mkdir()
            (repository / "refs" / "main").write_text(commit)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    return use


@pytest.mark.parametrize("flags", [{}, {"revision": "main"}])
@pytest.mark.parametrize("also", [{}, {"speculative_config": NGRAMS}])
def test_a_node_that_is_told_the_commit_has_the_expected_fingerprint(
    demo: Path, flags: dict[str, Any], also: dict[str, Any]
) -> None:
    """vLLM hashes the revision, which the head is given as a branch or not at all."""
    head, follower = (
        configuration(demo, **flags, **also),
        configuration(demo, revision=COMMIT, **also),
    )
    before = fingerprint(head)
    assert common_fingerprint(follower) == common_fingerprint(head) != before
    assert fingerprint(head) == before != fingerprint(follower)


def test_a_node_that_resolves_the_flags_otherwise_has_another_fingerprint(demo: Path) -> None:
    """What differs between nodes by intention is left out, and nothing else."""
    assert common_fingerprint(configuration(demo)) != common_fingerprint(
        configuration(demo, max_num_seqs=3)
    )


def test_a_node_in_the_image_shares_the_fingerprint_of_one_outside_it(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether vLLM reports its usage, and as what, changes no workspace."""
    outside = common_fingerprint(configuration(demo))
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setenv("VLLM_USAGE_SOURCE", "production-docker-image")
    monkeypatch.setenv("VLLM_USAGE_STATS_SERVER", "https://stats.example")
    assert common_fingerprint(configuration(demo)) == outside


def test_without_the_hub_nodes_with_other_homes_share_a_model_of_it(
    offline: Callable[[str, dict[str, str]], None],
) -> None:
    """vLLM takes the path of the snapshot for the name, which is below the home of the user."""
    offline("head", {NAME: COMMIT})
    head = configuration(NAME)
    assert shared_model(head, NAME) == SharedModel(revision=COMMIT, tokenizer_revision=COMMIT)
    offline("follower", {NAME: COMMIT})
    follower = configuration(NAME, revision=COMMIT, tokenizer_revision=COMMIT)
    assert head.model_config.model != follower.model_config.model
    assert common_fingerprint(follower) == common_fingerprint(head)


def test_without_the_hub_each_repository_has_its_own_commit(
    offline: Callable[[str, dict[str, str]], None],
) -> None:
    """That of the model is unknown in the repository of the tokenizer."""
    offline("head", {NAME: COMMIT, OTHER_NAME: OTHER_COMMIT})
    shared = shared_model(configuration(NAME, tokenizer=OTHER_NAME), NAME)
    assert shared == SharedModel(revision=COMMIT, tokenizer_revision=OTHER_COMMIT)


def test_the_path_of_a_snapshot_is_a_directory_if_the_user_names_it(
    offline: Callable[[str, dict[str, str]], None],
) -> None:
    """Followers are told that path, so it has to be the same there."""
    offline("head", {NAME: COMMIT})
    path = configuration(NAME).model_config.model
    assert shared_model(configuration(path), path) == SharedModel(path=path)


@pytest.fixture
def from_the_hub(demo: Path, offline: Callable[[str, dict[str, str]], None]) -> Callable[..., Any]:
    """Returns a configuration as if vLLM had found out at the Hub what the branch is."""
    offline("head", {NAME: COMMIT, OTHER_NAME: OTHER_COMMIT})

    def configured(**changes: Any) -> Any:
        config = configuration(demo)
        model = config.model_config
        model.model = model.tokenizer = NAME
        model.revision = model.tokenizer_revision = ResolvedRevision(COMMIT, None, NAME)
        for name, value in changes.items():
            setattr(model, name, value)
        return config

    return configured


@pytest.mark.parametrize(
    ("changes", "revision"),
    [
        ({}, ""),
        ({"tokenizer_revision": "v1"}, ""),
        (
            {
                "tokenizer": OTHER_NAME,
                "tokenizer_revision": ResolvedRevision(OTHER_COMMIT, None, OTHER_NAME),
            },
            OTHER_COMMIT,
        ),
        ({"tokenizer": OTHER_NAME, "tokenizer_revision": "v1"}, "v1"),
        ({"tokenizer": OTHER_NAME, "tokenizer_revision": None}, "main"),
        ({"tokenizer": "/", "tokenizer_revision": None}, ""),
    ],
)
def test_a_tokenizer_of_another_repository_has_the_revision_of_the_head(
    from_the_hub: Callable[..., Any], changes: dict[str, Any], revision: str
) -> None:
    """Each node would otherwise look there for the commit of the model."""
    shared = shared_model(from_the_hub(**changes), NAME)
    assert shared == SharedModel(revision=COMMIT, tokenizer_revision=revision)


def test_a_configuration_of_another_repository_is_refused(
    from_the_hub: Callable[..., Any],
) -> None:
    """vLLM has no flag for its revision, and takes that of the model."""
    with pytest.raises(UsageError, match=f"--hf-config-path {OTHER_NAME}"):
        shared_model(from_the_hub(hf_config_path=OTHER_NAME), NAME)
    for own in (NAME, "/"):
        shared = shared_model(from_the_hub(hf_config_path=own), NAME)
        assert shared == SharedModel(revision=COMMIT)


@pytest.mark.parametrize("hanging", ["shared_model", "node_facts"])
def test_a_model_that_hangs_does_not_keep_a_new_head_from_ending(
    hanging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one on a share whose server is away does; the loop would wait for its own threads."""
    hangs, has_ended = threading.Event(), threading.Event()

    def look(*_: object) -> None:
        hangs.wait(HANG_SECONDS)
        has_ended.set()

    monkeypatch.setattr(module, "shared_model", lambda *_: SharedModel())
    monkeypatch.setattr(module, hanging, look)

    async def act(port: NodePort) -> None:
        with pytest.raises(TimeoutError):
            async with (
                asyncio.timeout(0.1),
                head_node(Settings(), None, NAME, port, on_refused=lambda _: None),
            ):
                pass

    with socket.create_server(("127.0.0.1", 0)) as sock:
        asyncio.run(act(NodePort(sock, "127.0.0.1", b"key", None)))
    assert not has_ended.is_set()
    hangs.set()


@pytest.mark.parametrize("flags", [{}, {"revision": "main"}])
def test_the_head_loads_the_commit_that_it_has_handed_out(
    demo: Path, flags: dict[str, str]
) -> None:
    """Its ranks would otherwise take what the branch is at their own start."""
    config = configuration(demo, **flags)

    async def run(revision: str) -> None:
        master = ("10.0.0.1", 20001)
        run_over_nodes(config, RemoteRanks(1, master, lambda: None, revision=revision))

    asyncio.run(run(""))
    assert config.model_config.revision == flags.get("revision")
    asyncio.run(run(COMMIT))
    assert config.model_config.revision == COMMIT
    parallel = config.parallel_config
    assert (parallel.master_addr, parallel.master_port) == ("10.0.0.1", 20001)
