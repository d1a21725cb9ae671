"""vLLM's OpenAI layer, built by vLLM and unchanged, on top of the proxy."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher

from holdfast.engine.client import EngineProxy


@asynccontextmanager
async def openai_app(
    proxy: EngineProxy, arguments: argparse.Namespace, server: Any
) -> AsyncIterator[Any]:
    """vLLM's FastAPI application, with its lifespan entered.

    `server` is the uvicorn server: vLLM's exception handler looks for it in the application's
    state (it would end it, if the proxy ever said that the engine errored).
    """
    tasks = await proxy.get_supported_tasks()
    app = build_app(arguments, tasks, proxy.model_config)
    app.state.server = server
    await init_app_state(proxy, app.state, arguments, tasks)
    async with app.router.lifespan_context(app):
        yield app


@asynccontextmanager
async def certificates_refreshed(
    arguments: argparse.Namespace, ssl_context: Any
) -> AsyncIterator[None]:
    """While entered, a renewed certificate is served without a restart, if the flag asks for it."""
    if not arguments.enable_ssl_refresh or ssl_context is None:
        yield
        return
    refresher = SSLCertRefresher(
        ssl_context=ssl_context,
        key_path=arguments.ssl_keyfile,
        cert_path=arguments.ssl_certfile,
        ca_path=arguments.ssl_ca_certs,
    )
    try:
        yield
    finally:
        refresher.stop()
