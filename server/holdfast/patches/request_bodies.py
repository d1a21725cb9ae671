"""Answers 400 to bodies that vLLM's routes fail on, and bounds the work of validating them.

Some of vLLM's checks read a body before its types are validated: `structured_outputs: "none"` in a
chat raises AttributeError (`ChatCompletionRequest.check_structured_outputs_count`), and so does a
list as the body of `/scale_elastic_ep` (0.32). pydantic and FastAPI pass such errors on, as a 500.

vLLM's request types try each message and each item against dozens of types. pydantic collects all
their errors, on the event loop and with the interpreter's lock held (0.32): 200 KB of
`{"messages": [{}, {}, ...]}` block everything for 10 s and take a gigabyte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from types import SimpleNamespace, TracebackType
from typing import Any, get_args

from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from pydantic_core import CoreConfig, SchemaValidator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.generate.structured_decisions import serving as decisions
from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.sagemaker import api_router as sagemaker
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
_PLAIN = ("int", "float", "str", "bool", "any")
_UNIONS = ("union", "tagged-union")
_COLLECTIONS = ("list", "set", "frozenset", "tuple", "dict")
_DATA = ("metadata", "default", "expected", "serialization")
"""What a schema has that is not made of schemas, or not for validation."""


def stop_at_first_error(routes: Iterable[Any]) -> None:
    """Make validation of collections in bodies stop at the first invalid item; bound long lists.

    vLLM also makes bodies of some routes from those of others. Calling it again changes nothing.
    """
    for route in routes:
        if isinstance(route, APIRoute) and route.body_field is not None:
            adapter = route.body_field._type_adapter  # noqa: SLF001 - FastAPI makes it once
            bound_adapter(adapter)
            for model in _models(adapter._type):  # noqa: SLF001 - there is no other way in
                model.__pydantic_validator__ = _validator(
                    model.__pydantic_core_schema__, [model], title=model.__name__
                )


def bound_invocations() -> None:
    """Make `/invocations` of an application that is built afterwards read bodies so, too.

    vLLM 0.32 hides the validators of all request types in that route. Idempotent.
    """
    as_vllm = original(sagemaker, "pydantic")

    def adapter(kind: Any) -> TypeAdapter[Any]:
        made: TypeAdapter[Any] = as_vllm.TypeAdapter(kind)
        bound_adapter(made)
        return made

    ours = SimpleNamespace(TypeAdapter=adapter, ValidationError=as_vllm.ValidationError)
    replace(sagemaker, "pydantic", ours)


def bound_adapter(adapter: TypeAdapter[Any]) -> None:
    """Give an adapter a validator that stops at the first invalid item of a collection."""
    bodies = list(_models(adapter._type))  # noqa: SLF001 - there is no other way in
    adapter.validator = _validator(adapter.core_schema, bodies)


def _validator(schema: Any, bodies: Collection[type], *, title: str = "") -> SchemaValidator:
    """Return a validator with bounds in all models, those that other code shares included.

    pydantic would take the validators that these models have already. Errors name the title.
    """
    config = CoreConfig(title=title) if title else None
    return SchemaValidator(_bounded(schema, bodies), config, _use_prebuilt=False)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that a type consists of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _bounded(schema: Any, bodies: Collection[type], *, is_inner: bool = False) -> Any:
    """Return a copy of a schema with bounds.

    `bodies` are the models of whole bodies; in others, lists may have one item for each token.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(_bounded(one, bodies, is_inner=is_inner) for one in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if kind == "model":
        is_inner = schema["cls"] not in bodies
    data = _DATA if isinstance(kind, str) else ()  # a mapping of fields has any names
    bounded = {
        key: part if key in data else _bounded(part, bodies, is_inner=is_inner)
        for key, part in schema.items()
    }
    if kind in _COLLECTIONS:
        bounded.setdefault("fail_fast", True)
    if kind == "list" and _has_costly_items(schema, is_inner=is_inner):
        bounded.setdefault("max_length", MAX_ITEMS)
    return bounded


def _has_costly_items(schema: Mapping[str, Any], *, is_inner: bool) -> bool:
    kind = schema.get("items_schema", {}).get("type", "any")
    return kind in _UNIONS if is_inner else kind not in _PLAIN


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
    """Refuse requests of pooling models with more prompts than `most`; idempotent.

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
    """Count the options of a question before vLLM makes them; idempotent.

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
    """Make `renderer` refuse requests with more prompts than `most`; idempotent.

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
