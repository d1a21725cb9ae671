"""Patches vLLM in the front end: how it starts, ends and keeps its engine's parts."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
from vllm import envs
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils import system_utils
from vllm.v1 import utils as v1_utils
from vllm.v1.engine import async_llm
from vllm.v1.engine import utils as engine_utils

from holdfast.patches import fits


def spare_front_end(config: Any) -> None:
    """Make vLLM profile only its engine's processes, and not this one.

    vLLM stops the front end's profile in another thread than it started it in, which crashes torch
    with SIGSEGV, and the server with it (seen on 0.32 with torch 2.13, `AsyncLLM.stop_profile`).
    """
    config.profiler_config.ignore_frontend = True


def kill_trees_by(kill_tree: Callable[[int], None]) -> None:
    """Have vLLM's shutdown of an engine kill its processes by `kill_tree`.

    vLLM's own function raises if one of them ends by itself meanwhile, and the rest of the shutdown
    is skipped (`vllm.utils.system_utils.kill_process_tree`, 0.32).
    """
    v1_utils.kill_process_tree = kill_tree


def accept_nulls() -> None:
    """Accept null for `background` and `truncation` in `/v1/responses`, as the request's type does.

    The response's type does not, so a stream would end at its first event, and a complete answer
    would become a 400 (`ResponsesResponse.from_request`, 0.32).
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
    """Return `renderer`, which from now on no AsyncLLM can shut down.

    Each AsyncLLM shuts its renderer down when it ends, and when it is collected after its
    constructor has failed. The next generation and every serving object would be left with dead
    thread pools (0.32, 0.33).
    """
    renderer.shutdown = lambda: None
    return renderer


@contextmanager
def kept_renderer(renderer: Any | None) -> Iterator[None]:
    """While entered, make a new AsyncLLM use `renderer`, so that tokenisation outlives an engine.

    Every serving object of vLLM's OpenAI layer keeps the first renderer. `renderer_from_config` is
    bound in `vllm.v1.engine.async_llm` (0.32, 0.33).
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


def are_forks_safe() -> bool:
    """Whether a forked process can use the device: not on other platforms, nor on WSL."""
    return (current_platform.is_cpu() or current_platform.is_cuda()) and not system_utils.in_wsl()


@contextmanager
def models_inspected_by(
    call: Callable[[Callable[[Connection, bytes], None], bytes], bytes | None],
) -> Iterator[None]:
    """While entered, have vLLM inspect the class of a model in a process that `call` forks.

    vLLM asks a program of its own, which imports torch and vLLM again (`_run_in_subprocess`, 0.32,
    0.33), unless its cache knows the class. If `call` returns None, that program is asked, too: its
    error is the one that vLLM reports.
    """
    if not (are_forks_safe() and fits("patches.front_end.models_inspected_by")):
        yield
        return
    original = registry._run_in_subprocess  # noqa: SLF001 - vLLM has no setting for it

    def in_forked_process(inspect: Callable[[], Any]) -> Any:
        answer = call(_inspect, cloudpickle.dumps(inspect))
        return original(inspect) if answer is None else pickle.loads(answer)  # noqa: S301 - ours

    registry._run_in_subprocess = in_forked_process  # noqa: SLF001 - as above
    try:
        yield
    finally:
        registry._run_in_subprocess = original  # noqa: SLF001 - as above


def _inspect(answer: Connection, inspect: bytes) -> None:
    """Send what vLLM's program would return. Like its output, nothing that is printed is shown."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    load_general_plugins()
    answer.send_bytes(pickle.dumps(pickle.loads(inspect)()))  # noqa: S301 - ours


@contextmanager
def forked_cores(config: Any, forking: Any) -> Iterator[None]:
    """While entered, make vLLM start its EngineCores in the context `forking`, where that is safe.

    vLLM gets its context from `get_mp_context`, which is bound in `vllm.v1.engine.utils` (0.32,
    0.33) and knows only `spawn` and `fork`. NUMA binding wraps the executable, so it needs `spawn`.
    The drivers of other platforms, and of WSL, do not survive a fork.
    """
    is_safe = are_forks_safe() and not config.parallel_config.numa_bind
    if not (is_safe and fits("patches.front_end.forked_cores")):
        yield
        return
    original = engine_utils.get_mp_context

    def forking_context() -> Any:
        original()  # prepares the environment of the processes to come
        return forking

    engine_utils.get_mp_context = forking_context
    try:
        yield
    finally:
        engine_utils.get_mp_context = original


@contextmanager
def variables_read_once() -> Iterator[None]:
    """While entered, vLLM reads each of its variables from the environment only once.

    Its engine's processes always do. Its front end reads one for each token, 6 % of a token's cost
    there (`IterationStats.update_from_output`, 0.32).
    """
    envs.enable_envs_cache()
    try:
        yield
    finally:
        envs.disable_envs_cache()
