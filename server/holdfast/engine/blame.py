"""Works out from a death, and from trials after it, which request ended the engine.

* A request that was alone in the failed step is a lone suspect: it is not replayed. A second such
  death quarantines requests like it.
* If there are several suspects, each is tried alone, in an engine that runs nothing else, until it
  is past the point where the engine died. One that ends the engine then is quarantined. Trials may
  cost two engines and the time of one start; untried suspects are treated like lone ones.
* If the suspects belong to several keys, those of one key are tried together first, so that a key
  that has sent many killers takes no other key's request with it.
* Only a death that blames requests makes suspects: an exception, a workspace rejection, a stall, or
  a signal that a process sends to itself. After any other death, and after the first rejection of a
  workspace, which the next start reserves, only requests that were also in the engine at the
  previous death are suspects, unless they got further in between. The loss of a node says nothing
  of any request, and a lack of host memory nothing of short ones.
* A client that leaves changes nothing: the request is tried without it.

A death explained in this way is charged to the key that sent the request. Only two things suffice
for that, so that no key can get another key charged or its request quarantined: being alone in the
failed step twice, and ending an engine alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from holdfast.engine.departed import Departed, Leavers
from holdfast.engine.request import (
    EngineOutputs,
    EngineRequest,
    quarantine_error,
    suspected_error,
)
from holdfast.engine.suspicions import Suspicions
from holdfast.engine.trials import Trials
from holdfast.errors import HoldfastError
from holdfast.labels import DeathCause
from holdfast.records import Death, Suspect

logger = logging.getLogger("holdfast.engine")

_OF_NO_REQUEST: frozenset[DeathCause] = frozenset({"requested", "node_lost"})


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a death has shown."""

    explained: int = 0
    """How many deaths this explains: itself, and the one that led to a trial."""
    is_charged: bool = False
    """Whether they are charged to a key."""
    has_suspects: bool = False
    """Whether clients' requests may have caused this death."""


class Blame:
    """Judges the requests of one `ReplayManager`, on its event loop."""

    def __init__(
        self,
        outputs: EngineOutputs,
        suspicions: Suspicions,
        *,
        in_step: Callable[[], Iterable[str]],
        refused: Callable[[EngineRequest], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take callbacks: `refused` is called with each request that gets a refusal.

        `in_step` returns vLLM's internal IDs of the requests in the running steps.
        """
        self._outputs = outputs
        self.suspicions = suspicions
        self._refused = refused
        self._clock = clock
        self._departed = Departed(outputs, in_step, clock)
        self._trials: Trials | None = None

    def is_quarantined(self, request: EngineRequest) -> bool:
        """Whether requests like it may not reach an engine; cheap while none is quarantined."""
        self._departed.forget_old()
        return self.suspicions.has_quarantined and self.suspicions.is_quarantined(
            self._digest(request)
        )

    def request_left(self, request: EngineRequest) -> None:
        """Remember a request whose caller leaves while the engine has it."""
        if not request.context.is_probe:
            self._departed.add(request)

    def output_came(self, request: EngineRequest) -> None:
        """Acquit a request that got further than it was when its last engine died."""
        if request.deaths and self._tokens(request) > request.reached_tokens:
            request.deaths = 0

    def assign_blame(self, death: Death, present: Iterable[EngineRequest]) -> Verdict:
        """Judge a death; `present` are the clients' requests that the engine had."""
        if self._trials is not None and self._trials.is_running:
            return self._judge_trial(death, self._trials)
        if death.cause in _OF_NO_REQUEST:
            return Verdict()
        present = list(present)
        left = self._departed.take()
        if not (present or left.recent or left.earlier):
            return Verdict()
        self._trials = None
        suspects, is_complete = self._suspects(death, present, left)
        for request in present:
            request.deaths += 1
            request.reached_tokens = max(request.reached_tokens, self._tokens(request))
        if not suspects:
            # One that left too long ago to be a suspect may still have caused it.
            has_left = death.suspects is None and bool(left.recent or left.earlier)
            is_possible = has_left or not left.is_complete
            return Verdict(has_suspects=death.blames_requests and is_possible)
        return self._judge(death, suspects, present, is_complete=is_complete)

    def is_overdue(self) -> bool:
        """Whether the time for the running trial is over."""
        return self._trials is None or self._trials.is_overdue

    async def try_suspects(
        self,
        run_trial: Callable[[Sequence[EngineRequest]], Awaitable[Sequence[EngineRequest] | None]],
        seconds: float,
    ) -> bool:
        """Run the suspects on their own; False if the engine dies of them.

        The trials after one death may take `seconds`; see `Trials.run`.
        """
        if self._trials is None:
            return True
        if not await self._trials.run(run_trial, seconds):
            return False
        for request in self._trials.untried:
            logger.warning(
                "request %s is not retried: there was no time or engine left to try it alone",
                request.request_id,
            )
            self._refuse(request, suspected_error())
        self._trials = None
        return True

    # Which requests may have caused it

    def _suspects(
        self,
        death: Death,
        present: Sequence[EngineRequest],
        left: Leavers,
    ) -> tuple[list[EngineRequest], bool]:
        """Return the requests that may have caused a death, and whether no other can have."""
        candidates = [*present, *left.earlier, *left.recent]
        is_cured = death.cause == "workspace_rejection"
        if not death.blames_requests or (
            is_cured and not any(request.deaths for request in candidates)
        ):
            return [request for request in candidates if request.deaths], True
        if death.suspects is None:
            # A request that left long before is in no step any more, unless that step never ended.
            return [*present, *left.recent], death.cause != "stall" or not left.earlier
        return self._find(death.suspects, candidates)

    def _find(
        self, suspects: Iterable[Suspect], requests: Iterable[EngineRequest]
    ) -> tuple[list[EngineRequest], bool]:
        by_name: dict[str, EngineRequest] = {}
        for request in requests:
            by_name.setdefault(request.request_id, request)
        named: dict[EngineRequest, None] = {}
        is_complete = True
        for suspect in suspects:
            names = self._outputs.request_ids(suspect.request_id)
            found = [by_name[name] for name in names if name in by_name]
            if not found:
                is_complete = is_complete and not suspect.is_in_running_step
            elif (request := found[0]) not in named:
                request.reached_tokens = suspect.reached_tokens
                request.is_prefilling = suspect.is_prefill
                named[request] = None
        return list(named), is_complete

    # What follows

    def _judge(
        self,
        death: Death,
        suspects: list[EngineRequest],
        present: list[EngineRequest],
        *,
        is_complete: bool,
    ) -> Verdict:
        known = [*filter(self._is_suspected, suspects)] if death.blames_requests else []
        if known or (len(suspects) == 1 and is_complete):
            for request in known or suspects:
                self._blame_request(death, request)
            for request in present:
                request.deaths = 0
            is_charged = death.blames_requests and bool((known or suspects)[0].context.key)
            return Verdict(1, is_charged, has_suspects=True)
        triable = [request for request in suspects if request.is_replayable]
        self._trials = Trials(triable, self.suspicions.charged, self._clock)
        return Verdict(has_suspects=death.blames_requests)

    def _blame_request(self, death: Death, request: EngineRequest) -> None:
        if not death.blames_requests:
            self._refuse(request, suspected_error())
        elif self._is_suspected(request):
            self._quarantine(request, deaths=1)
        else:
            logger.error("request %s is not retried: an engine died of it", request.request_id)
            self.suspicions.suspect(self._digest(request), request.context.key)
            self._charge(request, deaths=1)
            self._refuse(request, suspected_error())

    def _judge_trial(self, death: Death, trials: Trials) -> Verdict:
        culprits = trials.died(death)
        if len(culprits) != 1:
            return Verdict(has_suspects=bool(culprits))
        explained = trials.explain()
        self._quarantine(culprits[0], deaths=explained)
        return Verdict(explained, bool(culprits[0].context.key), has_suspects=True)

    def _quarantine(self, request: EngineRequest, *, deaths: int) -> None:
        logger.error("request %s is quarantined: engines died of it", request.request_id)
        self.suspicions.quarantine(self._digest(request), request.context.key)
        self._charge(request, deaths=deaths)
        self._refuse(request, quarantine_error())

    def _charge(self, request: EngineRequest, *, deaths: int) -> None:
        if request.context.key:
            self.suspicions.charge(request.context.key, deaths)

    def _refuse(self, request: EngineRequest, error: HoldfastError) -> None:
        request.refusal = error
        self._refused(request)

    def _tokens(self, request: EngineRequest) -> int:
        """Return the length of prompt and answer as far as it was sent; 0 if nothing was."""
        sent = request.sent
        prompt_tokens = self._outputs.prompt_tokens(sent.last_output) if sent.token_ids else 0
        return prompt_tokens + len(sent.token_ids)

    def _is_suspected(self, request: EngineRequest) -> bool:
        return self.suspicions.is_suspected(self._digest(request), request.context.key)

    def _digest(self, request: EngineRequest) -> str:
        if request.digest is None and request.digesting is not None:
            request.digest = request.digesting.result()
        request.digest = request.digest or self._outputs.digest_of(request.arguments)
        return request.digest
