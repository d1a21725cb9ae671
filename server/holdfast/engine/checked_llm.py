"""An AsyncLLM that refuses what cannot be sent to its engine, and sends the rest in turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from holdfast.engine.grammars.compile_limit import CompileLimit, within_limit
from holdfast.engine.turns import Turns
from holdfast.request_context import current_request

_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")


class UnsentError(EngineDeadError):  # type: ignore[misc]  # vLLM is Any to us
    """The engine died before this queued request was sent, so the request did not cause it."""


class CheckedLLM(AsyncLLM):  # type: ignore[misc]  # vLLM is Any to us
    """An AsyncLLM whose state survives a number of more than 64 bits.

    msgspec cannot write one (OverflowError). By then vLLM has registered the request for ever, and
    answers with an empty 500 (`AsyncLLM._add_request` and `generate`, 0.32).
    """

    turns: Turns | None = None
    compile_limit: CompileLimit | None = None

    def leave_grammars_to(self, limit: CompileLimit) -> None:
        """Accept grammars unchecked from now on: they were checked elsewhere, see `grammars`.

        Without a configuration for them vLLM checks none (`SamplingParams.verify`, 0.32), so it
        compiles none in this process, which compiling may kill.
        """
        self.input_processor.structured_outputs_config = None
        self.compile_limit = limit

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        """Generate as vLLM does, but give up a grammar that the engine compiles for too long."""
        outputs = super().generate(prompt, sampling_params, request_id, **options)
        limit = self.compile_limit
        if limit is None or sampling_params.structured_outputs is None:
            return outputs  # type: ignore[no-any-return]  # vLLM is Any to us
        return within_limit(outputs, limit)

    def take_turns(self, turns: Turns) -> None:
        """Make each sequence wait for its turn before it is sent to the engine."""
        self.turns = turns
        self.output_processor.request_states = _States(turns)
        self.engine_core.add_request_async = self._in_turn(self.engine_core.add_request_async)
        processor = self.output_processor
        processor.process_outputs = _told(processor.process_outputs, processor, turns)

    def leave_turns(self) -> None:
        """Stop waiting for turns: the engine is gone.

        Its client is then not part of a reference cycle. vLLM freezes what a start leaves, and the
        garbage collector frees no frozen cycle, and so would not free this client's sockets.
        """
        del self.engine_core.add_request_async, self.output_processor.process_outputs

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any
    ) -> Any:
        """Add a request, and return the queue of its outputs.

        Raises:
            VLLMValidationError: a number in it is too large, it asks for too many sequences, or
                its transfer parameters are not an object; nothing remains of the request.
        """
        _check_transfers(getattr(params, "extra_args", None) or {})
        if self.turns is not None:
            _bound(getattr(params, "n", 1), self.turns.most_sequences)
        try:
            return await super().add_request(request_id, prompt, params, *args, **options)
        except OverflowError as error:
            await self.abort(request_id)
            raise VLLMValidationError(f"A number in the request is too large: {error}.") from error

    def _in_turn(self, send: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
        async def send_in_turn(request: Any) -> None:
            try:
                is_wanted = self.turns is None or await self.turns.enter(request.request_id)
            except BaseException:
                # vLLM does not clean up here: it expects no wait where it sends a request (0.32).
                self.output_processor.abort_requests([request.request_id], internal=True)
                raise
            if is_wanted:
                await send(request)

        return send_in_turn


class _States(dict[str, Any]):
    """vLLM's record of its sequences, which has each until the engine is done with it."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns

    def __setitem__(self, name: str, state: Any) -> None:
        if name not in self:
            self._turns.register(name, current_request(), state.prompt_len)
        super().__setitem__(name, state)

    def pop(self, name: str, *default: Any) -> Any:
        self._turns.leave(name)
        return super().pop(name, *default)


def _check_transfers(given: Mapping[str, Any]) -> None:
    """Refuse what vLLM mistakes for an object: front end and EngineCore fail on it (0.32)."""
    for name in _TRANSFERS:
        if not isinstance(given.get(name), Mapping | None):
            raise VLLMValidationError(f"{name} must be an object.", parameter="vllm_xargs")


def _told(process: Callable[..., Any], processor: Any, turns: Turns) -> Callable[..., Any]:
    """Wrap vLLM's method to tell the turns which prompts the engine has read."""
    states = processor.request_states

    def process_outputs(*args: Any, **options: Any) -> Any:
        processed = process(*args, **options)
        turns.step_ended(lambda name: not states[name].is_prefilling)
        return processed

    return process_outputs


def _bound(sequences: int, most: float) -> None:
    context = current_request()
    if not context.is_probe and context.sequences + sequences > most:
        raise VLLMValidationError(
            f"The request asks for more than {most:g} sequences at a time (prompts times n)."
        )
