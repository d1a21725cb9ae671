"""What a follower does, decided without socket, clock or process: events in, actions out.

A follower connects only while no process of an engine is left on its node, so that joining says
that the node is free. It ends its engine at once when the connection is gone, for whatever reason.
Each event returns the actions that it causes, in their order; the caller carries them out, and
reports what comes of them as further events. Times are seconds of a clock that does not jump back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from holdfast.nodes.actions import (
    Disconnect,
    FindFacts,
    FollowerAction,
    GiveUp,
    Send,
    StartEngine,
    StopEngine,
)
from holdfast.nodes.channel import Channel
from holdfast.nodes.frames import MAX_PAYLOAD_BYTES
from holdfast.nodes.messages import (
    MAX_REASON_CHARACTERS,
    End,
    Ended,
    Goodbye,
    Join,
    Lost,
    NodeFacts,
    NodeMessage,
    RankUpdate,
    Refused,
    Start,
    Terms,
    Welcome,
    encoded,
)
from holdfast.nodes.ranks import without_steps
from holdfast.records import Death, RankStats

RETRY_SECONDS = 1.0
SHORT_OF_MEMORY = "its host is short of memory"
SPARE_RETRY_SECONDS = 5.0
"""The pause after the head refused this node, or the node could not tell what it has."""
UPDATE_SECONDS = 0.2
"""The least time between two updates of the statistics: five a second."""

_NOTHING: tuple[tuple[RankStats, ...], bool] = ((), False)
"""What ranks and compilers are before the first look."""

FollowerState = Literal["away", "authenticating", "joining", "waiting", "running", "ending", "left"]
_REMEDIES = {
    "wrong_key": "the head has another key. Remedy: give both nodes the same --node-key-file.",
    "wrong_protocol": "the head runs another version or build of Holdfast. Remedy: install the "
    "same one on every node.",
}


class Follower:
    """Joins a head again and again, and runs the generations that it hands out."""

    def __init__(self, *, key: bytes, name: str, instance: str) -> None:
        self._key = key
        self._name = name
        self._instance = instance
        self._channel: Channel | None = None
        self._has_terms = False
        self._is_welcome = False
        self._has_ever_joined = False
        self._has_ever_run = False
        """Whether a rank has started here, so that flags and variables have once been right."""
        self._has_left = False
        self._parting = ""
        """Why it leaves as soon as it has no engine any more; empty if it stays."""
        self._is_short_of_memory = False
        """Whether the host ran out of memory, and has not had enough since."""
        self._engine: Start | None = None
        """Its processes may exist; None once they are gone."""
        self._engine_channel: Channel | None = None
        """Where the engine was handed out: another head must not hear of it."""
        self._is_stopping = False
        self._retry_seconds = -math.inf
        self._newest = self._sent = _NOTHING
        self._updated_seconds = -math.inf
        self._actions: list[FollowerAction] = []
        self.last_problem = ""
        """Why the last connection ended, for people."""

    @property
    def state(self) -> FollowerState:
        """What it does now. Any thread may ask."""
        channel = self._channel
        if self._engine is not None:
            return "ending" if self._is_stopping else "running"
        if self._has_left:
            return "left"
        if channel is None:
            return "away"
        if not channel.is_open:
            return "authenticating"
        return "waiting" if self._is_welcome else "joining"

    @property
    def is_connected(self) -> bool:
        """Whether it has a connection to a head that has proven the key. Any thread may ask."""
        channel = self._channel
        return channel is not None and channel.is_open

    @property
    def engine(self) -> Start | None:
        """The generation that has processes here, for any thread; None if no process is left."""
        return self._engine

    def wants_connection(self, now_seconds: float) -> bool:
        """Return whether to connect to the head now."""
        is_free = self.state == "away" and not self._is_short_of_memory
        return is_free and now_seconds >= self._retry_seconds

    def connected(self, nonce: bytes, now_seconds: float) -> list[FollowerAction]:
        """Handle a new connection to the head; `nonce` must be random and new."""
        self._channel = Channel("follower", self._key, nonce, now_seconds)
        self._has_terms = self._is_welcome = False
        return self._flushed(now_seconds)

    def not_connected(self, problem: str, now_seconds: float) -> list[FollowerAction]:
        """Handle an attempt to connect that failed."""
        self.last_problem = problem
        self._retry_seconds = now_seconds + RETRY_SECONDS
        return []

    def received(self, data: bytes, now_seconds: float) -> list[FollowerAction]:
        """Handle what was read from the connection."""
        channel = self._channel
        if channel is not None:
            for message in channel.received(data, now_seconds):
                if self._channel is channel and channel.failure is None:
                    self._take(channel, message, now_seconds)
        return self._flushed(now_seconds)

    def disconnected(self, now_seconds: float) -> list[FollowerAction]:
        """Handle the end of the connection."""
        if self._channel is not None:
            self._lose_channel("the head closed the connection", now_seconds)
        return self._flushed(now_seconds)

    def tick(self, now_seconds: float) -> list[FollowerAction]:
        """Handle that time has passed. Call it several times a second."""
        if self._channel is not None:
            self._channel.tick(now_seconds)
            self._update(now_seconds)
        return self._flushed(now_seconds)

    def facts_found(self, facts: NodeFacts, now_seconds: float) -> list[FollowerAction]:
        """Handle the result of `FindFacts`."""
        if self._channel is not None and self.state == "joining" and self._has_terms:
            self._channel.send(Join(self._name, self._instance, facts))
        return self._flushed(now_seconds)

    def facts_missing(self, problem: str, now_seconds: float) -> list[FollowerAction]:
        """Handle that `FindFacts` failed."""
        if self._channel is not None and self.state == "joining" and self._has_terms:
            self._refused(problem, now_seconds, is_final=True)
        return self._flushed(now_seconds)

    def ranks_changed(
        self,
        generation: int,
        ranks: Iterable[RankStats],
        now_seconds: float,
        *,
        is_compiling: bool = False,
    ) -> list[FollowerAction]:
        """Handle new statistics of all ranks here; the head gets them soon, if they differ.

        `is_compiling` says whether one of the ranks waits for a compiler.
        """
        if self._engine is not None and self._engine.generation == generation:
            known = without_steps(ranks)
            self._newest = known, is_compiling
            self._has_ever_run = self._has_ever_run or bool(known)
            self._update(now_seconds)
        return self._flushed(now_seconds)

    def engine_lost(
        self, generation: int, death: Death, now_seconds: float
    ) -> list[FollowerAction]:
        """Handle that the engine cannot go on; its processes may still exist."""
        if self._engine is not None and self._engine.generation == generation:
            self._is_short_of_memory = death.cause == "host_memory"
            self._update(now_seconds, is_last=True)
            # Also if it stops: a death that the head has heard of may follow from this one.
            self._tell(_fitting(Lost(generation, death)))
            self._stop_engine(str(death))
        return self._flushed(now_seconds)

    def engine_refused(
        self, generation: int, line: str, now_seconds: float, *, is_final: bool
    ) -> list[FollowerAction]:
        """Handle that this node cannot run what it was handed out, for the reason in `line`.

        `is_final` says whether that has to be changed on one of the nodes, and does not pass.
        """
        if self._engine is not None and self._engine.generation == generation:
            self._tell(Goodbye(line[:MAX_REASON_CHARACTERS]))
            self._flush()
            self._refused(line, now_seconds, is_final=False)
            if is_final and not self._has_ever_run:
                self._actions.append(GiveUp(line))
        return self._flushed(now_seconds)

    def engine_ended(self, generation: int, now_seconds: float) -> list[FollowerAction]:
        """Handle that no process of the engine is left.

        A node that is short of memory leaves until it has enough: the next engine would end there.
        """
        if self._engine is not None and self._engine.generation == generation:
            # Not after `Ended`: the head would hand out the next generation in between.
            farewell = self._parting or (SHORT_OF_MEMORY if self._is_short_of_memory else "")
            self._tell(Goodbye(farewell) if farewell else Ended(generation))
            self._flush()
            self._engine = self._engine_channel = None
            self._is_stopping = False
            self._has_left = self._has_left or bool(self._parting)
            if farewell and self._channel is not None:
                self._lose_channel(farewell, now_seconds)
        return self._flushed(now_seconds)

    def memory_is_ample(self) -> None:
        """Handle that the host has enough memory, or nobody knows."""
        self._is_short_of_memory = False

    def leave_after_engine(self, reason: str, now_seconds: float) -> list[FollowerAction]:
        """Leave once no process of an engine is left, because the head ends it or is gone."""
        if self._engine is None:
            return self.leave(reason, now_seconds)
        self._parting = reason
        return []

    def leave(self, reason: str, now_seconds: float) -> list[FollowerAction]:
        """End the engine, tell the head, and connect no more."""
        self._has_left = True
        if self._channel is not None:
            self._channel.send(Goodbye(reason))
            self._flush()
            self._lose_channel(reason, now_seconds)
        self._stop_engine(reason)
        return self._flushed(now_seconds)

    def _take(self, channel: Channel, message: NodeMessage, now_seconds: float) -> None:
        match message:
            case Terms(model) if not self._has_terms:
                self._has_terms = True
                self._actions.append(FindFacts(model))
            case Welcome() if self._has_terms and not self._is_welcome:
                self._is_welcome = self._has_ever_joined = True
            case Refused(_, line, is_final) if not self._is_welcome:
                self._refused(line, now_seconds, is_final=is_final)
            case Start() if self._is_welcome and self._engine is None:
                self._start_engine(channel, message)
            case End(generation, reason) if self._is_welcome:
                if self._engine is not None and self._engine.generation == generation:
                    self._stop_engine(reason)
            case Goodbye(reason):
                self._lose_channel(f"the head is shutting down: {reason}", now_seconds)
            case _:
                channel.refuse("malformed", "a message of the head arrived out of order")

    def _start_engine(self, channel: Channel, order: Start) -> None:
        self._engine, self._engine_channel = order, channel
        self._newest = self._sent = _NOTHING
        self._actions.append(StartEngine(order))

    def _stop_engine(self, reason: str) -> None:
        if self._engine is not None and not self._is_stopping:
            self._is_stopping = True
            self._actions.append(StopEngine(self._engine.generation, reason))

    def _refused(self, line: str, now_seconds: float, *, is_final: bool) -> None:
        self._lose_channel(line, now_seconds)
        self._retry_seconds = now_seconds + SPARE_RETRY_SECONDS
        if is_final:
            self._give_up(line)

    def _give_up(self, line: str) -> None:
        """End, unless this node has ever joined: what keeps it away now may pass then."""
        if not self._has_ever_joined:
            self._actions.append(GiveUp(line))

    def _tell(self, message: NodeMessage) -> None:
        """Send a message about the engine, if the head that started it is still there."""
        if self._channel is not None and self._channel is self._engine_channel:
            self._channel.send(message)

    def _update(self, now_seconds: float, *, is_last: bool = False) -> None:
        is_due = is_last or now_seconds - self._updated_seconds >= UPDATE_SECONDS
        if self._engine is None or self._is_stopping or self._newest == self._sent:
            return
        if is_due:
            self._updated_seconds, self._sent = now_seconds, self._newest
            self._tell(RankUpdate(self._engine.generation, now_seconds, *self._newest))

    def _lose_channel(self, problem: str, now_seconds: float) -> None:
        """Forget the connection, and end the engine: the head no longer counts on it."""
        self.last_problem = problem
        self._channel = None
        self._retry_seconds = now_seconds + RETRY_SECONDS
        self._actions.append(Disconnect())
        self._stop_engine(problem)

    def _flush(self) -> None:
        if self._channel is not None and (data := self._channel.outgoing()):
            self._actions.append(Send(data))

    def _flushed(self, now_seconds: float) -> list[FollowerAction]:
        self._flush()
        if self._channel is not None and (failure := self._channel.failure) is not None:
            self._lose_channel(failure.line, now_seconds)
            if failure.reason in _REMEDIES:  # anybody can answer so at the head's address
                self._give_up(_REMEDIES[failure.reason])
        actions, self._actions = self._actions, []
        return actions


def _fitting(lost: Lost) -> Lost:
    """Return the message without the end of a long reason, or the suspects if it is too long."""
    death = replace(lost.death, reason=lost.death.reason[:MAX_REASON_CHARACTERS])
    if len(encoded(replace(lost, death=death))) > MAX_PAYLOAD_BYTES:
        death = replace(death, suspects=None)
    return replace(lost, death=death)
