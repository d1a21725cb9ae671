"""`holdfast serve`: the resources that the process holds while its application runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from holdfast import hide_keys
from holdfast.api.auth import Keys
from holdfast.application import Application, learned_directory
from holdfast.engine.baseline import baseline_watch
from holdfast.errors import ExitCode
from holdfast.listener.server import bound_socket
from holdfast.processes import signals, tree
from holdfast.processes.environment import NativeVariables
from holdfast.processes.runtime_directory import runtime_directory
from holdfast.settings import Settings
from holdfast.telemetry.logs import configure_logging

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
    # Before any process is started, which would inherit the keys.
    hide_keys.hide_keys(settings)
    with (
        signals.deferred() as has_come,
        bound_socket(settings.listen) as sock,
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
            native_variables=native_variables,
            end_now=end_now,
            baseline=baseline,
        )
        runner.run(application.run(has_come))
    return ExitCode.STOPPED


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's factory; vLLM installs uvloop, and `vllm serve` uses it too."""
    import uvloop  # noqa: PLC0415 - not needed for --help

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
