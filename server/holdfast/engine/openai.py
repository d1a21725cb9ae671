"""vLLM's OpenAI layer, built by vLLM, on top of the proxy; only some failures are mended."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app

from holdfast.engine import chunks, compat
from holdfast.engine.client import EngineProxy
from holdfast.engine.rendering import await_one_without_a_task, render_short_prompts_at_once
from holdfast.engine.wrong_bodies import refuse_wrong_bodies

FREQUENT_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"}
)


@asynccontextmanager
async def openai_app(
    proxy: EngineProxy, arguments: argparse.Namespace, server: Any
) -> AsyncIterator[Any]:
    """vLLM's FastAPI application, with its lifespan entered.

    `server` is the uvicorn server: vLLM's exception handler looks for it in the application's
    state (it would end it, if the proxy ever said that the engine errored).
    """
    chunks.write_text_directly()
    tasks = await proxy.get_supported_tasks()
    compat.accept_nulls()
    await_one_without_a_task()
    render_short_prompts_at_once(
        proxy.renderer, trusts_templates=arguments.trust_request_chat_template
    )
    app = build_app(arguments, tasks, proxy.model_config)
    refuse_wrong_bodies(app)
    with_frequent_first(app.router.routes)
    app.state.server = server
    await init_app_state(proxy, app.state, arguments, tasks)
    async with app.router.lifespan_context(app):
        yield app


def with_frequent_first(routes: list[Any]) -> None:
    """Put the routes that are asked for the most before the others.

    A request is compared with one route after the other, and a second time for the label of its
    metrics. Each of these has a path that no other route takes.
    """
    routes.sort(key=lambda route: getattr(route, "path", "") not in FREQUENT_PATHS)
