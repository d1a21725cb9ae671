"""What differs between vLLM 0.32 and 0.33, and the one place where vLLM's errors become ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import vllm.logger as vllm_logger
from vllm import envs
from vllm.entrypoints.serve.utils import api_utils
from vllm.exceptions import VLLMError
from vllm.platforms import current_platform
from vllm.utils import system_utils
from vllm.v1 import utils as v1_utils
from vllm.v1.engine import async_llm
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from holdfast.engine import vllm_words
from holdfast.engine.deaths import Core
from holdfast.engine.exit_codes import OUT_OF_MEMORY
from holdfast.errors import EngineLostError, EngineStartError, HoldfastError, UsageError

try:
    from vllm.entrypoints.launchers import cli_args
except ImportError:  # moved in 0.33 without a shim (seen in the 0.33.0 wheel)
    from vllm.entrypoints.common import cli_args

_CORRECT = "correct what the message names, or see the engine's log above."
_MORE_MEMORY = (
    "see the kernel's log; give the engine more memory, or serve a smaller model, context or KV "
    "cache."
)

propagate: Callable[[Any, Any], None] = cli_args.propagate_flash_late_interaction


def make_arg_parser(parser: Any) -> Any:
    """All of vLLM's flags on `parser`; `--log-level` takes lower case too, as uvicorn's does."""
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
    """Give vLLM's loggers the level that was asked for, here and in its processes."""
    if hasattr(vllm_logger, "configure_logging_from_args"):
        vllm_logger.configure_logging_from_args(namespace)


def spare_front_end(config: Any) -> None:
    """Have the profiler leave this process alone, and take the engine's.

    vLLM ends the front end's own profile in another thread than it began it in, and torch answers
    with SIGSEGV, which ends the server with every request in it (seen on 0.32 with torch 2.13,
    `AsyncLLM.stop_profile`).
    """
    config.profiler_config.ignore_frontend = True


def kill_trees_by(kill_tree: Callable[[int], None]) -> None:
    """Have vLLM's shutdown of an engine kill its processes by `kill_tree`.

    vLLM's own raises where one of them ends by itself meanwhile, and leaves the rest of the
    shutdown undone (`vllm.utils.system_utils.kill_process_tree`, 0.32).
    """
    v1_utils.kill_process_tree = kill_tree


def validate(namespace: Any) -> None:
    """vLLM's own checks of its parsed flags and of the parsers they name."""
    cli_args.validate_parsed_serve_args(namespace)
    if hasattr(cli_args, "validate_api_server_args"):
        cli_args.validate_api_server_args(namespace)
    else:  # moved to cli_args in 0.33
        from vllm.entrypoints.launchers import launcher  # noqa: PLC0415

        launcher.validate_api_server_args(namespace)


def accept_nulls() -> None:
    """Let `background` and `truncation` of a request to `/v1/responses` be null, as its type says.

    The type of the answer takes none, so that a stream broke off at its first event, and an answer
    that was made already was a 400 (`ResponsesResponse.from_request`, 0.32).
    """
    from vllm.entrypoints.openai.responses import protocol  # noqa: PLC0415 - for the front end only

    original = protocol.ResponsesResponse.from_request.__func__

    def from_request(cls: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("background", "truncation"):
            if getattr(request, name) is None:
                setattr(request, name, type(request).model_fields[name].default)
        return original(cls, request, *args, **kwargs)

    protocol.ResponsesResponse.from_request = classmethod(from_request)


@contextmanager
def usage_errors(logged: Callable[[], str] = str) -> Iterator[None]:
    """Map what vLLM raises for flags, files and models that it cannot use to UsageError.

    `logged` says what it has logged as an exception before, to which it may point.

    vLLM raises VLLMError for some, and else TypeError, ValueError (also pydantic's
    ValidationError), KeyError, OSError (from Hugging Face look-ups), ImportError (an optional
    package) and NotImplementedError, and its parser ends the process.
    """
    try:
        yield
    except HoldfastError:
        raise
    except SystemExit as error:
        raise UsageError(
            "vLLM's parser refused the command line.", remedy="see `holdfast serve --help=all`."
        ) from error
    except (
        TypeError,
        ValueError,
        KeyError,
        OSError,
        ImportError,
        NotImplementedError,
        AssertionError,
        RuntimeError,
        VLLMError,
    ) as error:
        cause, said = vllm_words.first_lines(error), logged()
        raise UsageError(
            f"{cause} ({said})" if said and said not in cause else cause,
            remedy="correct the model or the flag that the message names.",
        ) from error


@contextmanager
def start_errors(cause: Callable[[], str]) -> Iterator[None]:
    """Map a failed start to EngineStartError; `cause` says what the engine's processes left behind.

    vLLM's own message is "Engine core initialization failed. See root cause above", and names at
    most the exit codes of cores.
    """
    try:
        yield
    except HoldfastError:
        raise
    except (
        RuntimeError,
        ValueError,
        OSError,  # TimeoutError, too
        AssertionError,
        TypeError,
        KeyError,
        VLLMError,
        EngineDeadError,
    ) as error:
        found = cause() or vllm_words.killed_cores(error) or vllm_words.first_lines(error)
        is_killed = found.endswith(OUT_OF_MEMORY)
        raise EngineStartError(
            f"the engine could not start: {found}", remedy=_MORE_MEMORY if is_killed else _CORRECT
        ) from error


@contextmanager
def death_errors() -> Iterator[None]:
    """Map vLLM's EngineDeadError, which carries no cause, to EngineLostError."""
    try:
        yield
    except EngineDeadError as error:
        raise EngineLostError("the engine died during a call to it") from error


def requests_by_engine(llm: Any) -> dict[int, int]:
    """How many requests each engine of a data-parallel group has; empty where there is one.

    The client that balances between engines keeps the identity of each request's engine: its index
    as two little-endian bytes (`DPLBAsyncMPClient`, 0.32, 0.33).
    """
    by_request = getattr(llm.engine_core, "reqs_in_flight", {})
    return dict(Counter(int.from_bytes(identity, "little") for identity in by_request.values()))


def declare_dead(llm: Any) -> None:
    """Have every call that `llm` still has raise EngineDeadError now, and every later one.

    A stopped core says nothing, and `AsyncLLM.shutdown` cancels the task that would pass a death
    on: without this, calls wait for ever (0.32, 0.33).
    """
    llm.engine_core.resources.engine_dead = True
    llm.output_processor.propagate_error(EngineDeadError())


@contextmanager
def refusal_errors() -> Iterator[None]:
    """Map what vLLM raises for a request that it does not take to EngineLostError."""
    try:
        yield
    except (
        ValueError,
        TypeError,
        RuntimeError,
        LookupError,
        NotImplementedError,
        EngineGenerateError,
    ) as error:
        raise EngineLostError(f"the engine did not accept a request: {error}") from error


def limit_context(llm: Any, first_model: Any, tokens: int) -> None:
    """Set the `max_model_len` that vLLM's front end validates requests against.

    It is read at each request: by the serving objects, which have the model configuration of the
    engine that they were built with (`first_model`), by the renderer, which outlives its own, and
    by the input processor of each engine (0.32, 0.33).
    """
    readers = (llm, llm.renderer, llm.input_processor)
    for model in (first_model, *(reader.model_config for reader in readers)):
        model.max_model_len = tokens


def lasting(renderer: Any) -> Any:
    """A renderer that no AsyncLLM shuts down.

    Each does when it ends, and when it is collected after its constructor has failed; the next
    generation and every serving object would hold dead thread pools (0.32, 0.33).
    """
    renderer.shutdown = lambda: None
    return renderer


@contextmanager
def kept_renderer(renderer: Any | None) -> Iterator[None]:
    """Make the next AsyncLLM use `renderer`, so that tokenisation outlives an engine.

    `AsyncLLM.shutdown` closes the renderer's thread pools; every serving object of vLLM's OpenAI
    layer holds on to the first one. The name is bound in `vllm.v1.engine.async_llm` (0.32, 0.33).
    """
    if renderer is None:
        yield
        return
    original = async_llm.renderer_from_config
    async_llm.renderer_from_config = lambda _config: renderer
    try:
        yield
    finally:
        async_llm.renderer_from_config = original


@contextmanager
def forked_cores(config: Any, forking: Any) -> Iterator[None]:
    """Have vLLM start its EngineCores in the context `forking`, where that is sound.

    It asks for one by `get_mp_context`, which is bound in `vllm.v1.engine.utils` (0.32, 0.33) and
    knows only `spawn` and `fork`. NUMA binding puts a wrapper before the executable, so it needs
    `spawn`; the drivers of other platforms, and WSL's, do not bear a fork.
    """
    can_fork = current_platform.is_cpu() or current_platform.is_cuda()
    if config.parallel_config.numa_bind or not can_fork or system_utils.in_wsl():
        yield
        return
    original = engine_utils.get_mp_context

    def forking_context() -> Any:
        original()  # prepares the environment of what is started
        return forking

    engine_utils.get_mp_context = forking_context
    try:
        yield
    finally:
        engine_utils.get_mp_context = original


@contextmanager
def variables_read_once() -> Iterator[None]:
    """While entered, vLLM takes each of its variables from the environment once.

    Its engine's processes do so from their start on; its front end reads one for each token, which
    is 6 % of what a token costs there (`IterationStats.update_from_output`, 0.32).
    """
    envs.enable_envs_cache()
    try:
        yield
    finally:
        envs.disable_envs_cache()


def core_processes(llm: Any) -> dict[int, Core]:
    """The processes that the front end started for an AsyncLLM, by pid; none of Ray's.

    Their exit codes are read where vLLM's own monitor leaves them: whoever asks a second time for
    that of a child of a fork server gets 255 (CPython 3.11, `popen_forkserver.Popen.poll`).
    """
    resources = llm.engine_core.resources
    found = list(getattr(resources.engine_manager, "processes", ()))
    if resources.coordinator is not None:
        found.append(resources.coordinator.proc)
    return {p.pid: Core(p.name, partial(getattr, p._popen, "returncode")) for p in found}  # noqa: SLF001 - see above
