"""Has an engine request wait for its turn, if earlier ones of its caller gave their capacity back.

A transcription that has its language detected first, one in parts and a response that calls tools
need the engine several times. Others get the capacity in between.
"""

from __future__ import annotations

from holdfast.engine.request import EngineRequest, Losses
from holdfast.errors import NotReadyError, OverloadedError


async def await_turn(request: EngineRequest, losses: Losses) -> None:
    """Return when the caller of a new request has capacity.

    Raises the exception that vLLM's routes expect if there is none in time.
    """
    try:
        await request.context.regain_capacity()
    except (NotReadyError, OverloadedError) as error:
        may_be_retried = error.may_be_retried
        raise losses.uncounted(
            request, error, error.openai_type, may_be_retried=may_be_retried
        ) from error
