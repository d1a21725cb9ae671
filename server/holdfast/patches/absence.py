"""What a request of vLLM's application does without the engine, it does without its place there.

A grammar that is tried and a host that is asked for an image may take long, and there may be many
of them: they keep nobody else from the engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError

from holdfast.errors import NotReadyError, OverloadedError
from holdfast.request_context import RequestContext, Session, current_request


@asynccontextmanager
async def away_from_engine() -> AsyncIterator[None]:
    """While entered, others have the place of the running request; it has one again then.

    Raises:
        GracefulHTTPError: there is no place for it, or what it did raised a NotReadyError or an
            OverloadedError; the request may be made again.
    """
    context = current_request()
    with _lifted(context):
        async with context.away():
            yield


@asynccontextmanager
async def called(session: Session) -> AsyncIterator[None]:
    """While entered, a session holds a place for a call.

    Raises:
        GracefulHTTPError: there is none for it.
    """
    with _lifted(current_request()):
        async with session.call():
            yield


@contextmanager
def _lifted(context: RequestContext) -> Iterator[None]:
    try:
        yield
    except (NotReadyError, OverloadedError) as error:
        context.may_be_retried = True
        raise GracefulHTTPError(error.cause, HTTPStatus(error.http_status)) from error
