"""The EngineClient that vLLM's OpenAI layer holds for life, whichever engine is behind it.

The delegation is generated from vLLM's own abstract class, so a method that another version adds
is forwarded too. `generate` and `encode` go through `replay.Calls`, where they outlive the engine.
The OpenAI layer can read the configuration even while no engine runs.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from typing import Any, cast

from vllm.engine.protocol import EngineClient
from vllm.v1.engine.exceptions import EngineDeadError

from holdfast.engine import compat
from holdfast.engine.grammars.checked import Grammars
from holdfast.engine.outputs import VllmDialect
from holdfast.engine.replay import Calls
from holdfast.engine.request import Method
from holdfast.engine.rpc import call_workers
from holdfast.engine.suspicions import Suspicions
from holdfast.errors import EngineRefusedError
from holdfast.patches.absence import called
from holdfast.request_context import Session, current_request

_OWN = {"is_running", "is_stopped", "errored", "dead_error", "shutdown", "generate", "encode"}
_KEPT = ("vllm_config", "model_config", "renderer", "input_processor")
"""Attributes of EngineClient; the serving objects keep those of the first engine anyway."""


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: EngineProxy, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.current, name)(*args, **kwargs)

    method.__name__ = name
    return method


_Forwarding: Any = type(
    "_Forwarding",
    (EngineClient,),
    {
        name: _forwarded(name)
        for name, member in vars(EngineClient).items()
        if callable(member) and not name.startswith("__") and name not in _OWN
    },
)


class EngineProxy(_Forwarding):  # type: ignore[misc]  # made from vLLM's class above
    """Forwards everything to the engine of the current generation.

    It never reports that it errored: vLLM would end the HTTP server, which only the supervisor may.
    """

    def __init__(
        self, grammars: Grammars | None = None, suspicions: Suspicions | None = None
    ) -> None:
        self.grammars = grammars
        self._current: Any | None = None
        self._kept: dict[str, Any] = {}
        self._first_model: Any | None = None
        self.calls = Calls(VllmDialect(self.transfers_kv), suspicions)

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

    def use(self, engine: Any | None) -> None:
        """Put another engine, or none, behind the proxy."""
        self._current = engine
        if engine is not None:
            self._kept = {name: getattr(engine, name) for name in _KEPT}
            self._first_model = self._first_model or engine.model_config

    def limit_context(self, tokens: int) -> None:
        """Have vLLM's front end refuse requests over this limit, prompt and answer together.

        The engine's processes have their own configuration, which does not change.
        """
        compat.limit_context(self.current, self._first_model, tokens)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._kept[name] if name in self._kept else getattr(self.current, name)

    def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Run a call as vLLM does; until it yields, it outlives the engine, see `Calls.run`."""
        return self._run("generate", args, kwargs)

    def encode(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Run a call as vLLM does; until it yields, it outlives the engine, see `Calls.run`."""
        return self._run("encode", args, kwargs)

    def _run(
        self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncIterator[Any]:
        names = _POSITIONAL[method]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        session = current_request().session
        if session is None:
            return self._run_anywhere(method, arguments)
        return self._run_in_session(session, method, arguments)

    async def _run_in_session(
        self, session: Session, method: Method, arguments: dict[str, Any]
    ) -> AsyncIterator[Any]:
        async with called(session):
            run = cast("AsyncGenerator[Any, None]", self._run_anywhere(method, arguments))
            async with aclosing(run) as outputs:
                async for output in outputs:
                    yield output

    def _run_anywhere(self, method: Method, arguments: dict[str, Any]) -> AsyncIterator[Any]:
        constraint = getattr(arguments.get("sampling_params"), "structured_outputs", None)
        if constraint is None or self.grammars is None:
            return self.calls.run(method, arguments)
        return self._run_checked(self.grammars, constraint, method, arguments)

    async def _run_checked(
        self, grammars: Grammars, constraint: Any, method: Method, arguments: dict[str, Any]
    ) -> AsyncIterator[Any]:
        # Checked before the engine has the call, so the time does not count as the engine's.
        await grammars.check(constraint)
        run = cast("AsyncGenerator[Any, None]", self.calls.run(method, arguments))
        async with aclosing(run) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str | Iterable[str], *args: Any, **kwargs: Any) -> None:
        """Abort as vLLM does; without an engine, there is nothing to abort."""
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        self.calls.expect_abort(frozenset(names))
        if self._current is not None:
            await self._current.abort(names, *args, **kwargs)

    async def add_lora(self, lora_request: Any, *, is_stale: bool = False) -> bool:
        """Add an adapter to every worker or to none, so that the workers stay in step.

        Raises:
            EngineRefusedError: a worker rejected it, so none has it.
        """
        fields = {name: getattr(lora_request, name) for name in lora_request.__struct_fields__}
        if is_stale:
            fields["load_inplace"] = True
        try:
            await call_workers(self.current, "add_lora", **fields)
        except EngineRefusedError:
            with suppress(EngineRefusedError):
                lora_id = lora_request.lora_int_id
                await call_workers(self.current, "remove_lora", lora_id=lora_id)
            raise
        return True

    async def pause_generation(self, *args: Any, **kwargs: Any) -> None:
        """Pause as vLLM does, which aborts what runs unless told to wait or to keep it."""
        await self._paused(self.current.pause_generation(*args, **kwargs))

    async def resume_generation(self, *args: Any, **kwargs: Any) -> None:
        """Resume as vLLM does."""
        await self.current.resume_generation(*args, **kwargs)
        self.calls.forgive_aborts()
        self.calls.is_paused = False

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        """Sleep as vLLM does, which aborts what runs unless told to wait."""
        await self._paused(self.current.sleep(*args, **kwargs))

    async def wake_up(self, *args: Any, **kwargs: Any) -> bool:
        """Wake as vLLM does, and return whether all of it is awake; until then it stays paused."""
        is_awake: bool = await self.current.wake_up(*args, **kwargs)
        self.calls.is_paused = bool(await self.current.is_sleeping())
        if not self.calls.is_paused:
            self.calls.forgive_aborts()
        return is_awake

    async def _paused(self, pausing: Awaitable[None]) -> None:
        """Pause the engine, which may abort what runs; a failure changes nothing."""
        self.calls.expect_aborts()
        self.calls.is_paused = True
        try:
            await pausing
        except BaseException:
            self.calls.is_paused = False
            self.calls.forgive_aborts()
            raise

    async def do_log_stats(self) -> None:
        """Log as vLLM does; a loop in its OpenAI layer calls this, which an exception ends."""
        if self._current is not None:
            await self._current.do_log_stats()

    def check_admission(self, *args: Any, **kwargs: Any) -> None:
        """Check as vLLM does; without an engine, calls are held instead of turned away."""
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


def _positional(method: Method) -> tuple[str, ...]:
    """The names of vLLM's parameters in order, without `self`."""
    parameters = inspect.signature(getattr(EngineClient, method)).parameters
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    return tuple(name for name, one in parameters.items() if one.kind is not keyword_only)[1:]


_POSITIONAL: dict[Method, tuple[str, ...]] = {
    "generate": _positional("generate"),
    "encode": _positional("encode"),
}
