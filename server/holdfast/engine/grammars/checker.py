"""Decides about a grammar in the front end: it is known already, tried by a worker, or refused.

A worker tries a grammar for a second of CPU time, so that a machine that is busy with something
else makes no grammar slow. One that needs more goes to the slow lane, where a key has one at a
time, and occupies it for as long as EngineCore will need for the same grammar. So ordinary
grammars never wait long behind one client's slow ones, and slow ones take little of an engine's
CPU. A request uses no capacity of the engine while its grammar is tried.

Results are remembered by digest: a schema that comes with each request costs a few microseconds.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import psutil
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from holdfast.engine.grammars.compiler import Compiler
from holdfast.engine.grammars.lanes import Lane
from holdfast.engine.grammars.pool import Pool, TrialReply
from holdfast.engine.grammars.text import digest_of, grammar_text
from holdfast.engine.grammars.workers import OUT_OF_MEMORY
from holdfast.engine.vllm_errors import capacity_lent
from holdfast.errors import NotReadyError, OverloadedError
from holdfast.patches.grammar_memory import most_grammar_bytes
from holdfast.processes.exits import signal_name
from holdfast.request_context import current_request

QUICK_CPU_SECONDS = 1.0
"""A quick trial ends when it has taken this long on the clock and this much CPU time."""
QUICK_SECONDS = 10.0
"""It ends here even if it had less of a core: others wait for its slot."""
QUICK_SLOTS = 2
SLOW_SLOTS = 2
LEAST_SHARE = 0.5
"""The part of the timeout for which a grammar has to run before it is called too slow."""
REFUSALS_SECONDS = 60.0
"""How long a refusal is remembered: later, the machine may be less busy."""
GIVEN_UP_SECONDS = 3600.0
"""How long a grammar is refused after an engine gave it up."""
MAX_RESULTS = 1024
MAX_REMEMBERED_BYTES = 16 << 20
"""What all remembered results may change: a choice becomes a longer grammar."""

logger = logging.getLogger("holdfast.engine")


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What a worker found out about a grammar, or that it died of it."""

    refusal: str = ""
    """Why the grammar is refused, for the client; empty if it is accepted."""
    backend: str = ""
    was_auto: bool = False
    changed: Mapping[str, Any] = field(default_factory=dict)
    """The fields that vLLM's checks change: a choice becomes a grammar."""
    until_seconds: float | None = None
    """When it is forgotten, by the event loop's clock; None for never."""


class _Tried(NamedTuple):
    """A grammar of one key: no key waits in the queue of another."""

    key: str
    digest: bytes


@dataclass(slots=True, eq=False)
class _Trial:
    """One grammar that is being tried, and how many requests wait for its result."""

    task: asyncio.Task[TrialResult]
    waiting: int = 0
    is_queued: bool = True
    """Whether it waits for a slot."""


class GrammarChecker:
    """Checks the grammars of all requests. Belongs to one event loop."""

    def __init__(self, pool: Pool, *, timeout_seconds: float) -> None:
        self._pool = pool
        self.timeout_seconds = timeout_seconds
        self._quick = Lane(QUICK_SLOTS, slots_per_key=QUICK_SLOTS)
        self._slow = Lane(SLOW_SLOTS, slots_per_key=1)
        self._results: OrderedDict[bytes, TrialResult] = OrderedDict()
        self._remembered_bytes = 0
        self._trials: dict[_Tried, _Trial] = {}
        self._giving: set[asyncio.Task[None]] = set()

    def processes(self) -> frozenset[psutil.Process]:
        """Return the processes that try grammars, which belong to no engine."""
        return self._pool.processes()

    async def check(self, constraint: StructuredOutputsParams) -> None:
        """Return when vLLM may get the constraint, changed as its own checks would change it.

        Raises:
            VLLMValidationError: it is wrong, too large, or took a worker too much time or memory.
            GracefulHTTPError: it cannot be checked now; the client may retry the request.
        """
        result = await self.result(grammar_text(constraint))
        for name, value in result.changed.items():
            setattr(constraint, name, value)
        if result.changed:
            # An engine gives up the changed grammar.
            result = self._remembered(digest_of(grammar_text(constraint))) or result
        if result.refusal:
            raise VLLMValidationError(result.refusal)
        constraint._backend = result.backend  # noqa: SLF001 - where vLLM has it
        constraint._backend_was_auto = result.was_auto  # noqa: SLF001 - as above

    def refuse(self, constraint: StructuredOutputsParams) -> None:
        """Refuse a grammar for an hour: an engine gave it up, although a worker accepted it."""
        logger.warning("an engine gave up the grammar of %s", current_request().request_id)
        until_seconds = asyncio.get_running_loop().time() + GIVEN_UP_SECONDS
        self._remember(
            digest_of(grammar_text(constraint)), TrialResult(_GIVEN_UP, until_seconds=until_seconds)
        )

    async def result(self, grammar: bytes) -> TrialResult:
        """Return what is known of a grammar, or let a worker try it.

        Raises:
            GracefulHTTPError: as `check` does.
        """
        digest = digest_of(grammar)
        if (known := self._remembered(digest)) is not None:
            return known
        tried = _Tried(current_request().key, digest)
        trial = self._trials.get(tried)
        if trial is None:
            task = asyncio.create_task(self._try(tried, grammar))
            trial = self._trials[tried] = _Trial(task)
            task.add_done_callback(partial(self._ended, tried))
        trial.waiting += 1
        try:
            async with capacity_lent():
                return await asyncio.shield(trial.task)
        finally:
            trial.waiting -= 1
            if trial.is_queued and not trial.waiting:
                # Its turn may come late, and the grammars of clients that have left add up.
                trial.task.cancel()
                self._ended(tried, trial.task)

    async def _try(self, tried: _Tried, grammar: bytes) -> TrialResult:
        # Once it has a slot, a trial goes on after its client has left: it ends in time by itself.
        try:
            quickly = await self._try_quickly(tried, grammar)
            result = quickly or await self._try_slowly(tried, grammar)
        except (NotReadyError, OverloadedError):
            if (known := self._remembered(tried.digest)) is None:
                raise
            return known
        # Another key may have had it tried meanwhile, and what an engine gave up stays refused.
        if (known := self._remembered(tried.digest)) is not None:
            return known
        self._remember(tried.digest, result)
        return result

    async def _try_quickly(self, tried: _Tried, grammar: bytes) -> TrialResult | None:
        """Return the result of a short trial; None if it takes longer."""
        limit_seconds = min(QUICK_SECONDS, self.timeout_seconds)
        await self._take(self._quick, tried)
        try:
            # A trial for another key may have found it meanwhile.
            if (known := self._remembered(tried.digest)) is not None:
                return known
            answer = await self._pool.compile(
                grammar, limit_seconds, limit_cpu_seconds=QUICK_CPU_SECONDS
            )
        finally:
            self._quick.give(tried.key)
        limits = {int(signal.SIGALRM): limit_seconds, int(signal.SIGPROF): QUICK_CPU_SECONDS}
        if limits.get(answer.signal, self.timeout_seconds) < self.timeout_seconds:
            return None
        return self._result_of(answer)

    async def _try_slowly(self, tried: _Tried, grammar: bytes) -> TrialResult:
        """Return the result of a trial with the whole timeout; each key has one at a time."""
        await self._take(self._slow, tried)
        seconds, pid = 0.0, 0
        try:
            # As in `_try_quickly`.
            if (known := self._remembered(tried.digest)) is not None:
                return known
            answer = await self._pool.compile(grammar, self.timeout_seconds, is_slow=True)
            pid = answer.pid
            result = self._result_of(answer)
            seconds = 0.0 if result.refusal else answer.seconds
            return result
        finally:
            give = self._give_slowly(tried.key, seconds, pid)
            giving = asyncio.create_task(give, name="slow grammar")
            self._giving.add(giving)
            giving.add_done_callback(self._giving.discard)

    async def _give_slowly(self, key: str, seconds: float, pid: int) -> None:
        """Give a slot back once nothing of its trial needs a core or a worker any more.

        EngineCore compiles an accepted grammar again, and has few threads for that. A worker that
        is ending is one less for others, whose short trials must find one at once.
        """
        try:
            await asyncio.sleep(seconds)
            await self._pool.until_gone(pid)
        finally:
            self._slow.give(key)

    async def _take(self, lane: Lane, tried: _Tried) -> None:
        """Take a slot of a lane.

        Raises:
            NotReadyError: no client waits for it any more.
            OverloadedError: too many other grammars came first.
        """
        trial = self._trials[tried]
        if not trial.waiting:
            raise NotReadyError("The client has left.")
        trial.is_queued = True
        try:
            async with asyncio.timeout(self.timeout_seconds):
                await lane.take(tried.key)
        except TimeoutError:
            raise self._later("Too many other grammars are being checked.") from None
        trial.is_queued = False

    def _result_of(self, answer: TrialReply) -> TrialResult:
        until_seconds = asyncio.get_running_loop().time() + REFUSALS_SECONDS
        reply = answer.reply
        if reply is not None and "error" not in reply:
            return _accepted(reply)
        if reply is not None and reply["error"] != OUT_OF_MEMORY:
            return TrialResult(str(reply["error"]), until_seconds=until_seconds)
        if answer.signal in {signal.SIGALRM, signal.SIGPROF}:
            self._require_processor(answer)
            cause = f"it takes longer than {self.timeout_seconds:g} s to compile"
        elif reply is None:
            cause = "the process that compiled it crashed"
        else:
            cause = f"it takes more than {self._pool.memory_bytes >> 20} MiB of memory to compile"
        request_id = current_request().request_id
        died = f" ({signal_name(answer.signal)})" if answer.signal else ""
        logger.warning("refused the grammar of request %s: %s%s", request_id, cause, died)
        return TrialResult(
            f"The grammar of the request is refused: {cause}.", until_seconds=until_seconds
        )

    def _require_processor(self, answer: TrialReply) -> None:
        """Return if the grammar could run for long enough to be called too slow.

        Raises:
            OverloadedError: it had no core for most of its time.
        """
        if answer.cpu_seconds < LEAST_SHARE * self.timeout_seconds:
            raise self._later("This machine is too busy to check the grammar.")

    def _later(self, cause: str) -> OverloadedError:
        seconds = int(self.timeout_seconds)
        return OverloadedError(f"{cause} Try again later.", retry_after_seconds=seconds)

    def _ended(self, tried: _Tried, task: asyncio.Task[TrialResult]) -> None:
        trial = self._trials.get(tried)
        if trial is not None and trial.task is task:
            del self._trials[tried]
        if task.done() and not task.cancelled():
            task.exception()  # so asyncio does not log it if every client has left

    def _remembered(self, digest: bytes) -> TrialResult | None:
        result = self._results.get(digest)
        if result is None:
            return None
        until_seconds = result.until_seconds
        if until_seconds is not None and asyncio.get_running_loop().time() > until_seconds:
            self._forget(digest)
            return None
        self._results.move_to_end(digest)
        return result

    def _remember(self, digest: bytes, result: TrialResult) -> None:
        self._forget(digest)
        self._results[digest] = result
        self._remembered_bytes += _bytes_of(result)
        while len(self._results) > MAX_RESULTS:
            self._forget(next(iter(self._results)))
        while self._remembered_bytes > MAX_REMEMBERED_BYTES:
            # The others stay: to forget them frees nothing.
            self._forget(next(one for one, found in self._results.items() if found.changed))

    def _forget(self, digest: bytes) -> None:
        if (result := self._results.pop(digest, None)) is not None:
            self._remembered_bytes -= _bytes_of(result)


def _bytes_of(result: TrialResult) -> int:
    return sum(len(str(value)) for value in result.changed.values())


def _accepted(reply: Mapping[str, Any]) -> TrialResult:
    """Read a worker's reply field by field: a client's grammar may have corrupted its memory."""
    names = {one.name for one in fields(StructuredOutputsParams) if one.init}
    changed = {name: value for name, value in reply["changed"].items() if name in names}
    return TrialResult("", str(reply["backend"]), bool(reply["was_auto"]), changed)


def grammar_checker(config: Any, timeout_seconds: float) -> GrammarChecker:
    """Return a checker for the model of a vLLM configuration."""
    pool = Pool(
        partial(Compiler, config),
        workers=QUICK_SLOTS + SLOW_SLOTS,
        memory_bytes=most_grammar_bytes(config.model_config.get_vocab_size()),
    )
    return GrammarChecker(pool, timeout_seconds=timeout_seconds)


_GIVEN_UP = "The grammar of the request is refused: it took an engine too much CPU time or memory."
