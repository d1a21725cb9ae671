"""Decides which sequence goes to the engine next, and how many may be there at once.

The key with the fewest sequences in the engine is next. A key whose prompts the engine has not read
yet gives way, however few it has there.

One request may ask for many sequences, by `n` and by many prompts. Each of them takes its own turn,
so a request gets no more of the engine than its key may have, and vLLM's queue, which is first
come, first served, stays short. Capacity counts requests in front of vLLM's application, and
sequences in front of its engine. Belongs to one event loop.
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
"""One place in this many is beyond what the engine runs at once: when a request ends, the next is
there already, so no step runs with a gap."""
LEAST_SPARE = 2
KEPT_SHARE = 8
"""At most one running place in this many is kept for keys that have nothing there."""
STEPS_ALONE = 4
"""How many steps of a key's prompts a lone key may queue, so the engine never runs out."""


def running_at_once(config: Any) -> int:
    """Return how many sequences an engine of this configuration runs at once."""
    return _running(config.scheduler_config.max_num_seqs, config.parallel_config.data_parallel_size)


def _running(max_num_seqs: int, data_parallel_size: int) -> int:
    """Return what all replicas together run at once."""
    return max_num_seqs * data_parallel_size


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of one engine: unlimited while none is known."""

    running: float = math.inf
    """What the engine runs at once."""
    count: float = math.inf
    """The running ones and a few more, so that the next is there when one ends."""
    step_tokens: float = math.inf
    """How many prompt tokens the engine processes in one step."""

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

        While some of the `keys` have nothing there, a few running places are kept for them, so
        that a newcomer need not wait for another key's long answer. With a single key, or when
        all are there, nothing is kept.
        """
        absent = keys - keys_inside
        if not by_key or absent < 1 or math.isinf(self.running):
            return taken < self.count
        kept = min(max(1, self.running // KEPT_SHARE), absent)
        return taken < min(self.running - kept, self.count - 1)

    def has_room_for_prompt(self, tokens: int, *, unread_tokens: int, is_shared: bool) -> bool:
        """Whether the engine may take a prompt of a key that already has `unread_tokens` there.

        vLLM reads prompts in order of arrival, so one key's prompts would keep another's waiting,
        however short that is. A key may queue one step of the engine beside others, and
        `STEPS_ALONE` steps alone; a longer prompt goes alone.
        """
        steps = 1 if is_shared else STEPS_ALONE
        return not unread_tokens or unread_tokens + tokens <= steps * self.step_tokens


LEAST_SEQUENCES = 2048
"""A request may have at least this many at a time, as many as OpenAI's API embeds at once."""
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
    """Orders the sequences of one generation of the engine; one key's stay in order."""

    capacity: Capacity = field(default_factory=Capacity)
    count_keys: Callable[[], int] = lambda: 0
    """Counts the keys; with fewer than two, no key has to wait for another."""
    _sequences: dict[str, _Sequence] = field(default_factory=dict)
    _queues: OrderedDict[str, OrderedDict[str, _Sequence]] = field(default_factory=OrderedDict)
    """Waiting sequences by key, in the order of their turns; none is empty."""
    _inside: Counter[str] = field(default_factory=Counter)
    """How many sequences each key has in the engine; none is 0."""
    _taken: int = 0
    _reading: dict[str, _Sequence] = field(default_factory=dict)
    """Sequences in the engine whose prompts it has not read to the end."""
    _unread: Counter[str] = field(default_factory=Counter)
    """The tokens of those prompts by key; none is 0."""
    _error: Callable[[], Exception] | None = None
    """Makes the error to raise once the engine is gone."""

    @property
    def most_sequences(self) -> float:
        """How many sequences a request may have at a time, waiting and in the engine."""
        return most_sequences(self.capacity.running)

    def register(self, name: str, context: RequestContext, prompt_tokens: int = 0) -> None:
        """Add a sequence that vLLM has just accepted, and that will `leave` in any case."""
        self._sequences[name] = _Sequence(context, prompt_tokens)
        context.sequences += 1

    async def enter(self, name: str) -> bool:
        """Return when the sequence has its turn; False if it was aborted meanwhile.

        A sequence that is not registered, or is in the engine already, does not wait. Once the
        engine is gone, no sequence gets a turn any more.
        """
        if self._error is not None:
            raise self._error()
        sequence = self._sequences.get(name)
        if sequence is None or sequence.is_inside:
            return True
        key = sequence.context.key
        if sequence.context.is_probe or (key not in self._queues and self._has_capacity(sequence)):
            self._let_in(name, sequence)
            self._advance()  # no place is kept any more for a key that is there
            return True
        sequence.waiter = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key, OrderedDict())[name] = sequence
        self._advance()
        with sequence.context.waiting():
            return await sequence.waiter

    def leave(self, name: str) -> None:
        """Remove a sequence, wherever it is: it is finished or aborted."""
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
        """Note the end of a step; `is_read` tells whether the prompt of a sequence is read."""
        if read := [name for name in self._reading if is_read(name)]:
            for name in read:
                self._has_read(name)
            self._advance()

    def unsent(self, request_ids: Callable[[str], Iterable[str]]) -> frozenset[str]:
        """The calls that have sequences here, and none of them in the engine.

        `request_ids` returns the calls that a sequence may belong to.
        """
        found: dict[bool, set[str]] = {False: set(), True: set()}
        for name, sequence in self._sequences.items():
            found[sequence.is_inside].update(request_ids(name))
        return frozenset(found[False] - found[True])

    def end(self, error: Callable[[], Exception]) -> None:
        """Raise an error in every waiting and every later sequence: the engine is gone."""
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
        """The first of the key with the fewest there, among keys whose next one may go in."""
        # The first of equal keys wins: a key that had a turn goes to the end.
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
    """Return how many a request may have at a time if the engine runs this many."""
    return max(LEAST_SEQUENCES, SEQUENCES_FOR_EACH_RUNNING * running)
