"""What a request of vLLM's application does without the engine, it does without its place there.

A grammar that is tried and a host that is asked for an image may take long, and there may be many
of them: they keep nobody else from the engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError

from holdfast.engine.tracked import tracked_request
from holdfast.errors import NotReadyError, OverloadedError


@asynccontextmanager
async def away_from_engine() -> AsyncIterator[None]:
    """While entered, others have the place of the running request; it has one again then.

    Raises:
        GracefulHTTPError: there is no place for it, or what it did raised a NotReadyError or an
            OverloadedError; the request may be made again.
    """
    tracked = tracked_request()
    try:
        async with tracked.away():
            yield
    except (NotReadyError, OverloadedError) as error:
        tracked.may_be_retried = True
        raise GracefulHTTPError(error.cause, HTTPStatus(error.http_status)) from error
