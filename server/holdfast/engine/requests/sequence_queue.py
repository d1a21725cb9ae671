"""Decides which sequence goes to the engine next, and how many may be there at once.

The key with the fewest sequences in the engine is next. A key with prompts that the engine has not
processed yet gives way, however few sequences it has there.

One request may ask for many sequences, by `n` and by many prompts. Each of them is queued by
itself, so a request gets no more of the engine than its key may have, and vLLM's queue, which is
first come, first served, stays short. Capacity counts requests in front of vLLM's application, and
sequences in front of its engine. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from holdfast.records import EngineFacts
from holdfast.request_context import RequestContext

SPARE_SHARE = 8
"""The engine gets one sequence in this many beyond what it runs at once: when one ends, the next is
there already, so no step runs with a gap."""
LEAST_SPARE = 2
KEPT_SHARE = 8
"""At most one sequence in this many is kept free for keys that have none in the engine, and as many
for keys that have less than their share."""
STEPS_ALONE = 4
"""How many steps' worth of prompts a lone key may have in the engine, which never runs out then."""


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
    """What the engine gets: those that it runs, and a few that are ready when one ends."""
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

    def has_room(self, key: str, inside: Mapping[str, int], *, taken: int, keys: int) -> bool:
        """Return whether `key` may have another sequence beside the `taken`, `inside` by key.

        A little capacity is kept free for those of the `keys` that have none, so that a newcomer
        need not wait for another key's long answer. A key that has its share or more of what runs
        at once also leaves room for those with less, so that they may double; an engine that runs
        fewer than `KEPT_SHARE` has none to leave. With a single key nothing is kept free.
        """
        own = inside.get(key, 0)
        if not own or math.isinf(self.running):
            return taken < self.count
        bound = self.running // KEPT_SHARE
        share = self.running / len(inside)
        kept = min(max(1, bound), max(0, keys - len(inside)))
        if own >= share:
            kept += min(bound, sum(count for count in inside.values() if count < share))
        return taken < (min(self.running - kept, self.count - 1) if kept else self.count)

    def has_room_for_prompt(self, tokens: int, *, unread_tokens: int, is_shared: bool) -> bool:
        """Return whether the engine may take a prompt of a key with `unread_tokens` there.

        vLLM processes prompts in order of arrival, so one key's prompts would keep another's
        waiting, however short that is. A key may have prompts for one step there beside others,
        and for `STEPS_ALONE` steps alone; a longer prompt goes by itself.
        """
        steps = 1 if is_shared else STEPS_ALONE
        return not unread_tokens or unread_tokens + tokens <= steps * self.step_tokens


class PresentCapacity:
    """The capacity of the present engine, which is asked for with each request."""

    def __init__(self, facts: Callable[[], EngineFacts | None]) -> None:
        """Take `facts`, which returns the same object as long as the engine is the same."""
        self._facts = facts
        self._known_facts: EngineFacts | None = None
        self._known = Capacity()

    def __call__(self) -> Capacity:
        """Return it; unlimited before the first engine."""
        facts = self._facts()
        if facts is not self._known_facts:
            self._known_facts, self._known = facts, Capacity.of(facts)
        return self._known


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
class SequenceQueue:
    """Queues the sequences of one generation of the engine; one key's stay in order."""

    capacity: Capacity = field(default_factory=Capacity)
    count_keys: Callable[[], int] = lambda: 0
    """Counts the keys; with fewer than two, no key has to wait for another."""
    is_gone: Callable[[], bool] = lambda: False
    """Whether the engine is dead, and so gets nothing more, even before `end` is called."""
    _sequences: dict[str, _Sequence] = field(default_factory=dict)
    _queues: OrderedDict[str, OrderedDict[str, _Sequence]] = field(default_factory=OrderedDict)
    """Waiting sequences by key, the key that is next first; none is empty."""
    _inside: Counter[str] = field(default_factory=Counter)
    """How many sequences each key has in the engine; no count is 0."""
    _inside_count: int = 0
    _reading: dict[str, _Sequence] = field(default_factory=dict)
    """Sequences in the engine with prompts that it has not fully processed."""
    _unread: Counter[str] = field(default_factory=Counter)
    """The tokens of those prompts by key; no count is 0."""
    _error: Callable[[], Exception] | None = None
    """Makes the error to raise while the engine takes nothing; None while it does."""

    @property
    def max_sequences(self) -> float:
        """How many sequences a request may have at a time, waiting and in the engine."""
        return max_sequences(self.capacity.running)

    @property
    def waiting(self) -> int:
        """How many sequences wait for their turn. Any thread may ask."""
        return len(self._sequences) - self._inside_count

    @property
    def sent(self) -> int:
        """How many sequences the engine has. Any thread may ask."""
        return self._inside_count

    def has_sent(self, name: str) -> bool:
        """Whether the engine has a sequence."""
        return name in self._sequences and self._sequences[name].is_inside

    def register(self, name: str, context: RequestContext, prompt_tokens: int = 0) -> None:
        """Add a sequence that vLLM has just accepted, and that will `leave` in any case."""
        self._sequences[name] = _Sequence(context, prompt_tokens)
        context.sequences += 1

    async def enter(self, name: str) -> bool:
        """Return when the sequence may go to the engine; False if it was aborted meanwhile.

        A sequence that is not registered, or is in the engine already, does not wait. While the
        engine takes nothing, `enter` raises the error given to `stop` or `end`.
        """
        if self._error is not None:
            raise self._error()
        sequence = self._sequences.get(name)
        if sequence is None or sequence.is_inside:
            return True
        key = sequence.context.key
        if sequence.context.is_probe or (key not in self._queues and self._has_capacity(sequence)):
            self._admit(name, sequence)
            self._admit_waiting()  # nothing is kept free for this key any more
            return True
        sequence.waiter = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key, OrderedDict())[name] = sequence
        self._admit_waiting()
        with sequence.context.waiting():
            is_admitted = await sequence.waiter
        # Either may have happened since it was admitted, before this task went on.
        if self._error is not None:
            raise self._error()
        return is_admitted and name in self._sequences

    def leave(self, name: str) -> None:
        """Remove a sequence, wherever it is: it is finished or aborted."""
        sequence = self._sequences.pop(name, None)
        if sequence is None:
            return
        context = sequence.context
        if sequence.is_inside:
            self._prompt_read(name)
            self._inside_count -= 1
            self._inside[context.key] -= 1
            if not self._inside[context.key]:
                del self._inside[context.key]
        elif sequence.waiter is not None:
            self._remove(name, context.key)
            if not sequence.waiter.done():
                sequence.waiter.set_result(False)
        self._admit_waiting()
        context.sequences -= 1
        context.release_if_done()

    def step_ended(self, is_read: Callable[[str], bool]) -> None:
        """Record the end of a step; `is_read` tells whether a sequence's prompt is processed."""
        if read := [name for name in self._reading if is_read(name)]:
            for name in read:
                self._prompt_read(name)
            self._admit_waiting()

    def unsent(
        self, requests: Iterable[str], request_ids: Callable[[str], Iterable[str]]
    ) -> frozenset[str]:
        """Return those of `requests` that have no sequence in the engine.

        `request_ids` returns the requests that a sequence may belong to.
        """
        inside = (name for name, sequence in self._sequences.items() if sequence.is_inside)
        return frozenset(requests).difference(*map(request_ids, inside))

    def prefilling(self) -> tuple[str, ...]:
        """Return the sequences with prompts that the engine has not fully processed."""
        return tuple(
            name
            for name, sequence in self._sequences.items()
            if name in self._reading or not sequence.is_inside
        )

    def stop(self, error: Callable[[], Exception]) -> None:
        """Raise an error in every waiting and every later `enter`, until `go_on`."""
        self._error = error
        self._queues.clear()
        for sequence in self._sequences.values():
            if sequence.waiter is not None and not sequence.waiter.done():
                sequence.waiter.set_exception(error())

    def go_on(self) -> None:
        """Let sequences go to the engine again."""
        self._error = None

    def end(self, error: Callable[[], Exception]) -> None:
        """Stop for good: the engine is gone."""
        # What was asked before refers to the sockets of the engine, which are to be closed soon.
        self.is_gone = lambda: True
        self.stop(error)
        for sequence in self._sequences.values():
            sequence.context.sequences -= 1
        self._sequences.clear()
        self._inside.clear()
        self._reading.clear()
        self._unread.clear()
        self._inside_count = 0

    def _has_capacity(self, sequence: _Sequence) -> bool:
        if self.is_gone():
            return False
        keys = self.count_keys()
        key = sequence.context.key
        return keys < 2 or (
            self._has_room_for_prompt(sequence)
            and self.capacity.has_room(key, self._inside, taken=self._inside_count, keys=keys)
        )

    def _has_room_for_prompt(self, sequence: _Sequence) -> bool:
        key = sequence.context.key
        return self.capacity.has_room_for_prompt(
            sequence.prompt_tokens,
            unread_tokens=self._unread.get(key, 0),
            is_shared=any(other != key for other in chain(self._inside, self._queues)),
        )

    def _admit(self, name: str, sequence: _Sequence) -> None:
        sequence.is_inside = True
        self._inside_count += 1
        self._inside[sequence.context.key] += 1
        if sequence.prompt_tokens:
            self._reading[name] = sequence
            self._unread[sequence.context.key] += sequence.prompt_tokens

    def _prompt_read(self, name: str) -> None:
        if (sequence := self._reading.pop(name, None)) is not None:
            key = sequence.context.key
            self._unread[key] -= sequence.prompt_tokens
            if not self._unread[key]:
                del self._unread[key]

    def _admit_waiting(self) -> None:
        while (waiting := self._next()) is not None:
            name, sequence = waiting
            key = sequence.context.key
            self._remove(name, key)
            if key in self._queues:
                self._queues.move_to_end(key)
            if sequence.waiter is not None and not sequence.waiter.done():
                self._admit(name, sequence)
                sequence.waiter.set_result(True)

    def _next(self) -> tuple[str, _Sequence] | None:
        """Return the next sequence that has capacity, of the key with the fewest in the engine."""
        # The first of equal keys wins: a key that was served goes to the end.
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


def max_sequences(running: float) -> float:
    """Return how many sequences a request may have if the engine runs `running` at once."""
    return max(LEAST_SEQUENCES, SEQUENCES_FOR_EACH_RUNNING * running)
