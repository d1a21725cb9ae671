"""Digests prompts: small ones at once, those with images in a thread. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from holdfast.engine.requests.request import EngineOutputs, EngineRequest

logger = logging.getLogger("holdfast.engine")

LARGE_BYTES = 1 << 20
"""A larger prompt takes milliseconds, and one with images up to a second."""


class Digests:
    """The digests of the requests of one `ReplayManager`, see `EngineOutputs.digest_of`."""

    def __init__(self, outputs: EngineOutputs) -> None:
        self._outputs = outputs
        self._thread = _one_thread()

    def is_large(self, request: EngineRequest) -> bool:
        """Whether the event loop should not digest it."""
        return self._outputs.size_bytes(request.arguments) > LARGE_BYTES

    def start(self, request: EngineRequest) -> None:
        """Have the thread digest a request; a further call has no effect."""
        if request.digest is None and request.digesting is None:
            request.digesting = self._submitted(request.arguments)

    async def until_known(self, request: EngineRequest) -> str:
        """Return the digest when it is there, without holding up the event loop."""
        self.start(request)
        if request.digesting is not None:
            await asyncio.wrap_future(request.digesting)
        return self.of(request)

    def of(self, request: EngineRequest) -> str:
        """Return the digest; wait for the thread if it has begun."""
        if request.digest is None and request.digesting is not None:
            request.digest = request.digesting.result()
        request.digest = request.digest or self._made(request.arguments)
        return request.digest

    def _submitted(self, arguments: Mapping[str, Any]) -> Future[str]:
        """Give the arguments to the thread; digest them here if the process has no thread left."""
        try:
            return self._thread.submit(self._made, arguments)
        except RuntimeError:
            # The old one keeps what it could not run, and the prompt with it.
            self._thread = _one_thread()
            done = Future[str]()
            done.set_result(self._made(arguments))
            return done

    def _made(self, arguments: Mapping[str, Any]) -> str:
        """Return the digest; one that no other request has if it cannot be made.

        What a client sends must not fail the judgement of a death, which would end the server.
        """
        if self._outputs.is_streamed(arguments):  # of such a prompt there is only an address
            return secrets.token_hex(32)
        try:
            return self._outputs.digest_of(arguments)
        except (RuntimeError, TypeError, ValueError) as error:  # RuntimeError: torch, or recursion
            name = arguments.get("request_id", "")
            logger.warning("request %s has no digest, so its like is not known: %r", name, error)
            return secrets.token_hex(32)


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="holdfast-digests")
