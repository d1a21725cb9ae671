"""`holdfast serve`: the resources that the process holds while its application runs."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from holdfast import hide_keys
from holdfast.api.auth import Keys
from holdfast.api.usage_files import usage_kept
from holdfast.application import Application
from holdfast.engine.baseline import baseline_watch
from holdfast.errors import ExitCode
from holdfast.listener.own_socket import own_socket
from holdfast.listener.server import bound_socket
from holdfast.nodes import addresses
from holdfast.nodes.credentials import head_credentials
from holdfast.nodes.listener import NodePort, bound_node_port
from holdfast.processes import signals, tree
from holdfast.processes.environment import NativeVariables
from holdfast.processes.runtime_directory import runtime_directory
from holdfast.settings import Settings
from holdfast.telemetry.key_usage import KeyUsage
from holdfast.telemetry.logs import configure_logging
from holdfast.workspace.learned_store import learned_directory

logger = logging.getLogger(__name__)


def serve(settings: Settings) -> ExitCode:
    """Run `holdfast serve` to its end.

    Raises:
        HoldfastError: it cannot continue; nothing is left behind.
    """
    configure_logging(
        settings.listen.log_level, style="json" if settings.logs.format == "json" else "console"
    )
    native_variables = NativeVariables(
        learned_directory(settings.workspace), settings.arguments_without_address
    )
    baseline = baseline_watch(settings.probe)
    keys = Keys.read(settings.listen.api_keys, settings.keys)
    if short := keys.short_names():
        logger.warning("%s: shorter than 16 characters, which is easy to guess", ", ".join(short))
    if access := hide_keys.open_access(settings):
        logger.warning(
            "%s Anyone who can reach this address can use the server. Remedy: %s", *access
        )
    usage = KeyUsage(lambda: keys.api.names)
    # Before any process is started, which would inherit the keys.
    hide_keys.hide_keys(settings.given_keys)
    if settings.node_count > 1:
        # Before signals are deferred, so that one ends the wait, and before clients can connect.
        addresses.wait_for_own_address(settings.master_address)
    with (
        signals.deferred() as has_come,
        bound_socket(settings.listen) as sock,
        own_socket() as own,
        usage_kept(usage, settings.keys.usage_directory),
        _node_port(settings) as node_port,
        runtime_directory() as directory,
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
        tree.owned(directory, native_variables.known),
    ):
        end_now = partial(signals.end_now, directory, settings.listen.uds)
        application = Application(
            settings,
            keys,
            sock,
            directory,
            own=own,
            usage=usage,
            native_variables=native_variables,
            end_now=end_now,
            baseline=baseline,
            node_port=node_port,
        )
        runner.run(application.run(has_come))
    return ExitCode.STOPPED


@contextmanager
def _node_port(settings: Settings) -> Iterator[NodePort | None]:
    """Bind the port for the other nodes, and have vLLM use its address; None on a single node."""
    if settings.node_count == 1:
        yield None
        return
    if settings.has_master_port:
        logger.warning("--master-port has no effect: each generation gets a port of its own")
    credentials = head_credentials(settings.nodes)
    address = addresses.own_address(settings.master_address)
    # Before any process is started, which inherits it.
    addresses.prefer(address, os.environ)
    with bound_node_port(
        address, settings.nodes.port, key=credentials.key, context=credentials.context
    ) as port:
        yield port


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's factory; vLLM installs uvloop, and `vllm serve` uses it too."""
    import uvloop  # noqa: PLC0415 - not needed for --help

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
