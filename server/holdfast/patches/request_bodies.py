"""Answers 400 to bodies that vLLM's routes fail on, and bounds the work of validating them.

Some of vLLM's checks read a body before its types are validated: `structured_outputs: "none"` in a
chat raises AttributeError (`ChatCompletionRequest.check_structured_outputs_count`), and so does a
list as the body of `/scale_elastic_ep` (0.32). pydantic and FastAPI pass such errors on, as a 500.

vLLM's request types try each message and each item against dozens of types. pydantic collects all
their errors, on the event loop and with the interpreter's lock held (0.32): 200 KB of
`{"messages": [{}, {}, ...]}` block everything for 10 s and take a gigabyte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from types import TracebackType
from typing import Annotated, Any, get_args

from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from pydantic_core import core_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.generate.structured_decisions import serving as decisions
from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMValidationError

from holdfast.patches.patch import original, replace
from holdfast.request_context import current_request

_KINDS = (AttributeError, LookupError, TypeError)
"""What code raises on a value of an unexpected type."""
_PACKAGE = "vllm.entrypoints."
_READERS = ("protocol", "api_router")
"""The modules of vLLM that read bodies: the request types and the routes themselves."""


def refuse_wrong_bodies(app: Any) -> None:
    """Make vLLM's application answer 400 if a value in the body has a type that it cannot read.

    Other errors of the same classes are handled as before.
    """
    for kind in _KINDS:
        app.add_exception_handler(kind, _Handler(app.exception_handlers.get(kind)))
    # SageMaker's part of vLLM's app has built the stack and its handlers; it must be rebuilt.
    app.middleware_stack = None


class _Handler:
    """Handles one class of exception."""

    def __init__(self, otherwise: Any) -> None:
        self._otherwise = otherwise

    async def __call__(self, request: Request, error: Exception) -> Response:
        if _was_raised_by_reader(error.__traceback__):
            refusal = create_error_response(
                "A value in the body has a type that this route does not accept.",
                status_code=HTTPStatus.BAD_REQUEST,
            )
            return JSONResponse(refusal.model_dump(), status_code=HTTPStatus.BAD_REQUEST)
        if self._otherwise is None:
            raise error
        answer: Response = await self._otherwise(request, error)
        return answer


def _was_raised_by_reader(traceback: TracebackType | None) -> bool:
    """Whether code that reads a body raised an error itself, and not something that it called."""
    name = ""
    while traceback is not None:
        name = str(traceback.tb_frame.f_globals.get("__name__", ""))
        traceback = traceback.tb_next
    return name.startswith(_PACKAGE) and name.rpartition(".")[2] in _READERS


MAX_ITEMS = 16 * 1024
"""The longest list of composite items, such as messages, tools and parts of a message."""
_PLAIN = {"int", "float", "str", "bool", "any"}


def stop_at_first_error(routes: Iterable[Any]) -> None:
    """Make validation of lists in bodies stop at the first invalid item, and bound their length.

    Calling it again changes nothing.
    """
    fields = [
        route.body_field
        for route in routes
        if isinstance(route, APIRoute) and route.body_field is not None
    ]
    models = {model for field in fields for model in _models(field.field_info.annotation)}
    with _short_lists():
        for model in sorted(models, key=lambda one: one.__qualname__):
            model.model_rebuild(force=True)
    for field in fields:
        annotation = Annotated[field.field_info.annotation, field.field_info]  # type: ignore[name-defined]  # known only at run time
        field._type_adapter = TypeAdapter(annotation)  # noqa: SLF001 - FastAPI makes it once


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that a type consists of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


@contextmanager
def _short_lists() -> Iterator[None]:
    """While entered, lists in new schemas stop at the first error and have a maximum length."""
    original = core_schema.list_schema

    def list_schema(items_schema: Any = None, **options: Any) -> Any:
        schema = original(items_schema, **options)
        schema.setdefault("fail_fast", True)
        if items_schema is not None and items_schema["type"] not in _PLAIN:
            schema.setdefault("max_length", MAX_ITEMS)
        return schema

    core_schema.list_schema = list_schema
    try:
        yield
    finally:
        core_schema.list_schema = original


def take_prompts(count: int, most: float, what: str = "prompts") -> None:
    """Record how many prompts the present request has.

    Raises:
        VLLMValidationError: they are more than `most`.
    """
    if count > most:
        raise VLLMValidationError(f"The request has {count} {what}; at most {most:g} are allowed.")
    current_request().prompts = max(1, count)


_INPUTS = (
    *("input", "messages", "texts", "images", "inputs", "data_1", "data_2", "documents"),
    *("queries", "items", "text_1", "text_2"),
)
"""Where requests for embeddings, classes and scores have what may be many prompts."""


def bound_inputs(most: float) -> None:
    """Refuse requests of pooling models with more prompts than `most`; again changes nothing.

    vLLM 0.32 makes a job for each of them before it counts them, in the queue of the one thread
    that renders all prompts: minutes for 460,000 inputs of a few bytes.
    """
    as_vllm = original(PoolingBaseServing, "_init_ctx")

    async def init_context(self: Any, io_processor: Any, request: Any, *args: Any) -> Any:
        take_prompts(max(_prompts_in(getattr(request, name, None)) for name in _INPUTS), most)
        return await as_vllm(self, io_processor, request, *args)

    replace(PoolingBaseServing, "_init_ctx", init_context)


def _prompts_in(value: Any) -> int:
    """Return how many prompts a value is: one prompt may be a list of tokens, or of messages."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    if not is_list or isinstance(value[0], int):
        return 0
    is_chat = isinstance(value[0], Mapping) and "role" in value[0]
    return 1 if is_chat else len(value)


def bound_options() -> None:
    """Count the options of a question before vLLM makes them; again changes nothing.

    vLLM 0.32 makes millions for one body of `/v1/systemone` before it refuses more than 26.
    """
    as_vllm = original(decisions, "build_question")

    def build_question(
        qid: str, kind: str, instructions: Any, criteria: Any, most: int, **others: Any
    ) -> Any:
        if isinstance(criteria, list | dict) and len(criteria) > most:
            raise decisions.StructuredDecisionError(
                f"question {qid!r}: at most {most} options for this model"
            )
        return as_vllm(qid, kind, instructions, criteria, most, **others)

    replace(decisions, "build_question", build_question)


_MARK = "holdfast_most_prompts"


def bound_prompts(renderer: Any, most: float) -> None:
    """Make `renderer` refuse requests with more prompts than `most`; again changes nothing.

    Each is rendered separately, and gets all parameters of its request.
    """
    if hasattr(renderer, _MARK):
        return
    setattr(renderer, _MARK, most)
    render = renderer.render_cmpl_async

    async def render_bounded(prompts: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        take_prompts(len(prompts), most)
        return await render(prompts, *arguments, **options)

    renderer.render_cmpl_async = render_bounded
