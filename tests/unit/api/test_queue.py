"""The order in which requests are admitted, and the rate at which they are served."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from holdfast.api.queue import RATE_MEMORY_SECONDS, FairQueue, ServiceRate, Ticket
from holdfast.engine.requests.sequence_queue import Capacity
from stub_engine import FakeClock


def a_queue(capacity: float = 1, max_waiting: int = 100) -> FairQueue:
    return FairQueue(lambda: Capacity(capacity, capacity), max_waiting=max_waiting)


def admitted(queue: FairQueue, tickets: Sequence[Ticket]) -> list[str]:
    """The keys of tickets in the order in which they are admitted, one after the other."""
    order: list[str] = []
    while waiting := [ticket for ticket in tickets if ticket.status == "waiting"]:
        queue.leave(next(ticket for ticket in tickets if ticket.status == "admitted"))
        order += [ticket.key for ticket in waiting if ticket.status == "admitted"]
    return order


def test_keys_take_turns() -> None:
    """A key that asks for much waits no less than one that asks for little."""
    queue = a_queue()
    tickets = [queue.join(key) for key in ("a", "a", "a", "a", "b", "c", "b")]
    assert admitted(queue, tickets) == ["a", "b", "c", "a", "b", "a"]


def test_no_request_overtakes_a_waiting_one() -> None:
    """Capacity that became free while the queue stood still goes to the longest-waiting request."""
    count = 0.0
    queue = FairQueue(lambda: Capacity(count, count), max_waiting=100)
    first = queue.join("a")
    count = 1.0
    second = queue.join("b")
    queue.advance()
    assert (first.status, second.status) == ("admitted", "waiting")


def test_a_full_queue_refuses() -> None:
    """Beyond the bound no request waits."""
    queue = a_queue(capacity=1, max_waiting=1)
    assert [queue.join("a").status for _ in range(3)] == ["admitted", "waiting", "refused"]


def test_a_full_queue_is_shared() -> None:
    """Another key displaces requests of the one that fills the queue, until both are equal."""
    queue = a_queue(capacity=1, max_waiting=4)
    crowd = [queue.join("a") for _ in range(5)]
    late = [queue.join("b") for _ in range(4)]
    assert [ticket.status for ticket in crowd] == ["admitted"] + ["waiting"] * 2 + ["refused"] * 2
    assert [ticket.status for ticket in late] == ["waiting"] * 2 + ["refused"] * 2


def test_the_key_with_the_fewest_is_next() -> None:
    """However many turns it has had: a key that is served quickly is not made to wait for that."""
    queue = a_queue(capacity=3)
    heavy = [queue.join("heavy") for _ in range(4)]
    light = queue.join("light")
    queue.leave(heavy[0])
    assert (light.status, heavy[3].status) == ("admitted", "waiting")
    again = queue.join("light")
    queue.leave(light)
    assert (again.status, heavy[3].status) == ("admitted", "waiting")
    queue.leave(heavy[1])
    assert heavy[3].status == "admitted"


def test_a_request_that_needs_no_capacity_passes() -> None:
    """However full the engine is; it waits only while nobody is admitted."""
    count = 1.0
    queue = FairQueue(lambda: Capacity(count, count), max_waiting=2)
    queue.join("a")
    waiting = queue.join("a")
    assert queue.join("b", needs_capacity=False).status == "admitted"
    count = 0.0
    passer = queue.join("b", needs_capacity=False)
    assert queue.join("b", needs_capacity=False).status == "refused"
    count = 1.0
    queue.advance()
    assert (passer.status, waiting.status) == ("admitted", "waiting")


def test_a_request_without_capacity_shares_the_queue_too() -> None:
    """One key that fills it while nobody is admitted keeps no other out."""
    queue = a_queue(0, max_waiting=3)
    lookers = [queue.join("a", needs_capacity=False) for _ in range(3)]
    assert [queue.join("b").status for _ in range(2)] == ["waiting", "refused"]
    assert [ticket.status for ticket in lookers] == ["waiting", "waiting", "refused"]


def test_a_returning_request_is_before_those_that_wait_for_the_first_time() -> None:
    """Earlier returned ones are before it, and other keys have their turn."""
    queue = a_queue(capacity=3)
    one, two, busy = (queue.join("a") for _ in range(3))
    for ticket in (one, two):
        queue.set_aside(ticket)
    fresh = [queue.join(key) for key in ("a", "a", "a", "b")]
    for ticket in (one, two):
        queue.come_back(ticket)
    assert (queue.admitted, queue.waiting) == (3, 4)
    for ticket in (busy, fresh[0]):
        queue.leave(ticket)
    assert [ticket.status for ticket in (one, two)] == ["admitted", "waiting"]
    assert [ticket.status for ticket in fresh[2:]] == ["waiting", "admitted"]


def test_no_admitted_request_is_refused_by_a_full_queue() -> None:
    """It comes back however many wait."""
    queue = a_queue(capacity=1, max_waiting=1)
    ticket = queue.join("a")
    queue.set_aside(ticket)
    others = [queue.join("a") for _ in range(2)]
    queue.come_back(ticket)
    assert (ticket.status, queue.waiting) == ("waiting", 2)
    queue.leave(others[0])
    assert (ticket.status, others[1].status) == ("admitted", "waiting")


class Queues(RuleBasedStateMachine):
    """Random lives of tickets, beside a model that is a list."""

    tickets = Bundle("tickets")
    keys, kept = 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 2
        self.queue = FairQueue(
            lambda: Capacity(self.capacity, self.capacity),
            max_waiting=5,
            count_keys=lambda: self.keys,
        )
        self.joined: list[Ticket] = []
        self.returned: set[Ticket] = set()

    @rule(target=tickets, key=st.sampled_from("abc"), needs_capacity=st.booleans())
    def join(self, key: str, needs_capacity: bool) -> Ticket:
        before = self.queue.waiting
        ticket = self.queue.join(key, needs_capacity=needs_capacity)
        if ticket.status == "refused":
            assert before >= 5
        self.joined.append(ticket)
        return ticket

    @rule(ticket=consumes(tickets))
    def leave(self, ticket: Ticket) -> None:
        self.queue.leave(ticket)
        self.queue.leave(ticket)

    @rule(ticket=tickets)
    def refuse(self, ticket: Ticket) -> None:
        self.queue.refuse(ticket, "timed_out")

    @rule(capacity=st.integers(0, 4))
    def change(self, capacity: int) -> None:
        self.capacity = capacity
        self.queue.advance()

    @invariant()
    def counts_are_those_of_the_tickets(self) -> None:
        waiting = [ticket for ticket in self.joined if ticket.status == "waiting"]
        admitted = [ticket for ticket in self.joined if ticket.status == "admitted"]
        assert self.queue.waiting == len(waiting) <= 5 + len(self.returned)
        assert self.queue.admitted == len(admitted)
        for key in "abc":
            of_key = sum(ticket.key == key for ticket in (*waiting, *admitted))
            assert self.queue.count(key) == of_key

    @rule(ticket=tickets)
    def release(self, ticket: Ticket) -> None:
        self.queue.release(ticket)

    @rule(ticket=tickets)
    def set_aside(self, ticket: Ticket) -> None:
        self.queue.set_aside(ticket)

    @rule(ticket=tickets)
    def come_back(self, ticket: Ticket) -> None:
        if ticket.needs_capacity:
            self.queue.come_back(ticket)
            self.returned.add(ticket)

    @invariant()
    def no_place_is_lost_and_none_is_given_twice(self) -> None:
        placed = sum(ticket.has_capacity for ticket in self.joined)
        wanting = any(t.status == "waiting" and t.needs_capacity for t in self.joined)
        assert placed >= self.capacity - self.kept or not wanting

    @invariant()
    def a_key_without_a_place_waits_only_for_a_full_engine(self) -> None:
        placed = {ticket.key for ticket in self.joined if ticket.has_capacity}
        waiting = {t.key for t in self.joined if t.status == "waiting" and t.needs_capacity}
        assert not waiting - placed or self.queue.waiting == 0 or self._count() >= self.capacity

    def _count(self) -> int:
        return sum(ticket.has_capacity for ticket in self.joined)

    @invariant()
    def a_key_is_served_in_order(self) -> None:
        for key in "abc":
            of_key = [t for t in self.joined if t.key == key and t.needs_capacity]
            of_key = [t for t in of_key if t not in self.returned]
            first = next((n for n, t in enumerate(of_key) if t.status == "waiting"), len(of_key))
            assert all(ticket.status != "admitted" for ticket in of_key[first:])


class SharedQueues(Queues):
    """Queues of several keys, each of which leaves the others some capacity."""

    keys, kept = 3, 1


TestQueues = Queues.TestCase
TestSharedQueues = SharedQueues.TestCase


def test_the_rate_is_that_of_a_full_engine() -> None:
    """An hour in which little was asked says nothing of what can be done."""
    clock = FakeClock()
    rate = ServiceRate(clock)
    clock.now_seconds += 3600.0
    rate.done()
    assert rate.per_second is None
    rate.saturated(is_saturated=True)
    for _ in range(20):
        clock.now_seconds += 0.5
        rate.done()
    rate.saturated(is_saturated=False)
    clock.now_seconds += 3600.0
    assert rate.per_second == pytest.approx(2.0, rel=0.05)


def test_a_request_that_comes_back_for_more_is_done_once() -> None:
    """Or others would be told to come again too soon."""
    clock = FakeClock()
    queue = FairQueue(lambda: Capacity(1, 1), max_waiting=10, rate=ServiceRate(clock))
    ticket, other = queue.join("a"), queue.join("a")
    clock.now_seconds += 1.0
    queue.release(ticket)
    queue.come_back(ticket)
    queue.leave(other)
    clock.now_seconds += 1.0
    for leave in (queue.release, queue.leave):
        leave(ticket)
    assert queue.rate.per_second == pytest.approx(1.0, rel=0.05)


def test_the_rate_forgets() -> None:
    """An engine that has become slower is believed after a minute or two."""
    clock = FakeClock()
    rate = ServiceRate(clock)
    rate.saturated(is_saturated=True)
    for seconds in [0.1] * 1000 + [2.0] * 100:
        clock.now_seconds += seconds
        rate.done()
    assert rate.per_second == pytest.approx(0.5, rel=0.1)
    clock.now_seconds += 10 * RATE_MEMORY_SECONDS
    assert (rate.per_second or 1.0) < 0.01
