"""Which sequence goes to the engine next, and how many may be there at once?

Of several keys, the one with the fewest sequences in the engine is next. A key whose prompts the
engine has not read yet gives way, however few it has there.

One request may ask for many sequences, by `n` and by many prompts. Each of them has its own turn,
so a request has no more of the engine than its key may have, and vLLM's queue, which is first come,
first served, stays short. Capacity is counted in requests before vLLM's application, and in
sequences before its engine. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from holdfast.records import EngineFacts
from holdfast.request_context import RequestContext

SPARE_SHARE = 8
"""One place in so many is beyond what the engine runs at once: when a request ends, the next is
there already, and no step goes by with a gap."""
LEAST_SPARE = 2
KEPT_SHARE = 8
"""Of what runs at once, one in so many at most is kept for keys that have nothing there."""
STEPS_ALONE = 4
"""Steps that the engine has to read of a key while nobody else asks: it never runs out of them."""


def running_at_once(config: Any) -> int:
    """How many sequences an engine of vLLM's configuration runs at once."""
    return _running(config.scheduler_config.max_num_seqs, config.parallel_config.data_parallel_size)


def _running(max_num_seqs: int, data_parallel_size: int) -> int:
    """All replicas together."""
    return max_num_seqs * data_parallel_size


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of one engine: unlimited while none is known."""

    running: float = math.inf
    """What the engine runs at once."""
    count: float = math.inf
    """Those, and a few more, so that the next is there when one ends."""
    step_tokens: float = math.inf
    """Tokens of prompts that the engine works through in one step."""

    @classmethod
    def of(cls, facts: EngineFacts | None) -> Capacity:
        """Return the capacity of an engine, within vLLM's own bound (`--max-num-queued-reqs`)."""
        if facts is None:
            return cls()
        running = _running(facts.max_num_seqs, facts.data_parallel_size)
        wanted = running + max(LEAST_SPARE, running // SPARE_SHARE)
        bound = facts.max_queued_requests
        return cls(
            running,
            wanted if bound is None else max(1, min(wanted, bound)),
            facts.max_num_batched_tokens * facts.data_parallel_size,
        )

    def has_room(self, *, taken: int, by_key: int, keys_inside: int, keys: int) -> bool:
        """Return whether a key with `by_key` of the `taken` requests may have another.

        While some of the `keys` have nothing there, a few of what runs at once are kept for them:
        one that comes waits for nobody's long answer. With a single key, or when all are there,
        nothing is kept.
        """
        absent = keys - keys_inside
        if not by_key or absent < 1 or math.isinf(self.running):
            return taken < self.count
        kept = min(max(1, self.running // KEPT_SHARE), absent)
        return taken < min(self.running - kept, self.count - 1)

    def has_room_for_prompt(self, tokens: int, *, unread_tokens: int, is_shared: bool) -> bool:
        """Whether the engine may have a prompt of a key of which it has `unread_tokens` to read.

        vLLM reads prompts in the order in which they come, so that the prompts of one key would
        keep another's waiting however short that is. Beside others a key has one step of the
        engine ahead of them, alone `STEPS_ALONE`; a longer prompt goes alone.
        """
        steps = 1 if is_shared else STEPS_ALONE
        return not unread_tokens or unread_tokens + tokens <= steps * self.step_tokens


LEAST_SEQUENCES = 2048
"""A request may have so many at a time, or some for each that runs: as many as OpenAI's API
embeds at once."""
SEQUENCES_FOR_EACH_RUNNING = 8


@dataclass(slots=True, eq=False)
class _Sequence:
    """One sequence, from when vLLM knows it until the engine is done with it."""

    context: RequestContext
    prompt_tokens: int = 0
    is_inside: bool = False
    waiter: asyncio.Future[bool] | None = None


@dataclass(slots=True, eq=False)
class Turns:
    """The sequences of one generation of the engine. Among those of one key, the order stays."""

    capacity: Capacity = field(default_factory=Capacity)
    count_keys: Callable[[], int] = lambda: 0
    """How many keys there are; nobody has to wait for a turn where it is fewer than two."""
    _sequences: dict[str, _Sequence] = field(default_factory=dict)
    _queues: OrderedDict[str, OrderedDict[str, _Sequence]] = field(default_factory=OrderedDict)
    """By key, in the order of their turns; none is empty."""
    _inside: Counter[str] = field(default_factory=Counter)
    """By key; none is 0."""
    _taken: int = 0
    _reading: dict[str, _Sequence] = field(default_factory=dict)
    """Those in the engine whose prompts it has not read to the end."""
    _unread: Counter[str] = field(default_factory=Counter)
    """Tokens of their prompts by key; none is 0."""
    _error: Callable[[], Exception] | None = None
    """What there is to say once the engine is gone."""

    @property
    def most_sequences(self) -> float:
        """What a request may have at a time, waiting and in the engine."""
        return most_sequences(self.capacity.running)

    def register(self, name: str, context: RequestContext, prompt_tokens: int = 0) -> None:
        """vLLM has a sequence, which will `leave` in any case."""
        self._sequences[name] = _Sequence(context, prompt_tokens)
        context.sequences += 1

    async def enter(self, name: str) -> bool:
        """Return when it is its turn; False if it was given up meanwhile.

        What is not registered, and what is in the engine already, does not wait. Once the engine is
        gone, nothing has a turn any more.
        """
        if self._error is not None:
            raise self._error()
        sequence = self._sequences.get(name)
        if sequence is None or sequence.is_inside:
            return True
        key = sequence.context.key
        if sequence.context.is_probe or (key not in self._queues and self._has_capacity(sequence)):
            self._let_in(name, sequence)
            self._advance()  # nothing is kept any more for a key that is there
            return True
        sequence.waiter = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key, OrderedDict())[name] = sequence
        self._advance()
        with sequence.context.waiting():
            return await sequence.waiter

    def leave(self, name: str) -> None:
        """The engine is done with a sequence, or it is given up, wherever it is."""
        sequence = self._sequences.pop(name, None)
        if sequence is None:
            return
        context = sequence.context
        if sequence.is_inside:
            self._has_read(name)
            self._taken -= 1
            self._inside[context.key] -= 1
            if not self._inside[context.key]:
                del self._inside[context.key]
        elif sequence.waiter is not None:
            self._remove(name, context.key)
            if not sequence.waiter.done():
                sequence.waiter.set_result(False)
        self._advance()
        context.sequences -= 1
        if not context.sequences:
            context.engine_is_done()

    def step_ended(self, is_read: Callable[[str], bool]) -> None:
        """The engine has made a step; `is_read` says of a sequence whether its prompt is read."""
        if read := [name for name in self._reading if is_read(name)]:
            for name in read:
                self._has_read(name)
            self._advance()

    def unsent(self, request_ids: Callable[[str], Iterable[str]]) -> frozenset[str]:
        """The calls that have a sequence here, and none of them in the engine.

        `request_ids` says which call a sequence may be of.
        """
        found: dict[bool, set[str]] = {False: set(), True: set()}
        for name, sequence in self._sequences.items():
            found[sequence.is_inside].update(request_ids(name))
        return frozenset(found[False] - found[True])

    def end(self, error: Callable[[], Exception]) -> None:
        """The engine is gone: what waits, or comes later, gets an error."""
        self._error = error
        self._queues.clear()
        for sequence in self._sequences.values():
            if sequence.waiter is not None and not sequence.waiter.done():
                sequence.waiter.set_exception(error())
            sequence.context.sequences -= 1
        self._sequences.clear()
        self._inside.clear()
        self._reading.clear()
        self._unread.clear()
        self._taken = 0

    def _has_capacity(self, sequence: _Sequence) -> bool:
        keys = self.count_keys()
        key = sequence.context.key
        return keys < 2 or (
            self._has_room_for_prompt(sequence)
            and self.capacity.has_room(
                taken=self._taken,
                by_key=self._inside.get(key, 0),
                keys_inside=len(self._inside),
                keys=keys,
            )
        )

    def _has_room_for_prompt(self, sequence: _Sequence) -> bool:
        key = sequence.context.key
        return self.capacity.has_room_for_prompt(
            sequence.prompt_tokens,
            unread_tokens=self._unread.get(key, 0),
            is_shared=any(other != key for other in chain(self._inside, self._queues)),
        )

    def _let_in(self, name: str, sequence: _Sequence) -> None:
        sequence.is_inside = True
        self._taken += 1
        self._inside[sequence.context.key] += 1
        if sequence.prompt_tokens:
            self._reading[name] = sequence
            self._unread[sequence.context.key] += sequence.prompt_tokens

    def _has_read(self, name: str) -> None:
        if (sequence := self._reading.pop(name, None)) is not None:
            key = sequence.context.key
            self._unread[key] -= sequence.prompt_tokens
            if not self._unread[key]:
                del self._unread[key]

    def _advance(self) -> None:
        while (waiting := self._next()) is not None:
            name, sequence = waiting
            key = sequence.context.key
            self._remove(name, key)
            if key in self._queues:
                self._queues.move_to_end(key)
            if sequence.waiter is not None and not sequence.waiter.done():
                self._let_in(name, sequence)
                sequence.waiter.set_result(True)

    def _next(self) -> tuple[str, _Sequence] | None:
        """The first of the key that has the fewest there, of those whose next one may go in."""
        # Of keys with as many the first: one that had a turn goes to the end.
        for key in sorted(self._queues, key=self._inside.__getitem__):
            name, sequence = next(iter(self._queues[key].items()))
            if self._has_capacity(sequence):
                return name, sequence
        return None

    def _remove(self, name: str, key: str) -> None:
        queue = self._queues.get(key, OrderedDict())
        queue.pop(name, None)
        if not queue:
            self._queues.pop(key, None)


def most_sequences(running: float) -> float:
    """What a request may have at a time of an engine that runs so many."""
    return max(LEAST_SEQUENCES, SEQUENCES_FOR_EACH_RUNNING * running)
