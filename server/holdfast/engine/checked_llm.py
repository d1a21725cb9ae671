"""vLLM's AsyncLLM, which refuses what cannot be sent to its engine, and sends the rest in turn."""

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
    """The engine died before a request of its queue was sent to it, which is none of its doing."""


class CheckedLLM(AsyncLLM):  # type: ignore[misc]  # vLLM is Any to us
    """An AsyncLLM that is left as it was by a number of more than 64 bits.

    msgspec writes none (OverflowError). vLLM has the request among its own by then, for ever, and
    answers with an empty 500 (`AsyncLLM._add_request` and `generate`, 0.32).
    """

    turns: Turns | None = None
    compile_limit: CompileLimit | None = None

    def leave_grammars_to(self, limit: CompileLimit) -> None:
        """From now on take grammars as they are: they were checked elsewhere, see `grammars`.

        vLLM checks none where it has no configuration for them (`SamplingParams.verify`, 0.32), and
        so compiles none in this process, which that may end.
        """
        self.input_processor.structured_outputs_config = None
        self.compile_limit = limit

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        """As vLLM's, but that a grammar on which the engine compiles for too long is given up."""
        outputs = super().generate(prompt, sampling_params, request_id, **options)
        limit = self.compile_limit
        if limit is None or sampling_params.structured_outputs is None:
            return outputs  # type: ignore[no-any-return]  # vLLM is Any to us
        return within_limit(outputs, limit)

    def take_turns(self, turns: Turns) -> None:
        """From now on each sequence waits for its turn before it is sent to the engine."""
        self.turns = turns
        self.output_processor.request_states = _States(turns)
        self.engine_core.add_request_async = self._in_turn(self.engine_core.add_request_async)
        processor = self.output_processor
        processor.process_outputs = _told(processor.process_outputs, processor, turns)

    def leave_turns(self) -> None:
        """The engine is gone: from now on nothing waits for a turn.

        Its client is no part of a cycle then. vLLM freezes what a start leaves, of which the
        garbage collector frees no cycle, and so not the sockets of this one.
        """
        del self.engine_core.add_request_async, self.output_processor.process_outputs

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any
    ) -> Any:
        """Where its outputs come.

        Raises:
            VLLMValidationError: a number in it is too large, it asks for too many sequences, or
                what it says of a transfer is not an object; nothing is left of it.
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
                # vLLM has no way out here: it waits for nothing where it sends a request (0.32).
                self.output_processor.abort_requests([request.request_id], internal=True)
                raise
            if is_wanted:
                await send(request)

        return send_in_turn


class _States(dict[str, Any]):
    """vLLM's books of its sequences: one is among them until the engine is done with it."""

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
    """Refuse what vLLM takes for an object: front end and EngineCore fail on it (0.32)."""
    for name in _TRANSFERS:
        if not isinstance(given.get(name), Mapping | None):
            raise VLLMValidationError(f"{name} must be an object.", parameter="vllm_xargs")


def _told(process: Callable[..., Any], processor: Any, turns: Turns) -> Callable[..., Any]:
    """As vLLM's, but that turns are told of the prompts that the engine has read."""
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
