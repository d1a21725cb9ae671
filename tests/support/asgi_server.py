"""A real uvicorn server on a free port, in the event loop of the test."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from starlette.types import ASGIApp

from holdfast.api.request_log import RequestLog
from holdfast.remote_server import server_verification
from keep_alive import NO_KEEP_ALIVE

logger = logging.getLogger(__name__)

DEADLINE_SECONDS = 60
_POLL_SECONDS = 0.005


class PromptServer(uvicorn.Server):
    """uvicorn's server, but it ends once it is told to, and once its requests have ended.

    uvicorn looks for either every 0.1 s, which adds up over the servers of all tests.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_told_to_end = asyncio.Event()
        super().__init__(config)

    @property
    def should_exit(self) -> bool:
        """Whether it has been told to end, which a signal or another thread may also do."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._should_exit = value
        if value:
            self._loop.call_soon_threadsafe(self._is_told_to_end.set)

    async def main_loop(self) -> None:
        """Serve until it is told to end."""
        if not await self.on_tick(0):
            await self._is_told_to_end.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as uvicorn does, without its fixed waits."""
        for server in self.servers:
            server.close()
        for sock in sockets or ():
            sock.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                await self._until_no_requests()
        except TimeoutError:
            logger.warning("requests go on beyond the grace of the server: they are cancelled")
            for task in self.server_state.tasks:
                task.cancel()
        await self.lifespan.shutdown()

    async def _until_no_requests(self) -> None:
        state = self.server_state
        while state.connections or state.tasks:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(_POLL_SECONDS)
        for server in self.servers:
            await server.wait_closed()


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
        server = PromptServer(config)
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
