"""What differs between vLLM 0.32 and 0.33, and what is read or set in vLLM's own objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import vllm.logger as vllm_logger
from vllm.entrypoints.serve.utils import api_utils
from vllm.v1.engine.exceptions import EngineDeadError

from holdfast.processes.deaths import Core

try:
    from vllm.entrypoints.launchers import cli_args
except ImportError:  # moved in 0.33 without a shim (seen in the 0.33.0 wheel)
    from vllm.entrypoints.common import cli_args

propagate: Callable[[Any, Any], None] = cli_args.propagate_flash_late_interaction


def make_arg_parser(parser: Any) -> Any:
    """Add vLLM's flags to `parser`; `--log-level` takes lower case too, as uvicorn's does."""
    parser = cli_args.make_arg_parser(parser)
    for action in parser._actions:  # noqa: SLF001 - argparse has no look-up by flag
        if "--log-level" in action.option_strings:
            action.type = str.upper
    return parser


def cli_env_setup() -> None:
    """Let vLLM choose the start method of its processes."""
    if hasattr(api_utils, "cli_env_setup"):
        api_utils.cli_env_setup()
    else:  # moved in 0.33
        from vllm.entrypoints.common import startup  # noqa: PLC0415

        startup.cli_env_setup()


def configure_logging(namespace: Any) -> None:
    """Give vLLM's loggers the requested level, here and in its processes."""
    if hasattr(vllm_logger, "configure_logging_from_args"):
        vllm_logger.configure_logging_from_args(namespace)


def validate(namespace: Any) -> None:
    """Run vLLM's own checks of its parsed flags and of the parsers they name."""
    cli_args.validate_parsed_serve_args(namespace)
    if hasattr(cli_args, "validate_api_server_args"):
        cli_args.validate_api_server_args(namespace)
    else:  # moved to cli_args in 0.33
        from vllm.entrypoints.launchers import launcher  # noqa: PLC0415

        launcher.validate_api_server_args(namespace)


def requests_by_engine(llm: Any) -> dict[int, int]:
    """Count the requests in each engine of a data-parallel group; empty where there is one.

    The client that balances between engines keeps the identity of each request's engine: its index
    as two little-endian bytes (`DPLBAsyncMPClient`, 0.32, 0.33).
    """
    by_request = getattr(llm.engine_core, "reqs_in_flight", {})
    return dict(Counter(int.from_bytes(identity, "little") for identity in by_request.values()))


def declare_dead(llm: Any) -> None:
    """Make every call that `llm` still has raise EngineDeadError now, and every later one.

    A stopped core reports nothing, and `AsyncLLM.shutdown` cancels the task that would pass a death
    on: without this, calls wait for ever (0.32, 0.33).
    """
    llm.engine_core.resources.engine_dead = True
    llm.output_processor.propagate_error(EngineDeadError())


def limit_context(llm: Any, first_model: Any, tokens: int) -> None:
    """Set the `max_model_len` that vLLM's front end validates requests against.

    It is read at each request: by the serving objects, which have the model configuration of the
    engine that they were built with (`first_model`), by the renderer, which outlives its own, and
    by the input processor of each engine (0.32, 0.33).
    """
    readers = (llm, llm.renderer, llm.input_processor)
    for model in (first_model, *(reader.model_config for reader in readers)):
        model.max_model_len = tokens


def core_processes(llm: Any) -> dict[int, Core]:
    """Return the processes that the front end started for an AsyncLLM, by pid; none of Ray's.

    Their exit codes are read where vLLM's own monitor leaves them: a second query for the exit code
    of a fork server's child returns 255 (CPython 3.11, `popen_forkserver.Popen.poll`).
    """
    resources = llm.engine_core.resources
    found = list(getattr(resources.engine_manager, "processes", ()))
    if resources.coordinator is not None:
        found.append(resources.coordinator.proc)
    return {p.pid: Core(p.name, partial(getattr, p._popen, "returncode")) for p in found}  # noqa: SLF001 - see above
