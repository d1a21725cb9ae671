"""The head of an engine on several nodes: which nodes may join, and what each is told."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.engine.model.facts import common_fingerprint
from holdfast.engine.model.identity import commit_of, commit_of_snapshot, directory_of
from holdfast.errors import UsageError
from holdfast.labels import NodeRefusalReason
from holdfast.nodes.facts import model_digest, node_facts
from holdfast.nodes.generations import EngineOverNodes, NodeGenerations, node_generations
from holdfast.nodes.handed_flags import handed_out
from holdfast.nodes.head import Head
from holdfast.nodes.listener import NodePort
from holdfast.nodes.remote_ranks import RemoteRanks
from holdfast.settings import Settings
from holdfast.settings.yaml_files import with_file, with_two_token_config


@dataclass(frozen=True, slots=True)
class SharedModel:
    """What all nodes have to load, of a model that they do not make themselves."""

    path: str = ""
    """The directory or file that has to be equal on all nodes; empty for a model of the Hub."""
    revision: str = ""
    """The commit of a model of the Hub, which each node downloads itself."""
    tokenizer_revision: str = ""
    """The commit of its tokenizer; empty if `revision` or the user's own flag is enough."""


@asynccontextmanager
async def head_node(
    settings: Settings,
    config: Any,
    model: str,
    port: NodePort,
    *,
    on_refused: Callable[[NodeRefusalReason], None],
) -> AsyncIterator[NodeGenerations]:
    """Let followers join at the port while entered, for the engine of that VllmConfig.

    `model` is the name or path that the user has given.

    Raises:
        UsageError: the model's files cannot be read, or other nodes cannot load the same.
    """
    # The end of the loop would wait for its own threads, even on a file system that hangs.
    reader = ThreadPoolExecutor(1, thread_name_prefix="shared model")
    loop = asyncio.get_running_loop()
    shared = SharedModel()
    if not settings.is_demo:
        shared = await loop.run_in_executor(reader, shared_model, config, model)
    facts = await loop.run_in_executor(reader, node_facts, shared.path)
    head = Head(
        key=port.key,
        name=settings.nodes.name or platform.node(),
        model=shared.path,
        facts=facts,
        nodes=settings.node_count,
    )
    arguments = with_file(with_two_token_config(settings.vllm_arguments))
    engine = EngineOverNodes(
        nodes=settings.node_count,
        master_address=port.address,
        arguments=handed_out(
            arguments,
            revision=shared.revision,
            tokenizer_revision=shared.tokenizer_revision,
        ),
        fingerprint=common_fingerprint(config),
        revision=shared.revision,
    )
    async with node_generations(
        head, engine, port, on_refused=on_refused, find_digest=partial(model_digest, shared.path)
    ) as generations:
        yield generations


def run_over_nodes(config: Any, remote: RemoteRanks) -> None:
    """Have the ranks of this VllmConfig meet those of other nodes, with the same weights.

    Where vLLM could not resolve the revision, for example since the Hub refused to answer, each
    start would take the newest commit there is (0.32 `resolve_revision`).
    """
    parallel = config.parallel_config
    parallel.master_addr, parallel.master_port = remote.master
    if remote.revision:
        config.model_config.revision = remote.revision


def shared_model(config: Any, model: str) -> SharedModel:
    """Return what other nodes have to load, for the name or path that the user has given.

    Raises:
        UsageError: they cannot load the same.
    """
    revision = _commit(config, model)
    if not revision:
        path = str(config.model_config.model)
        return SharedModel(path=path if Path(path).exists() else "")
    _refuse_another_configuration(config.model_config, model)
    return SharedModel(
        revision=revision, tokenizer_revision=_tokenizer_revision(config.model_config)
    )


def _commit(config: Any, model: str) -> str:
    """Return the commit of a model of the Hub; empty for any other."""
    found = config.model_config.model
    # With HF_HUB_OFFLINE=1, vLLM has put the path of the snapshot in place of the name (0.32).
    if found != model and (commit := commit_of_snapshot(found)):
        return commit
    download_directory = config.load_config.download_dir
    return commit_of(found, directory_of(found, config.model_config.revision, download_directory))


def _tokenizer_revision(model_config: Any) -> str:
    """Return the revision of a tokenizer in another repository, where the model's is unknown.

    vLLM's `--revision` is that of both, unless `--tokenizer-revision` is given (0.32).
    """
    tokenizer, revision = model_config.tokenizer, model_config.tokenizer_revision
    if commit := commit_of_snapshot(tokenizer):
        return commit
    if tokenizer == model_config.model or Path(tokenizer).exists():
        return ""
    return str(getattr(revision, "resolved", revision) or "main")


def _refuse_another_configuration(model_config: Any, model: str) -> None:
    """Refuse a configuration from another repository: `--revision` is that of both (vLLM 0.32)."""
    place = model_config.hf_config_path
    if not place or place in (model, model_config.model) or Path(place).exists():
        return
    raise UsageError(
        f"--hf-config-path {place}: other nodes would look in that repository for the commit of "
        f"{model}.",
        remedy="download the configuration into a directory that is at the same path on every "
        "node, and give its path.",
    )
