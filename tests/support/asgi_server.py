"""A real uvicorn server on a free port, in the event loop of the test."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from starlette.types import ASGIApp

from holdfast.api.request_log import RequestLog
from holdfast.remote_server import server_verification
from keep_alive import NO_KEEP_ALIVE

DEADLINE_SECONDS = 60


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    """A client of `app`, within what makes the record of each request; the server ends with it."""
    # As in the real server, where nothing runs outside of it.
    tracking = app if isinstance(app, RequestLog) else RequestLog(app, is_on=False)
    # Named as TCP: asyncio sends answers without a delay of 40 ms only on sockets that say so.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        config = uvicorn.Config(
            tracking,
            interface="asgi3",  # which uvicorn takes no plain function for by itself
            lifespan="on",
            log_config=None,
            ws="websockets-sansio",
            timeout_graceful_shutdown=5,
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        base_url = f"http://127.0.0.1:{port}"
        try:
            async with httpx.AsyncClient(
                base_url=base_url,
                timeout=DEADLINE_SECONDS,
                verify=server_verification(base_url),
                limits=NO_KEEP_ALIVE,
            ) as client:
                yield client
        finally:
            server.should_exit = True
            async with asyncio.timeout(DEADLINE_SECONDS):
                await task
