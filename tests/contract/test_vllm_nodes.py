"""What the head expects of the configurations of other nodes is what vLLM makes of its flags."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from holdfast.demo.files import ensure_demo_model
from holdfast.engine.facts import fingerprint
from holdfast.engine.head_node import fingerprint_at, run_over_nodes
from holdfast.nodes.remote_ranks import RemoteRanks

COMMIT = "c0ffee" * 6 + "c0ff"


def configuration(model: Path, **flags: Any) -> Any:
    """What vLLM makes of flags."""
    return AsyncEngineArgs(model=str(model), max_model_len=256, **flags).create_engine_config()


@pytest.mark.parametrize("flags", [{}, {"revision": "main"}])
def test_a_node_that_is_told_the_commit_has_the_expected_fingerprint(
    tmp_path: Path, flags: dict[str, str]
) -> None:
    """vLLM hashes the revision, which the head is given as a branch or not at all."""
    model = ensure_demo_model(tmp_path)
    head, follower = configuration(model, **flags), configuration(model, revision=COMMIT)
    before = fingerprint(head)
    assert fingerprint(follower) == fingerprint_at(head, COMMIT) != before
    assert fingerprint_at(head, "") == fingerprint(head) == before


@pytest.mark.parametrize("flags", [{}, {"revision": "main"}])
def test_the_head_loads_the_commit_that_it_has_handed_out(
    tmp_path: Path, flags: dict[str, str]
) -> None:
    """Its ranks would otherwise take what the branch is at their own start."""
    config = configuration(ensure_demo_model(tmp_path), **flags)

    async def run(revision: str) -> None:
        master = ("10.0.0.1", 20001)
        run_over_nodes(config, RemoteRanks(1, master, lambda: None, revision=revision))

    asyncio.run(run(""))
    assert config.model_config.revision == flags.get("revision")
    asyncio.run(run(COMMIT))
    assert config.model_config.revision == COMMIT
    parallel = config.parallel_config
    assert (parallel.master_addr, parallel.master_port) == ("10.0.0.1", 20001)
