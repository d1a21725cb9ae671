"""The ranks of one generation on a follower: vLLM's executor without an EngineCore."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from holdfast.engine.launch import arguments as vllm_arguments
from holdfast.engine.launch import startup
from holdfast.engine.launch.device_memory import wait_for_last_engine
from holdfast.engine.model.facts import common_fingerprint
from holdfast.engine.vllm_errors import usage_errors
from holdfast.errors import EngineStartError, UsageError
from holdfast.nodes import addresses
from holdfast.nodes.facts import model_digest
from holdfast.nodes.messages import Start
from holdfast.processes import environment
from holdfast.worker.crash_records import root_cause


def run(order: Start, directory: Path, baseline: Path) -> None:
    """Run the ranks that `order` describes until one ends, with their files in `directory`.

    `baseline` is a file for `wait_for_last_engine`.

    Raises:
        UsageError: this node resolves the flags otherwise, or its model is another one.
        EngineStartError: a rank did not start.
    """
    startup.prepare(directory, replace(order.spec, stats_directory=str(directory)))
    _require_model(order)
    addresses.prefer(addresses.address_towards(order.master_address), os.environ)
    own = startup.variables(directory)
    # vLLM loads the plug-in that reads them as soon as it makes a configuration.
    with environment.overridden(own):
        config = _config(order)
    _require_equal(order, config)
    wait_for_last_engine(config.parallel_config, baseline)
    with environment.overridden(own):
        executor = _executor(config, directory)
    executor.start_worker_monitor(inline=True)


def _executor(config: Any, directory: Path) -> MultiprocExecutor:
    try:
        return MultiprocExecutor(config, monitor_workers=False)
    except Exception as error:  # vLLM raises no other if a worker ends before it is ready
        cause = root_cause(directory) or error
        raise EngineStartError(f"a rank could not start: {cause}") from error


def _config(order: Start) -> Any:
    namespace = vllm_arguments.parse_ranks(order.arguments)
    namespace.nnodes, namespace.node_rank = order.nodes, order.node_rank
    namespace.master_addr, namespace.master_port = order.master_address, order.master_port
    with usage_errors():
        return vllm_arguments.engine_arguments(namespace).create_engine_config(
            usage_context=UsageContext.OPENAI_API_SERVER, headless=True
        )


def _require_model(order: Start) -> None:
    """Compare the model's files with those of the head: they may have been replaced since joining.

    Raises:
        UsageError: they differ, or cannot be read.
    """
    if model_digest(order.model) != order.model_digest:
        raise UsageError(
            "the model differs between the head and this node",
            remedy="copy the same files of the model to every node.",
        )


def _require_equal(order: Start, config: Any) -> None:
    """Compare everything that the need for workspace depends on with that of the head.

    Raises:
        UsageError: it differs.
    """
    if common_fingerprint(config) != order.fingerprint:
        raise UsageError(
            "this node resolves the flags differently from the head",
            remedy="use the same GPUs on every node, and set the same VLLM_* variables.",
        )
