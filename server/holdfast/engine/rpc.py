"""Asks every worker of an engine for something other than steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from holdfast.engine.vllm_errors import death_errors
from holdfast.errors import EngineRefusedError, EngineSilentError, HoldfastError

CALL_DEADLINE_SECONDS = 60.0


async def call_workers(llm: Any, method: str, **arguments: Any) -> None:
    """Have every worker call one of vLLM's methods; see `worker.rpc`.

    Raises:
        EngineRefusedError: a worker failed. Others may have succeeded.
    """
    answers = await llm.collective_rpc("holdfast_call", args=(method, arguments))
    errors = [answer["error"] for answer in answers if answer["error"]]
    if errors:
        raise EngineRefusedError(errors[0])


@asynccontextmanager
async def asked_to(
    what: str, deadline_seconds: float = CALL_DEADLINE_SECONDS
) -> AsyncIterator[None]:
    """Wrap a call to the engine, which must answer in time.

    Raises:
        EngineSilentError: it did not. EngineRefusedError: it failed. EngineLostError: it is dead.
    """
    try:
        async with asyncio.timeout(deadline_seconds):
            with death_errors():
                yield
    except TimeoutError as error:
        raise EngineSilentError(
            f"the engine did not {what} within {deadline_seconds:.0f} s.",
            remedy="see /statusz: the engine may still do it, or may hang.",
        ) from error
    except HoldfastError as error:
        if type(error) is EngineRefusedError:
            raise EngineRefusedError(f"the engine could not {what}: {error.cause}") from error
        raise
    except Exception as error:  # a failed RPC of vLLM raises plain Exception, not a subclass
        cause = " ".join(str(error).split())[:600]
        raise EngineRefusedError(f"the engine could not {what}: {cause}") from error
