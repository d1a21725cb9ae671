"""Requests that vLLM's routes fail on though the client is to blame: 400 and not 500.

Some of vLLM's checks read a body before its types are known: `structured_outputs: "none"` in a chat
is an AttributeError (`ChatCompletionRequest.check_structured_outputs_count`), and so is a list as
the body of `/scale_elastic_ep` (0.32). pydantic and FastAPI let these through as failures.
"""

from __future__ import annotations

from http import HTTPStatus
from types import TracebackType
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

_KINDS = (AttributeError, LookupError, TypeError)
"""What code raises that takes a value for one of another type."""
_PACKAGE = "vllm.entrypoints."
_READERS = ("protocol", "api_router")
"""The modules of vLLM that read bodies: the types of requests, and the routes themselves."""


def refuse_wrong_bodies(app: Any) -> None:
    """Have vLLM's application answer 400 where a value of the body is of a type it cannot read.

    Any other failure of the same kind is answered as before.
    """
    for kind in _KINDS:
        app.add_exception_handler(kind, _Handler(app.exception_handlers.get(kind)))
    # SageMaker's part of vLLM's app has built the stack, handlers included; it is built again.
    app.middleware_stack = None


class _Handler:
    """Answers one kind of exception."""

    def __init__(self, otherwise: Any) -> None:
        self._otherwise = otherwise

    async def __call__(self, request: Request, error: Exception) -> Response:
        if _is_of_a_reader(error.__traceback__):
            refusal = create_error_response(
                "A value in the body has a type that this route does not accept.",
                status_code=HTTPStatus.BAD_REQUEST,
            )
            return JSONResponse(refusal.model_dump(), status_code=HTTPStatus.BAD_REQUEST)
        if self._otherwise is None:
            raise error
        answer: Response = await self._otherwise(request, error)
        return answer


def _is_of_a_reader(traceback: TracebackType | None) -> bool:
    """Whether it was raised in code that reads a body, and not below it."""
    name = ""
    while traceback is not None:
        name = str(traceback.tb_frame.f_globals.get("__name__", ""))
        traceback = traceback.tb_next
    return name.startswith(_PACKAGE) and name.rpartition(".")[2] in _READERS
