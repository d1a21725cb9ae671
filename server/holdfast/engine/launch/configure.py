"""Resolves the command line to an engine's configuration and to the launcher that keeps it.

Importing this module imports vLLM, which takes seconds: do it in a thread.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp
from vllm.usage.usage_lib import UsageContext

from holdfast.configuration_record import Configuration
from holdfast.engine import openai_app, unsupported
from holdfast.engine.launch import arguments as vllm_arguments
from holdfast.engine.launch.head_node import head_node
from holdfast.engine.launch.launcher import EngineLauncher
from holdfast.engine.model import identity, model_files
from holdfast.engine.model.facts import fingerprint
from holdfast.engine.requests.sequence_queue import running_at_once
from holdfast.engine.vllm_errors import model_errors, usage_errors
from holdfast.labels import NodeRefusalReason
from holdfast.lifecycle.states import SERVING, State
from holdfast.nodes.generations import NodeGenerations
from holdfast.nodes.listener import NodePort
from holdfast.patches import front_end
from holdfast.patches.log_lines import escape_controls
from holdfast.patches.media_cache import keep_media_in_front_end
from holdfast.patches.tool_calls import Count as CountToolCall
from holdfast.processes import tree
from holdfast.processes.environment import NativeVariables
from holdfast.processes.forked_calls import call_forked
from holdfast.settings import Settings
from holdfast.worker.crash_records import last_logged_exception, shorten_tracebacks

MAX_ANSWERS = 128
"""The largest `n` that OpenAI's API accepts. vLLM accepts 16,384, each a sequence of its own."""


@dataclass(frozen=True, slots=True)
class ConfiguredEngine:
    """What the command line resolved to."""

    launcher: EngineLauncher
    arguments: argparse.Namespace
    config: Any

    def identified(self, configuration: Configuration) -> Configuration:
        """Return the configuration with what the engine runs on, and with the model's files."""
        return identity.identified(configuration, self.config)

    @asynccontextmanager
    async def on_several_nodes(
        self,
        settings: Settings,
        port: NodePort,
        *,
        on_refused: Callable[[NodeRefusalReason], None],
    ) -> AsyncIterator[NodeGenerations]:
        """Have generations run on the followers that join at the port too, while entered."""
        async with head_node(
            settings, self.config, self.arguments.model, port, on_refused=on_refused
        ) as generations:
            self.launcher.nodes = generations
            yield generations

    @asynccontextmanager
    async def openai_app(
        self, server: Any, count_tool_call: CountToolCall
    ) -> AsyncIterator[ASGIApp]:
        """Run vLLM's OpenAI layer in front of whichever engine runs, while entered."""
        async with openai_app.openai_app(
            self.launcher.proxy, self.arguments, server, count_tool_call
        ) as app:
            self.launcher.loras.attach(app.state.openai_serving_models)
            yield app


def configure(
    settings: Settings,
    runtime_directory: Path,
    state: Callable[[], State],
    native_variables: NativeVariables,
    *,
    learned_directory: Path | None = None,
) -> ConfiguredEngine:
    """Resolve the engine that the command line describes.

    Raises:
        UsageError: a flag, a file or the model is wrong.
    """
    unsupported.check_variables(os.environ)
    namespace = vllm_arguments.parse(settings)
    vllm_arguments.configure_logging(namespace)
    escape_controls()
    if settings.listen.log_level != "debug":
        shorten_tracebacks(lambda: state() not in SERVING)
    engine_arguments = vllm_arguments.engine_arguments(namespace)
    with last_logged_exception() as causes, usage_errors(causes):
        with model_errors(namespace.model), front_end.models_inspected_by(call_forked):
            config = engine_arguments.create_engine_config(
                usage_context=UsageContext.OPENAI_API_SERVER
            )
        unsupported.refuse_nodes(
            nodes=config.parallel_config.nnodes,
            replicas=config.parallel_config.data_parallel_size,
            local_replicas=config.parallel_config.data_parallel_size_local,
        )
        model_files.check(namespace, config.model_config)
        front_end.spare_front_end(config)
        front_end.kill_trees_by(tree.kill_tree)
        keep_media_in_front_end()
        running = running_at_once(config)
        os.environ.setdefault("VLLM_MAX_N_SEQUENCES", str(max(MAX_ANSWERS, running)))
        launcher = EngineLauncher(
            config,
            engine_arguments,
            fingerprint=fingerprint(config),
            has_template=namespace.chat_template is not None,
            runtime_directory=runtime_directory,
            is_probing=lambda: state() is State.PROBING,
            stall_timeout_seconds=settings.supervision.stall_timeout_seconds,
            grammar_timeout_seconds=settings.limits.grammar_timeout_seconds,
            continues_streams=settings.supervision.continues_streams,
            native_variables=native_variables,
            learned_directory=learned_directory,
        )
    return ConfiguredEngine(launcher, namespace, config)
