"""Which requests did an engine have when it died? Only those can have ended it.

Belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast.engine.requests.request import EngineOutputs, EngineRequest
from holdfast.engine.suspects.blame import Blame, BlameVerdict
from holdfast.records import Death

Unsent = Callable[[Iterable[str], Callable[[str], Iterable[str]]], frozenset[str]]


class Presence:
    """The requests that the present engine of one `ReplayManager` has, until it is judged."""

    def __init__(
        self,
        outputs: EngineOutputs,
        requests: Iterable[EngineRequest],
        blame: Blame,
        is_long: Callable[[EngineRequest], bool],
    ) -> None:
        """Take all requests, as they are at any time, and which of them have long prompts."""
        self._outputs = outputs
        self._requests = requests
        self._blame = blame
        self._is_long = is_long
        self._generation = 0
        self._may_be_judged = False
        """Whether there is an engine whose death has not been judged."""
        self.unsent: Unsent = lambda *_: frozenset()
        """Returns, of the IDs given, those of requests that the engine has nothing of."""

    def engine_started(self, generation: int) -> None:
        """Record that there is another engine, which has no request yet."""
        self._generation, self._may_be_judged = generation, True

    def forget_engine(self) -> None:
        """Let go of an engine that is gone."""
        self.unsent = lambda *_: frozenset()

    def request_left(self, request: EngineRequest) -> None:
        """Remember a request whose caller leaves, unless the present engine has not had it.

        After the verdict it changes nothing: those that are tried are known.
        """
        if self._may_be_judged and request.generation == self._generation:
            self._blame.request_left(request)

    def engine_ended(self) -> None:
        """Remember which requests the engine was done with: the next one knows nothing of them."""
        for request in self._finished():
            request.is_finished = True

    def unfinished(self, *, has_left_behind: bool = True) -> list[EngineRequest]:
        """Return the requests that the engine is at work on, or is about to get.

        A caller that reads slowly keeps its request when the engine is done with it. One that the
        last engine left behind goes on at this one once its caller notices; without
        `has_left_behind`, those are left out.
        """
        finished = self._finished()
        return [
            request
            for request in self._requests
            if request.is_in_engine
            and not request.is_finished
            and request not in finished
            and (
                request.generation == self._generation
                or (has_left_behind and request.outlives_engine)
            )
        ]

    def _finished(self) -> set[EngineRequest]:
        """Return the requests that the present engine is done with, and whose callers are not."""
        read = [
            request
            for request in self._requests
            if request.is_in_engine
            and request.generation == self._generation
            and request.has_yielded
            and not request.is_pending
        ]
        done = self.unsent([one.request_id for one in read], self._outputs.request_ids)
        return {request for request in read if request.request_id in done}

    def judge(self, death: Death) -> BlameVerdict:
        """Work out which requests may have caused the death of the present engine."""
        # A call that has heard of the death has also heard whether the engine had the request.
        calls = [request.request_id for request in self._requests if request.is_in_engine]
        unsent = self.unsent(calls, self._outputs.request_ids)
        present = [
            request
            for request in self._requests
            if request.generation == self._generation
            and not request.context.is_probe
            and request.request_id not in unsent
            and (death.cause != "host_memory" or self._is_long(request))
        ]
        self._may_be_judged = False
        return self._blame.assign_blame(death, present)
