"""The EngineClient that vLLM's OpenAI layer keeps, whichever engine is behind it.

The delegation is generated from vLLM's own abstract class, so a method that another version adds
is forwarded too. `generate` and `encode` go through `replay.ReplayManager`, where they outlive the
engine. The OpenAI layer can read the configuration even while no engine runs.
"""

from __future__ import annotations

import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
)
from contextlib import aclosing, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from vllm.engine.protocol import EngineClient
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from holdfast.engine.grammars.checker import GrammarChecker
from holdfast.engine.maintenance import SLEEP_DEADLINE_SECONDS
from holdfast.engine.outputs import VllmOutputs
from holdfast.engine.pauses import Pauses
from holdfast.engine.replay import ReplayManager
from holdfast.engine.requests.request import Method
from holdfast.engine.suspects.suspicions import Suspicions
from holdfast.engine.vllm_errors import session_call
from holdfast.engine.worker_adapters import WorkerAdapters
from holdfast.errors import RequestAbortedError
from holdfast.request_context import Session, current_request

_IMPLEMENTED = {
    "is_running",
    "is_stopped",
    "errored",
    "dead_error",
    "shutdown",
    "generate",
    "encode",
}
_NOT_CONTINUED = ("is_encoder_decoder", "is_diffusion")
"""Kinds of models whose answers may have a state that does not follow from their tokens."""
_CHANGE_WEIGHTS = frozenset(
    {
        "start_weight_update",
        "start_draft_weight_update",
        "update_weights",
        "finish_weight_update",
        "update_weight_version",
    }
)
"""What may change the weights of an engine in its memory, or their name; the next has neither."""
_HARMLESS_CALLS = ("holdfast_", "check_health", "release_late_interaction_query_cache")
"""How the methods of workers begin that Holdfast and vLLM call by themselves."""
_KEPT = ("vllm_config", "model_config", "renderer", "input_processor")
"""Attributes of EngineClient; the serving objects keep those of the first engine anyway."""


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: EngineProxy, *args: Any, **kwargs: Any) -> Any:
        call = getattr(self.current, name)
        if name in _CHANGE_WEIGHTS:
            self._note_new_weights()
        return call(*args, **kwargs)

    method.__name__ = name
    return method


_Forwarding: Any = type(
    "_Forwarding",
    (EngineClient,),
    {
        name: _forwarded(name)
        for name, member in vars(EngineClient).items()
        if callable(member) and not name.startswith("__") and name not in _IMPLEMENTED
    },
)


class EngineProxy(_Forwarding):  # type: ignore[misc]  # made from vLLM's class above
    """Forwards everything to the engine of the current generation.

    It never reports an error state: vLLM would end the HTTP server, which only the supervisor may.
    """

    def __init__(
        self,
        grammars: GrammarChecker | None = None,
        suspicions: Suspicions | None = None,
        *,
        continues_streams: bool = False,
    ) -> None:
        self.grammars = grammars
        self._continues_streams = continues_streams
        self.has_new_weights = False
        """Whether those of the engine may have been changed in its memory."""
        self._current: Any | None = None
        self._kept: dict[str, Any] = {}
        self._first_model: Any = None
        self.requests = ReplayManager(
            VllmOutputs(self.transfers_kv, self.continues_streams), suspicions
        )
        self.adapters = WorkerAdapters(self.requests)
        self._pauses = Pauses(self.requests.aborts)

    @property
    def current(self) -> Any:
        """The AsyncLLM in use.

        Raises:
            EngineDeadError: no engine is in use; vLLM's routes answer 500.
        """
        if self._current is None:
            raise EngineDeadError
        return self._current

    def transfers_kv(self) -> bool:
        """Whether the engine exchanges KV caches with others."""
        return getattr(self._kept.get("vllm_config"), "kv_transfer_config", None) is not None

    def continues_streams(self) -> bool:
        """Whether the next engine may go on with a stream: it was asked to, and the model can."""
        config, model = self._kept.get("vllm_config"), self._kept.get("model_config")
        # The routes of a mixture of experts are sent with the last token, for all tokens.
        further = getattr(config, "aux_output_config", None)
        return (
            self._continues_streams
            and not self.has_new_weights
            and not any(getattr(model, name, False) for name in _NOT_CONTINUED)
            and not getattr(further, "enable_return_routed_experts", False)
        )

    def _note_new_weights(self) -> None:
        self.has_new_weights = True
        self.requests.arrivals.end_streams_with_engine()

    def use(self, engine: Any | None) -> None:
        """Forward to another engine, or to none."""
        self._current = engine
        if engine is not None:
            self.has_new_weights = False
            self._kept = {name: getattr(engine, name) for name in _KEPT}
            self._first_model = self._first_model or engine.model_config

    def limit_context(self, tokens: int) -> None:
        """Have vLLM's front end refuse requests over this limit, prompt and answer together.

        The limit is read at each request: by the serving objects, which have the model
        configuration of the first engine, by the renderer, which outlives its engine, and by the
        input processor of each engine (0.32, 0.33). The engine's processes have their own
        configuration, which does not change.
        """
        llm = self.current
        readers = (llm, llm.renderer, llm.input_processor)
        for model in (self._first_model, *(reader.model_config for reader in readers)):
            model.max_model_len = tokens

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._kept[name] if name in self._kept else getattr(self.current, name)

    def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Generate as vLLM does, over the deaths of engines, see `ReplayManager.run`."""
        return self._run("generate", args, kwargs)

    def encode(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Encode as vLLM does, and replay the request until it yields, see `ReplayManager.run`."""
        return self._run("encode", args, kwargs)

    def _run(
        self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncIterator[Any]:
        names = _POSITIONAL[method]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        session = current_request().session
        constraint = getattr(arguments.get("sampling_params"), "structured_outputs", None)
        adapter = arguments.get("lora_request")
        self._require_adapter(adapter)
        if session is None and (constraint is None or self.grammars is None):
            outputs = self.requests.run(method, arguments)
        else:
            outputs = self._run_prepared(session, constraint, method, arguments)
        if adapter is not None:
            self.adapters.note_use(outputs, adapter)
        return outputs

    async def _run_prepared(
        self, session: Session | None, constraint: Any, method: Method, arguments: dict[str, Any]
    ) -> AsyncIterator[Any]:
        async with nullcontext() if session is None else session_call(session):
            # Checked before the engine has the request: the time does not count as the engine's.
            if constraint is not None and self.grammars is not None:
                await self.grammars.check(constraint)
            self._require_adapter(arguments.get("lora_request"))  # it may have gone meanwhile
            run = cast("AsyncGenerator[Any, None]", self.requests.run(method, arguments))
            async with aclosing(run) as outputs:
                async for output in outputs:
                    yield output

    def _require_adapter(self, record: Any) -> None:
        """Raise VLLMNotFoundError if an engine serves, and lacks the adapter of a request."""
        if record is not None and self._current is not None:
            self.adapters.require(record)

    @property
    def output_processor(self) -> Any:
        """What `/abort_requests` without IDs reads all IDs from: those that `abort` takes."""
        names = (one.get("request_id", "") for one in self.requests.arguments())
        return SimpleNamespace(request_states=dict.fromkeys(names), parent_requests={})

    async def abort(self, request_id: str | Iterable[str], *_: Any, **_options: Any) -> None:
        """Abort as vLLM does; what waits for an engine ends with an error.

        Each ID is one that a caller gave, also where vLLM says that it is internal: it comes from
        `output_processor`.

        Suspects are tried all the same: they may be to blame, and no client can end a trial by
        leaving.
        """
        given = [request_id] if isinstance(request_id, str) else list(request_id)
        allowed = self.requests.aborts.allowed(given)
        names = [name for name in allowed if not self.requests.is_suspect(name)]
        error = RequestAbortedError("The request was aborted while it waited for the engine.")
        self.requests.refuse(lambda one: one.request_id in names, error)
        self.requests.aborts.expect(frozenset(names))
        if self._current is not None:
            await self._current.abort(names)

    async def add_lora(self, lora_request: Any, *, is_stale: bool = False) -> bool:
        """Add an adapter to every worker or to none, see `WorkerAdapters.load`."""
        await self.adapters.load(lambda: self.current, lora_request, is_stale=is_stale)
        return True

    async def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the workers as vLLM does; what is not Holdfast's own may change their weights."""
        llm = self.current
        if not str(method).startswith(_HARMLESS_CALLS):
            self._note_new_weights()
        return await llm.collective_rpc(method, *args, **kwargs)

    async def pause_generation(self, *args: Any, **kwargs: Any) -> None:
        """Pause as vLLM does, which aborts running requests unless told to wait or to keep them."""
        llm = self.current
        await self._pauses.pause(llm, partial(llm.pause_generation, *args, **kwargs), 0.0)

    async def resume_generation(self, *args: Any, **kwargs: Any) -> None:
        """Resume as vLLM does."""
        llm = self.current
        await self._pauses.resume(llm, partial(llm.resume_generation, *args, **kwargs))

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        """Sleep as vLLM does, which aborts running requests unless told to wait."""
        llm = self.current
        call = partial(llm.sleep, *args, **kwargs)
        await self._pauses.pause(llm, call, SLEEP_DEADLINE_SECONDS)

    async def wake_up(self, *args: Any, **kwargs: Any) -> bool:
        """Wake as vLLM does, and return whether all of it is awake; until then it stays paused."""
        llm = self.current
        call = partial(llm.wake_up, *args, **kwargs)
        return await self._pauses.wake(llm, call, SLEEP_DEADLINE_SECONDS)

    async def do_log_stats(self) -> None:
        """Log as vLLM does. An exception would end the loop in its OpenAI layer that calls this."""
        if self._current is not None:
            await self._current.do_log_stats()

    def check_admission(self, *args: Any, **kwargs: Any) -> None:
        """Check as vLLM does; without an engine, requests are held instead of refused."""
        if self._current is not None:
            self._current.check_admission(*args, **kwargs)

    @property
    def is_running(self) -> bool:
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        return False

    @property
    def dead_error(self) -> BaseException:
        error: BaseException = EngineDeadError()
        return error

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: the launcher that started an engine also stops it."""


# `/abort_requests` without IDs asks for this class before it reads all IDs (0.32, 0.33).
AsyncLLM.register(EngineProxy)


def _positional(method: Method) -> tuple[str, ...]:
    """Return the names of vLLM's positional parameters in order, without `self`."""
    parameters = inspect.signature(getattr(EngineClient, method)).parameters
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    return tuple(name for name, one in parameters.items() if one.kind is not keyword_only)[1:]


_POSITIONAL: dict[Method, tuple[str, ...]] = {
    "generate": _positional("generate"),
    "encode": _positional("encode"),
}
