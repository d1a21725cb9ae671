"""What is put in place of vLLM's own code in the front end, or changed in what it makes there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm import envs
from vllm.platforms import current_platform
from vllm.utils import system_utils
from vllm.v1 import utils as v1_utils
from vllm.v1.engine import async_llm
from vllm.v1.engine import utils as engine_utils

from holdfast.patches import fits


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
    is_sound = can_fork and not config.parallel_config.numa_bind and not system_utils.in_wsl()
    if not (is_sound and fits("patches.front_end.forked_cores")):
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
