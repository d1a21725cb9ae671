"""vLLM's OpenAI layer, built by vLLM on top of the proxy, with our patches."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from prometheus_fastapi_instrumentator import Instrumentator
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.renderers.chat_utils import load_chat_template

from holdfast.engine.grammars.requests import check_format, check_in_workers
from holdfast.engine.media.limits import guard_media
from holdfast.engine.media.realtime import bound_realtime_audio, report_wrong_events
from holdfast.engine.proxy import EngineProxy
from holdfast.engine.requests.arrivals import safe_request_id
from holdfast.engine.requests.sequence_queue import max_sequences, running_at_once
from holdfast.engine.vllm_errors import usage_errors
from holdfast.engine.worker_adapters import deaths_raised
from holdfast.patches import fits, front_end
from holdfast.patches.adapters import bound_adapter_names
from holdfast.patches.answer_parsing import bound_answer_parsers
from holdfast.patches.beam_search import mark_beam_searches
from holdfast.patches.broken_responses import tell_broken_messages, tell_broken_responses
from holdfast.patches.error_messages import bound_error_messages
from holdfast.patches.harmony import bound_harmony
from holdfast.patches.log_lines import bound_log_lines
from holdfast.patches.media_names import own_media_names
from holdfast.patches.parameters import (
    bound_batches,
    bound_length_penalty,
    bound_parameters,
    bound_request_ids,
    keep_token_texts,
)
from holdfast.patches.pooling import share_rendering
from holdfast.patches.request_bodies import (
    bound_inputs,
    bound_invocations,
    bound_options,
    bound_prompts,
    refuse_wrong_bodies,
    stop_at_first_error,
)
from holdfast.patches.responses import bound_responses
from holdfast.patches.templates import refuse_templates
from holdfast.patches.tokenizer import (
    bound_tokenizer,
    bound_tool_calls,
    score_in_a_thread,
)
from holdfast.patches.tool_calls import Count, count_tool_calls
from holdfast.request_context import FREQUENT_PATHS


@asynccontextmanager
async def openai_app(
    proxy: EngineProxy,
    arguments: argparse.Namespace,
    server: Any,
    count_tool_call: Count,
) -> AsyncIterator[Any]:
    """Run vLLM's FastAPI application while entered, and yield it.

    `server` is the uvicorn server: vLLM's exception handler looks for it in the application's
    state, and would end it if the proxy ever said that the engine errored. `count_tool_call` gets
    each tool call of the model.

    Raises:
        UsageError: a flag, a file or an adapter is wrong.
        EngineLostError: the engine died before it had all adapters of the command line.
    """
    # vLLM answers with this class, whatever FastAPI would rather have it do (0.32, 0.33).
    warnings.filterwarnings("ignore", "ORJSONResponse is deprecated", UserWarning)
    tasks = await proxy.get_supported_tasks()
    front_end.accept_nulls()
    tell_broken_responses()
    tell_broken_messages()
    bound_error_messages()
    bound_log_lines()
    bound_invocations()
    refuse_templates(trusts_templates=arguments.trust_request_chat_template)
    guard_media(arguments.allowed_media_domains)
    bound_realtime_audio()
    report_wrong_events()
    bound_adapter_names()
    bound_tokenizer(proxy.renderer)
    most_sequences = max_sequences(running_at_once(proxy.vllm_config))
    bound_prompts(proxy.renderer, most_sequences)
    bound_inputs(most_sequences)
    bound_options()
    bound_batches(most_sequences)
    bound_parameters()
    bound_request_ids(safe_request_id)
    bound_responses(safe_request_id)
    bound_length_penalty()
    mark_beam_searches()
    keep_token_texts()
    own_media_names()
    bound_tool_calls(proxy.renderer)
    bound_answer_parsers()
    count_tool_calls(count_tool_call)
    score_in_a_thread(most_sequences)
    share_rendering()
    bound_harmony(proxy.renderer, partial(check_format, proxy.grammars))
    if proxy.grammars is not None:
        check_in_workers(proxy.grammars)
    _install_speedups(proxy.renderer, arguments)
    # Flash late interaction keeps queries in the workers between two calls: a document that meets
    # another engine than its query ends it (`LateInteractionRunner`, 0.32, 0.33).
    arguments = argparse.Namespace(**{**vars(arguments), "enable_flash_late_interaction": False})
    # What it finds wrong with a flag or an adapter is a usage error, too.
    with usage_errors():
        with without_instrumentator():
            app = build_app(arguments, tasks, proxy.model_config)
        refuse_wrong_bodies(app)
        stop_at_first_error(app.routes)
        if fits("engine.openai_app.put_frequent_first"):
            put_frequent_first(app.router.routes)
        app.state.server = server
        with deaths_raised():
            await init_app_state(proxy, app.state, arguments, tasks)
    async with app.router.lifespan_context(app):
        yield app


def _install_speedups(renderer: Any, arguments: argparse.Namespace) -> None:
    """Apply the patches that gain speed; their modules import what they replace."""
    if fits("patches.chunks.write_text_directly"):
        from holdfast.patches import chunks  # noqa: PLC0415 - as above

        chunks.write_text_directly()
    if fits("patches.rendering.render_short_prompts_at_once"):
        from holdfast.patches import rendering  # noqa: PLC0415 - as above

        rendering.await_one_without_a_task()
        rendering.render_short_prompts_at_once(
            renderer,
            trusts_templates=arguments.trust_request_chat_template,
            own_template=load_chat_template(arguments.chat_template),
        )


@contextmanager
def without_instrumentator() -> Iterator[None]:
    """Keep an application that is built meanwhile from counting its HTTP requests.

    The front end counts them under the same names, with those that it answers itself. vLLM's counts
    would stay empty: the library (8.1) loses them if the middleware stack is built twice, as
    `refuse_wrong_bodies` has it built.
    """
    instrument = Instrumentator.instrument

    def leave(self: Instrumentator, *_: Any, **_options: Any) -> Instrumentator:
        return self

    Instrumentator.instrument = leave  # type: ignore[method-assign]  # until the application is built
    try:
        yield
    finally:
        Instrumentator.instrument = instrument  # type: ignore[method-assign]  # as above


def put_frequent_first(routes: list[Any]) -> None:
    """Sort the routes that get most requests to the front.

    A request is compared with one route after another. No other route matches the paths of these.
    """
    routes.sort(key=lambda route: getattr(route, "path", "") not in FREQUENT_PATHS)
