"""An AsyncLLM that refuses what cannot be sent to its engine, and queues the rest."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import cached_property, partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from holdfast.engine.grammars.given_up import refusing
from holdfast.engine.requests.continuation import (
    ContinuedPrompt,
    going_on,
    hand_over,
    restore,
    sent_answer,
)
from holdfast.engine.requests.observed_outputs import observed
from holdfast.engine.requests.sequence_queue import SequenceQueue
from holdfast.engine.requests.sizes import media_bytes_of
from holdfast.engine.requests.unread_tokens import unread_tokens
from holdfast.patches.continued import SENT_TOKENS
from holdfast.patches.parameters import (
    check_media_copies,
    check_prompt_copies,
    check_prompt_logprobs,
    check_size,
    limit_answer_logprobs,
)
from holdfast.processes.deaths import CoreProcess
from holdfast.request_context import current_request

_SENT_ALONG = ("reasoning_parser_kwargs", "session_id")
"""What a client says beside the parameters, and the engine gets."""
_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")


class UnsentError(EngineDeadError):  # type: ignore[misc]  # vLLM is Any to us
    """The engine died before any part of this request was sent, so it did not cause that."""


class CheckedLLM(AsyncLLM):  # type: ignore[misc]  # vLLM is Any to us
    """An AsyncLLM with bounds on what a request may bring.

    It also recovers from numbers of more than 64 bits and from halves of surrogate pairs. msgspec
    cannot write them, and by then vLLM has registered the request forever, and answers with an
    empty 500 (`AsyncLLM._add_request` and `generate`, 0.32).
    """

    sequences: SequenceQueue | None = None
    restoring: asyncio.Lock | None = None
    refuse: Callable[[Any], None] | None = None
    """Takes a grammar that the engine gave up, to refuse it from then on."""
    collectors: Any = MappingProxyType({})
    """What has the outputs of each request, by vLLM's internal ID; empty before `queue_sequences`.

    A request has its own until its caller leaves it.
    """

    def skip_grammar_checks(self, refuse: Callable[[Any], None]) -> None:
        """Accept grammars unchecked from now on: workers have checked them, see `grammars`.

        Without a configuration for grammars vLLM checks none (`SamplingParams.verify`, 0.32), so
        it compiles none in this process, which a compilation can kill.
        """
        self.input_processor.structured_outputs_config = None
        self.refuse = refuse

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        """Generate as vLLM does, but refuse a grammar that the engine gives up."""
        outputs = super().generate(prompt, sampling_params, request_id, **options)
        grammar = sampling_params.structured_outputs
        if self.refuse is None or grammar is None:
            return outputs  # type: ignore[no-any-return]  # vLLM is Any to us
        has_begun = isinstance(prompt, ContinuedPrompt)
        return refusing(outputs, partial(self.refuse, grammar), has_begun=has_begun)

    def queue_sequences(
        self,
        sequences: SequenceQueue,
        on_aborted: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        """Have each sequence wait in this queue before it is sent to the engine.

        `on_aborted` is called with those that the engine has aborted, before their callers know.
        """
        self.sequences = sequences
        self.collectors = WeakValueDictionary()
        self.restoring = asyncio.Lock()
        resources = self.engine_core.resources  # not `self`, see `stop_queueing`
        sequences.is_gone = lambda: bool(resources.engine_dead)
        self.output_processor.request_states = _RequestStates(sequences)
        self.engine_core.add_request_async = self._queued(self.engine_core.add_request_async)
        processor = self.output_processor
        processor.process_outputs = observed(processor, sequences, on_aborted)

    def stop_queueing(self) -> None:
        """Stop queueing: the engine is gone, and its requests have been told.

        Its client is then not part of a reference cycle. vLLM freezes what a start leaves, and the
        garbage collector frees no frozen cycle, so it would not free this client's sockets. vLLM
        keeps the requests that an engine had when it died, and each keeps the last error that it
        was told, with the frames of the client in its traceback (0.32, 0.33).
        """
        del self.engine_core.add_request_async, self.output_processor.process_outputs
        self.output_processor.request_states.clear()
        self.engine_core.utility_results.clear()

    def stop_reading(self) -> None:
        """Pass on no more of what the engine sends: it is ended, and its requests have been told.

        Otherwise vLLM takes the end of its own reader for a death, and logs it as an error.
        """
        if self.output_handler is not None:
            self.output_handler.cancel()

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that read what the engine sends."""
        reader = getattr(self.engine_core.resources, "output_queue_task", None)
        return [task for task in (self.output_handler, reader) if task is not None]

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any
    ) -> Any:
        """Add a request, and return the queue of its outputs.

        A `ContinuedPrompt` makes a request that goes on after what was sent of its answer.

        Raises:
            VLLMValidationError: something in it has no encoding or is too large, it asks for too
                many sequences, or its further arguments are not what they may be; nothing remains
                of the request.
            UnsentError: the engine is gone.
        """
        _check_further(getattr(params, "extra_args", None) or {})
        sequences = getattr(params, "n", 1)
        if self.sequences is not None:
            _check_count(sequences, self.sequences.max_sequences)
        check_size(map(options.get, _SENT_ALONG), sequences=sequences)
        if isinstance(prompt, Mapping) and sequences > 1:
            check_media_copies(sequences, media_bytes_of(prompt))
        if isinstance(prompt, Mapping) and (token_ids := prompt.get("prompt_token_ids")):
            check_prompt_copies(sequences, len(token_ids))
            check_prompt_logprobs(params, request_id, len(token_ids), self._vocabulary)
        is_length_given = partial(self._is_length_given, params, prompt)
        params = limit_answer_logprobs(params, self._vocabulary, is_length_given)
        if self.restoring is not None and isinstance(prompt, ContinuedPrompt):
            # After a death all go on at once, and each occupies the loop for as long as its answer
            # takes to read: others must have their turn in between.
            async with self.restoring:
                await asyncio.sleep(0)
        if self.errored:
            raise UnsentError
        try:
            with going_on(prompt) as given:
                added = await super().add_request(request_id, given, params, *args, **options)
        except (OverflowError, UnicodeError) as error:
            await self.abort(request_id)
            raise VLLMValidationError(f"A value in the request has no encoding: {error}") from error
        if self.sequences is not None:
            self.collectors[added.request_id] = added
        return added

    def check_admission(self, *args: Any, **options: Any) -> None:
        """Check as vLLM does, unless an earlier engine has had the request: it was admitted.

        Nor does the probe have to keep a limit, since no client waits while it runs. A canary does:
        clients may have come by then, and the engine that has them needs none.

        Raises:
            GracefulHTTPError: vLLM's queue is full. Routers take the status that vLLM has for that
                (0.32) for a replica that is away.
        """
        context = current_request()
        if context.has_outlived_engine or context.is_probe:
            return
        try:
            super().check_admission(*args, **options)
        except GracefulHTTPError as error:
            error.http_status = HTTPStatus.TOO_MANY_REQUESTS
            raise

    async def abort(self, request_id: Any, *args: Any, **options: Any) -> None:
        """Abort as vLLM does, and count what nobody reads: its caller has left (0.32, 0.33)."""
        is_one = isinstance(request_id, str)  # vLLM's own generators abort one; routes abort a list
        sequences, collector = self.sequences, self.collectors.get(request_id) if is_one else None
        if options.get("internal") and sequences is not None and collector is not None:
            unread = unread_tokens(self.output_processor, collector, sequences.has_sent)
            current_request().count_tokens(*unread)
        await super().abort(request_id, *args, **options)

    def requests_by_engine(self) -> dict[int, int]:
        """Count the requests in each engine of a data-parallel group; empty if there is only one.

        The client that balances between engines keeps the identity of each request's engine: its
        index as two little-endian bytes (`DPLBAsyncMPClient`, 0.32, 0.33).
        """
        by_request = getattr(self.engine_core, "reqs_in_flight", {})
        return dict(Counter(int.from_bytes(identity, "little") for identity in by_request.values()))

    def declare_dead(self) -> None:
        """Make every pending and every later call raise EngineDeadError.

        A stopped core reports nothing, and `AsyncLLM.shutdown` cancels the task that would pass a
        death on. That of any other passes it on to requests, and not to what was asked of workers
        or of the scheduler. Without this, calls wait forever (0.32, 0.33).
        """
        self.engine_core.resources.engine_dead = True
        self.output_processor.propagate_error(EngineDeadError())
        for call in self.engine_core.utility_results.values():
            if not call.done():
                call.set_exception(EngineDeadError())
                call.exception()  # one that could not be sent has no reader, and is here too

    def core_processes(self) -> dict[int, CoreProcess]:
        """Return the processes that the front end started for this engine, by pid; none of Ray's.

        Their exit codes are read where vLLM's own monitor leaves them: a second query for the exit
        code of a fork server's child returns 255 (CPython 3.11, `popen_forkserver.Popen.poll`).
        """
        resources = self.engine_core.resources
        found = list(getattr(resources.engine_manager, "processes", ()))
        if resources.coordinator is not None:
            found.append(resources.coordinator.proc)
        return {p.pid: CoreProcess(p.name, partial(getattr, p._popen, "returncode")) for p in found}  # noqa: SLF001 - see above

    def _vocabulary(self) -> int:
        return int(self.model_config.get_vocab_size())

    def _is_length_given(self, params: Any, prompt: Any) -> bool:
        """Whether a client chose `max_tokens`: else vLLM has filled in what fits, or a default.

        If an earlier engine has had the request, it was admitted.
        """
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        if not token_ids or current_request().has_outlived_engine:
            return False
        room_tokens = self.model_config.max_model_len - len(token_ids)
        return params.max_tokens not in (None, room_tokens, self._default_max_tokens)

    @cached_property
    def _default_max_tokens(self) -> int | None:
        default: int | None = self.model_config.get_diff_sampling_param().get("max_tokens")
        return default

    def _queued(self, send: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
        async def send_queued(request: Any) -> None:
            is_begun = self._has_part_of(request.request_id)
            try:
                is_wanted = self.sequences is None or await self.sequences.enter(request.request_id)
            except BaseException as error:
                # vLLM does not clean up here: it does not expect to wait when it sends (0.32).
                self.output_processor.abort_requests([request.request_id], internal=True)
                if is_begun and isinstance(error, UnsentError):
                    raise EngineDeadError from error
                raise
            if is_wanted:
                if (sent := sent_answer()) is not None:
                    draws_by_position = self.vllm_config.use_v2_model_runner
                    hand_over(request, sent, draws_by_position=draws_by_position)
                await send(request)

        return send_queued

    def _has_part_of(self, name: str) -> bool:
        """Whether the engine has had a part of the request that a sequence belongs to.

        That is an earlier part of its prompt, or an answer before this one: vLLM sends them one
        after another (0.32, 0.33).
        """
        state = self.output_processor.request_states.get(name)
        is_later_answer = state is not None and state.request_index > 0
        return is_later_answer or (self.sequences is not None and self.sequences.has_sent(name))


class _RequestStates(dict[str, Any]):
    """vLLM's `request_states`, which has each sequence until the engine is done with it."""

    def __init__(self, sequences: SequenceQueue) -> None:
        super().__init__()
        self._sequences = sequences
        self._sent_tokens: dict[str, int] = {}
        """By sequence that goes on: how many tokens of its answer were sent."""

    def __setitem__(self, name: str, state: Any) -> None:
        if name not in self:
            tokens = state.prompt_len
            cached_tokens = state.remote_prefill_cached_tokens
            if cached_tokens is not None and not 0 <= cached_tokens <= tokens:
                # A client's number, which would remain in the sums of vLLM's metrics (0.32, 0.33).
                state.remote_prefill_cached_tokens = None
            if (sent := sent_answer()) is not None:
                restore(state, sent)
                self._sent_tokens[name] = len(sent.token_ids)
                tokens += len(sent.token_ids)
            self._sequences.register(name, current_request(), tokens)
        super().__setitem__(name, state)

    def pop(self, name: str, *default: Any) -> Any:
        self._sequences.leave(name)
        self._sent_tokens.pop(name, None)
        return super().pop(name, *default)

    def is_read(self, name: str) -> bool:
        """Whether the engine has processed a prompt, and what was sent of the answer to it."""
        state = self[name]
        if (sent_tokens := self._sent_tokens.get(name)) is not None:
            return bool(state.detokenizer.num_output_tokens() > sent_tokens)
        return not state.is_prefilling


def _check_further(given: Mapping[str, Any]) -> None:
    """Refuse a transfer that is not an object: front end and EngineCore fail on it (0.32)."""
    for name in _TRANSFERS:
        if not isinstance(given.get(name), Mapping | None):
            raise VLLMValidationError(f"{name} must be an object.", parameter="vllm_xargs")
    if SENT_TOKENS in given:
        raise VLLMValidationError(f"{SENT_TOKENS} is reserved.", parameter="vllm_xargs")


def _check_count(sequences: int, most: float) -> None:
    context = current_request()
    if not context.is_probe and context.sequences + sequences > most:
        raise VLLMValidationError(
            f"The request asks for more than {most:g} sequences at a time (prompts times n)."
        )
