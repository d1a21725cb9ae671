"""vLLM's command line: parsed by vLLM's own parser, with what Holdfast cannot do refused."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from holdfast import settings as ours
from holdfast.demo.files import demo_directory, ensure_demo_model
from holdfast.engine import compat
from holdfast.errors import UsageError
from holdfast.settings import Settings

DEMO_NAME = "holdfast-demo"
"""What clients call the demo model, whose path says nothing."""


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is Any to us
    """Answers bad usage with our error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}.", remedy="see `holdfast serve --help=all`.")


def parse(settings: Settings) -> argparse.Namespace:
    """What vLLM makes of the command line, with `model`, `log_level` and the fixed flags set.

    The parser is flat, because with sub-commands vLLM drops `flag: false` of a `--config` file.

    Raises:
        UsageError: a flag is unknown or wrong, or asks for what Holdfast cannot do.
    """
    compat.cli_env_setup()
    with compat.usage_errors():
        namespace: argparse.Namespace = _parser().parse_args(list(settings.vllm_arguments))
    _refuse_what_we_cannot(namespace)
    _refuse_abbreviations(namespace, settings)
    namespace.model = _model(namespace, settings)
    if settings.is_demo and namespace.served_model_name is None:
        namespace.served_model_name = [DEMO_NAME]
    namespace.api_server_count = None
    namespace.shutdown_timeout = int(settings.supervision.drain_timeout_seconds)
    with compat.usage_errors():
        compat.validate(namespace)
    return namespace


def engine_arguments(namespace: argparse.Namespace) -> AsyncEngineArgs:
    """The engine's part of the parsed command line."""
    with compat.usage_errors():
        arguments = AsyncEngineArgs.from_cli_args(namespace)
        compat.propagate(namespace, arguments)
    return arguments


def print_help(arguments: Sequence[str]) -> None:
    """Print vLLM's help with our flags in it, for `--help=all`, a group or a keyword."""
    try:
        _parser().parse_args(list(arguments))
    except SystemExit:
        return


def _parser() -> FlexibleArgumentParser:
    parser = _Parser(prog="holdfast serve")
    ours.add_flags(parser)
    return compat.make_arg_parser(parser)


def _refuse_what_we_cannot(namespace: argparse.Namespace) -> None:
    refusals = {
        "--grpc": namespace.grpc,
        "--headless": namespace.headless,
        "--data-parallel-external-lb": namespace.data_parallel_external_lb,
        "--data-parallel-rank": namespace.data_parallel_rank is not None,
        "--data-parallel-hybrid-lb": namespace.data_parallel_hybrid_lb,
        "--data-parallel-start-rank": namespace.data_parallel_start_rank is not None,
        "--data-parallel-multi-port-external-lb": namespace.data_parallel_multi_port_external_lb,
    }
    for flag, is_given in refusals.items():
        if is_given:
            raise UsageError(
                f"{flag} is not supported: one front end owns the HTTP door and the whole engine, "
                "so that its green light can speak for all of it.",
                remedy=f"leave out {flag}, or use `vllm serve` for that layout.",
            )
    if namespace.api_server_count not in {None, 1}:
        raise UsageError(
            f"--api-server-count {namespace.api_server_count} is not supported: "
            "one front end supervises the engine.",
            remedy="leave out --api-server-count.",
        )


def _refuse_abbreviations(namespace: argparse.Namespace, settings: Settings) -> None:
    # vLLM's parser completes `--work` to a flag of ours; ours, which ran first, does not.
    for name, understood in ours.read_groups(namespace, os.environ).items():
        if understood != getattr(settings, name):
            raise UsageError("a flag of Holdfast is abbreviated.", remedy="write it in full.")


def _model(namespace: argparse.Namespace, settings: Settings) -> str:
    named = namespace.model_tag or (
        namespace.model if namespace.model != AsyncEngineArgs.model else None
    )
    if settings.is_demo:
        if named is not None:
            raise UsageError(
                f"--demo serves its own model, but {named!r} was given too.",
                remedy="leave out one of them.",
            )
        return str(ensure_demo_model(demo_directory()))
    if named is None:
        raise UsageError(
            "no model was given.", remedy="name one, for example `holdfast serve --demo`."
        )
    return str(named)
