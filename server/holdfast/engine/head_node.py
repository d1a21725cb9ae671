"""The head of an engine on several nodes: which nodes may join, and what each is told."""

from __future__ import annotations

import asyncio
import copy
import platform
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.engine.facts import fingerprint
from holdfast.engine.identity import commit_of, directory_of
from holdfast.labels import NodeRefusalReason
from holdfast.nodes.facts import model_digest, node_facts
from holdfast.nodes.generations import EngineOverNodes, NodeGenerations, node_generations
from holdfast.nodes.handed_flags import handed_out
from holdfast.nodes.head import Head
from holdfast.nodes.listener import NodePort
from holdfast.nodes.remote_ranks import RemoteRanks
from holdfast.settings import Settings
from holdfast.settings.yaml_files import with_file, with_two_token_config


@asynccontextmanager
async def head_node(
    settings: Settings,
    config: Any,
    port: NodePort,
    *,
    on_refused: Callable[[NodeRefusalReason], None],
) -> AsyncIterator[NodeGenerations]:
    """Let followers join at the port while entered, for the engine of that VllmConfig.

    Raises:
        UsageError: the model's files cannot be read.
    """
    model, revision = await asyncio.to_thread(_shared_model, settings, config)
    facts = await asyncio.to_thread(node_facts, model)
    head = Head(
        key=port.key,
        name=settings.nodes.name or platform.node(),
        model=model,
        facts=facts,
        nodes=settings.node_count,
    )
    arguments = with_file(with_two_token_config(settings.vllm_arguments))
    engine = EngineOverNodes(
        nodes=settings.node_count,
        master_address=port.address,
        arguments=handed_out(arguments, revision=revision),
        fingerprint=fingerprint_at(config, revision),
        revision=revision,
    )
    async with node_generations(
        head, engine, port, on_refused=on_refused, find_digest=partial(model_digest, model)
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


def fingerprint_at(config: Any, revision: str) -> str:
    """Return the fingerprint that this VllmConfig has on a node that is told the commit.

    vLLM hashes the revision as it was given, so the head's own fingerprint, which names the files
    that it has learned, has the branch in it, or nothing. Without a commit, both are the same.
    """
    if not revision:
        return fingerprint(config)
    pinned = copy.copy(config)
    pinned.model_config = copy.copy(config.model_config)
    pinned.model_config.revision = revision
    return fingerprint(pinned)


def _shared_model(settings: Settings, config: Any) -> tuple[str, str]:
    """Return the directory that has to be equal on all nodes, and the commit if it is the Hub's.

    Each node makes the demo model itself, and downloads a model of the Hub itself, at that commit.
    """
    if settings.is_demo:
        return "", ""
    name, revision = config.model_config.model, config.model_config.revision
    directory = directory_of(name, revision, config.load_config.download_dir)
    if commit := commit_of(name, directory):
        return "", commit
    return (str(name), "") if Path(name).exists() else ("", "")
