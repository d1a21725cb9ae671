"""A request on whose grammar the engine compiles for too long is given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError

LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class CompileLimit:
    """How long the engine may compile a grammar."""

    timeout_seconds: float
    deferring_seconds: Callable[[], float]
    """For how long nothing but what is deferred has been in the engine."""


async def within_limit(outputs: Any, limit: CompileLimit) -> AsyncIterator[Any]:
    """The outputs of a call whose request has a grammar.

    Raises:
        VLLMValidationError: the engine has compiled it for too long; the call is ended there, too.
    """
    async with aclosing(outputs):
        try:
            async with asyncio.timeout(None) as timer:
                with _looking(timer, limit):
                    first = await anext(outputs, None)
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise VLLMValidationError(
                "The grammar of the request is refused: the engine takes longer than "
                f"{limit.timeout_seconds:g} s to compile it."
            ) from error
        if first is not None:
            yield first
        async for output in outputs:
            yield output


@contextmanager
def _looking(timer: asyncio.Timeout, limit: CompileLimit) -> Iterator[None]:
    """End the timer when the engine has had this request, and nothing that runs, for too long."""
    loop = asyncio.get_running_loop()
    began_seconds = loop.time()

    async def look() -> None:
        waited_seconds = 0.0
        while waited_seconds <= limit.timeout_seconds:
            await asyncio.sleep(LOOK_SECONDS)
            waited_seconds = min(limit.deferring_seconds(), loop.time() - began_seconds)
        timer.reschedule(loop.time())

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
