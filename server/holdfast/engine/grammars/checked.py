"""What becomes of a grammar in the front end: known already, tried by a worker, or refused.

A grammar is tried for a second. One that needs longer waits for a slow turn; a key has one at a
time, and its place stays taken for as long as EngineCore will need for the grammar in turn. So
ordinary grammars never wait for long behind one client's slow ones. A request holds no place in the
engine while its grammar is tried.

Results are remembered by digest: a schema that is sent with each request costs some microseconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import signal
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import psutil
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from holdfast.engine.grammars.compiling import Compiler
from holdfast.engine.grammars.lanes import Lane
from holdfast.engine.grammars.pool import Answer, Pool
from holdfast.engine.grammars.processes import OUT_OF_MEMORY
from holdfast.errors import NotReadyError
from holdfast.patches.absence import away_from_engine
from holdfast.processes.exit_codes import signal_name
from holdfast.request_context import current_request

LONGEST_BYTES = 512 << 10
"""Of one grammar, as JSON. vLLM has no bound, and some of its loops are quadratic."""
MEMORY_BYTES = 1 << 30
QUICK_SECONDS = 1.0
QUICK_PLACES = 2
SLOW_PLACES = 2
REFUSALS_SECONDS = 60.0
"""How long a refusal is remembered: the machine may be less busy later."""
MOST_RESULTS = 1024
LONGEST_REMEMBERED_BYTES = 16 << 10
"""Of the fields that a result changes: they are kept with it."""

logger = logging.getLogger("holdfast.engine")


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What a worker found, or that it died."""

    refusal: str = ""
    """Why no engine gets it, for the client; empty if it may go on."""
    backend: str = ""
    was_auto: bool = False
    changed: Mapping[str, Any] = field(default_factory=dict)
    """What vLLM's checks make of the fields: a choice becomes a grammar."""
    until_seconds: float | None = None
    """When it is forgotten, on the loop's clock."""


@dataclass(slots=True, eq=False)
class _Trial:
    """One grammar on its way to a result, and how many requests wait for that."""

    task: asyncio.Task[TrialResult]
    waiting: int = 0


class Grammars:
    """The grammars of all requests. Belongs to one event loop."""

    def __init__(self, pool: Pool, *, timeout_seconds: float) -> None:
        self._pool = pool
        self.timeout_seconds = timeout_seconds
        self._quick = Lane(QUICK_PLACES, places_per_key=QUICK_PLACES)
        self._slow = Lane(SLOW_PLACES, places_per_key=1)
        self._results: OrderedDict[bytes, TrialResult] = OrderedDict()
        self._trials: dict[bytes, _Trial] = {}

    def family(self) -> frozenset[psutil.Process]:
        """The processes that try grammars: they belong to no engine."""
        return self._pool.family()

    async def check(self, constraint: StructuredOutputsParams) -> None:
        """Return when vLLM can be given the constraint, which is then as its own checks leave it.

        Raises:
            VLLMValidationError: it is wrong, too large, or took a worker too much.
            GracefulHTTPError: nothing can be said of it now; the request may be made again.
        """
        result = await self.result(_text(constraint))
        if result.refusal:
            raise VLLMValidationError(result.refusal)
        for name, value in result.changed.items():
            setattr(constraint, name, value)
        constraint._backend = result.backend  # noqa: SLF001 - where vLLM has it
        constraint._backend_was_auto = result.was_auto  # noqa: SLF001 - as above

    async def result(self, grammar: bytes) -> TrialResult:
        """What is known of a grammar, or what a worker says of it.

        Raises:
            GracefulHTTPError: as `check` does.
        """
        digest = hashlib.sha256(grammar).digest()
        if (known := self._remembered(digest)) is not None:
            return known
        trial = self._trials.get(digest)
        if trial is None:
            task = asyncio.create_task(self._tried(digest, grammar, current_request().key))
            trial = self._trials[digest] = _Trial(task)
            task.add_done_callback(partial(self._ended, digest))
        trial.waiting += 1
        try:
            async with away_from_engine():
                return await asyncio.shield(trial.task)
        finally:
            trial.waiting -= 1

    async def _tried(self, digest: bytes, grammar: bytes, key: str) -> TrialResult:
        # A client that leaves ends nothing that a worker has begun: that ends by itself, in time.
        result = await self._quickly(digest, grammar, key)
        if result is None:
            result = await self._slowly(digest, grammar, key)
        self._remember(digest, result)
        return result

    async def _quickly(self, digest: bytes, grammar: bytes, key: str) -> TrialResult | None:
        """The result of a short trial; None if it takes longer."""
        limit_seconds = min(QUICK_SECONDS, self.timeout_seconds)
        await self._turn(self._quick, key)
        try:
            self._require_somebody(digest)
            answer = await self._pool.ask(grammar, limit_seconds)
        finally:
            self._quick.give(key)
        if answer.signal == signal.SIGALRM and limit_seconds < self.timeout_seconds:
            return None
        return self._judged(answer)

    async def _slowly(self, digest: bytes, grammar: bytes, key: str) -> TrialResult:
        """The result of a trial as long as any may take, when it is the key's turn."""
        await self._turn(self._slow, key)
        seconds = 0.0
        try:
            self._require_somebody(digest)
            answer = await self._pool.ask(grammar, self.timeout_seconds)
            result = self._judged(answer)
            seconds = 0.0 if result.refusal else answer.seconds
            return result
        finally:
            # EngineCore compiles it once more, and has few threads for that.
            asyncio.get_running_loop().call_later(seconds, partial(self._slow.give, key))

    async def _turn(self, lane: Lane, key: str) -> None:
        """Take a place of a lane.

        Raises:
            NotReadyError: the grammars of others, or the key's own, come first for too long.
        """
        try:
            async with asyncio.timeout(self.timeout_seconds):
                await lane.take(key)
        except TimeoutError:
            raise NotReadyError(
                "The grammar has to be checked first, and too many others are ahead of it.",
                retry_after_seconds=int(self.timeout_seconds),
            ) from None

    def _judged(self, answer: Answer) -> TrialResult:
        until_seconds = asyncio.get_running_loop().time() + REFUSALS_SECONDS
        said = answer.said
        if said is not None and "error" not in said:
            return _accepted(said)
        if said is not None and said["error"] != OUT_OF_MEMORY:
            return TrialResult(str(said["error"]), until_seconds=until_seconds)
        if answer.signal == signal.SIGALRM:
            cause = f"it takes longer than {self.timeout_seconds:g} s to compile"
        elif said is None:
            cause = "the process that compiled it crashed"
        else:
            cause = f"it takes more than {MEMORY_BYTES >> 30} GiB of memory to compile"
        request_id = current_request().request_id
        died = f" ({signal_name(answer.signal)})" if answer.signal else ""
        logger.warning("refused the grammar of request %s: %s%s", request_id, cause, died)
        return TrialResult(
            f"The grammar of the request is refused: {cause}.", until_seconds=until_seconds
        )

    def _require_somebody(self, digest: bytes) -> None:
        trial = self._trials.get(digest)
        if trial is None or not trial.waiting:
            raise NotReadyError("The client has left.")

    def _ended(self, digest: bytes, task: asyncio.Task[TrialResult]) -> None:
        self._trials.pop(digest, None)
        if not task.cancelled():
            task.exception()  # retrieved, even if every waiting request has left

    def _remembered(self, digest: bytes) -> TrialResult | None:
        result = self._results.get(digest)
        if result is None:
            return None
        until_seconds = result.until_seconds
        if until_seconds is not None and asyncio.get_running_loop().time() > until_seconds:
            del self._results[digest]
            return None
        self._results.move_to_end(digest)
        return result

    def _remember(self, digest: bytes, result: TrialResult) -> None:
        if len(str(result.changed)) <= LONGEST_REMEMBERED_BYTES:
            self._results[digest] = result
        if len(self._results) > MOST_RESULTS:
            self._results.popitem(last=False)


def _accepted(said: Mapping[str, Any]) -> TrialResult:
    """What a worker says, which native code of a client's may have made: by name and type."""
    names = {one.name for one in fields(StructuredOutputsParams) if one.init}
    changed = {name: value for name, value in said["changed"].items() if name in names}
    return TrialResult(
        backend=str(said["backend"]), was_auto=bool(said["was_auto"]), changed=changed
    )


def _text(constraint: StructuredOutputsParams) -> bytes:
    """The fields that were set, as JSON.

    Raises:
        VLLMValidationError: they are too large, or are not JSON.
    """
    given = {
        one.name: value
        for one in fields(constraint)
        if one.init and (value := getattr(constraint, one.name)) is not one.default
    }
    if _is_longer(given, LONGEST_BYTES):
        raise VLLMValidationError(_TOO_LARGE)
    try:
        text = json.dumps(given).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise VLLMValidationError(f"The grammar is not JSON: {error}.") from error
    if len(text) > LONGEST_BYTES:
        raise VLLMValidationError(_TOO_LARGE)
    return text


_TOO_LARGE = f"The grammar of the request is larger than {LONGEST_BYTES >> 10} KiB."


def _is_longer(value: Any, most_bytes: int) -> bool:
    """Whether its JSON is longer than this, found without producing all of it."""
    left, todo = most_bytes, [value]
    while todo and left >= 0:
        one = todo.pop()
        if isinstance(one, str):
            left -= len(one)
        elif isinstance(one, Mapping):
            left -= len(one)
            todo.extend(one.keys())
            todo.extend(one.values())
        elif isinstance(one, list | tuple):
            left -= len(one)
            todo.extend(one)
        left -= 1
    return left < 0


def grammars_for(config: Any, timeout_seconds: float) -> Grammars:
    """What checks the grammars of clients for the model of a configuration of vLLM."""
    pool = Pool(
        partial(Compiler, config),
        workers=QUICK_PLACES + SLOW_PLACES,
        memory_bytes=MEMORY_BYTES,
    )
    return Grammars(pool, timeout_seconds=timeout_seconds)
