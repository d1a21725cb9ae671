"""Works out from a death, and from trials after it, which request ended the engine.

* A request that was alone in the failed step is a lone suspect: it is convicted, which means that
  it is not replayed, and that a second conviction quarantines requests like it.
* If there are several suspects, each is tried alone, in an engine that runs nothing else, until it
  is past the point where the engine died. One that ends the engine then is quarantined. Trials may
  cost two engines and the time of one start; untried suspects are refused, too.
* If the suspects belong to several keys, those of one key are tried together first, so that a key
  that has sent many killers takes no other key's request with it. A suspect whose like was
  convicted before is convicted without a trial only if all suspects are of its key. Requests that
  end engines only together are charged to their key, and refused the second time.
* A suspect that cannot be made again is convicted without a trial if all others pass theirs. Of
  several, none is: their key is charged, if it is the same.
* Only a death that accuses requests makes suspects: an exception, a workspace rejection, a stall,
  or a signal that a process sends to itself. After any other death, and after the first rejection
  of a workspace, which the next start reserves, only requests that were also in the engine at the
  previous death are suspects, unless they got further in between. The loss of a node says nothing
  of any request, and a lack of host memory nothing of short ones.
* A client that leaves changes nothing: the request is tried without it. One that had left before a
  death that accuses nobody is known again at the next by its digest and key.

A neighbour that takes the memory, and an operator with `kill -9`, end engines too, and leave what a
request leaves that runs out of memory or calls `exit()`. So a request is judged by these deaths:

    each death accuses       alone in the step     1 convicts, 2 quarantine
    each death accuses       in company            1, and 1 in a trial, quarantine
    only the first accuses   in company            1, and 2 in trials, convict
    no death accuses         alone at the last     2 in a row convict, 4 quarantine
    no death accuses         in company            2 in a row, and 1 in a trial, convict

Several that are harmless alone need two trials that accuse nobody. A trial that ends by SIGTERM or
for lack of host memory shows nothing: both have a known sender. A death explained in this way is
charged to the key that sent the request, a conviction as one. No key can get another key charged:
what is convicted was alone in the failed step or in the engine, or all suspects are of its own key.
Only a key whose request cannot be tried answers for what ends an engine in company and not alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from holdfast.engine.requests.arrivals import named_requests, sent_tokens
from holdfast.engine.requests.request import (
    EngineOutputs,
    EngineRequest,
    suspected_error,
)
from holdfast.engine.suspects.convictions import Convictions
from holdfast.engine.suspects.departed import Departed, Leavers
from holdfast.engine.suspects.digests import Digests
from holdfast.engine.suspects.suspicions import Suspicions
from holdfast.engine.suspects.trials import OF_NO_REQUEST, SHOWS_NOTHING, Trials, are_harmless_alone
from holdfast.records import Death

logger = logging.getLogger("holdfast.engine")


@dataclass(frozen=True, slots=True)
class BlameVerdict:
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
        self._clock = clock
        self._digests = Digests(outputs)
        self._convictions = Convictions(suspicions, self._digests, refused)
        self._departed = Departed(outputs, in_step, clock)
        self._trials: Trials | None = None
        self._verdict_of_trials = BlameVerdict()
        self._gone_before: frozenset[tuple[str, str]] = frozenset()
        """Digest and key of each request that left the engine before its last death."""

    def is_quarantined(self, request: EngineRequest) -> bool:
        """Whether requests like it may not reach an engine; cheap while none is quarantined.

        For a large prompt that is not known yet: see `is_quarantined_though_large`.
        """
        self._departed.forget_old()
        if not self.suspicions.has_quarantined:
            return False
        if self._digests.is_large(request):
            self._digests.start(request)
            return False
        return self.suspicions.is_quarantined(self._digests.of(request))

    async def is_quarantined_though_large(self, request: EngineRequest) -> bool:
        """Whether requests like one whose digest was started may not reach an engine."""
        return request.digesting is not None and self.suspicions.is_quarantined(
            await self._digests.until_known(request)
        )

    def request_left(self, request: EngineRequest) -> None:
        """Remember a request whose caller leaves while the engine has it."""
        if not request.context.is_probe:
            self._digests.start(request)
            self._departed.add(request)

    def output_came(self, request: EngineRequest) -> None:
        """Acquit a request that got further than it was when its last engine died."""
        if request.deaths and sent_tokens(self._outputs, request) > request.reached_tokens:
            request.acquit()

    def assign_blame(self, death: Death, present: Iterable[EngineRequest]) -> BlameVerdict:
        """Judge a death; `present` are the clients' requests that the engine had."""
        if self._trials is not None and self._trials.is_running:
            return self._judge_trial(death, self._trials)
        if death.cause in OF_NO_REQUEST:
            return BlameVerdict()
        present, left = list(present), self._departed.take()
        if self._trials is not None and not present:
            self._trials.cast_doubt()
            return BlameVerdict()  # it died under the probe, before the next trial
        self._trials = None
        gone_before, self._gone_before = self._gone_before, frozenset()
        if not (present or left.recent or left.earlier):
            return BlameVerdict()
        if self._accuses(death, [*present, *left.earlier, *left.recent]):
            return self._judge(death, present, left)
        return self._judge_recurrence(death, present, left, gone_before)

    def seconds_until_overdue(self) -> float:
        """Return the time left for the running trial; 0 or less if it is over."""
        return self._trials.seconds_until_overdue if self._trials else 0.0

    def is_in_step(self, request: EngineRequest) -> bool:
        """Whether the engine runs a step with this request."""
        return request.request_id in self._departed.running()

    async def try_suspects(
        self,
        run_trial: Callable[[Sequence[EngineRequest]], Awaitable[Sequence[EngineRequest] | None]],
        seconds: float,
    ) -> bool:
        """Run the suspects on their own; False if the engine dies of them.

        The trials after one death may take `seconds`; see `Trials.run`. Those of a suspended key
        are refused instead.
        """
        if self._trials is None:
            return True

        async def run(tried: Sequence[EngineRequest]) -> Sequence[EngineRequest] | None:
            for request in tried:
                if self.suspicions.suspended_seconds(request.context.key):
                    self._convictions.refuse(request, suspected_error())
            return await run_trial([request for request in tried if request.refusal is None])

        if not await self._trials.run(run, seconds):
            return False
        self._verdict_of_trials = self._judge_left_over()
        self.refuse_untried()
        return True

    def cast_doubt(self) -> None:
        """Record that a trial was passed by a request that did not do what it did before."""
        if self._trials is not None:
            self._trials.cast_doubt()

    def verdict_of_trials(self) -> BlameVerdict:
        """Return once what the trials have shown of the death before them, by ending no engine."""
        verdict, self._verdict_of_trials = self._verdict_of_trials, BlameVerdict()
        return verdict

    @property
    def suspects(self) -> Sequence[EngineRequest]:
        """The requests that are being tried, or will be, also if their clients have left."""
        return (*self._trials.tried, *self._trials.untried) if self._trials else ()

    def refuse_untried(self) -> None:
        """Refuse the suspects that no trial has acquitted: no engine or time is left for them."""
        for request in self._trials.untried if self._trials else ():
            logger.warning(
                "request %s is not retried: there was no time or engine left to try it alone",
                request.request_id,
            )
            self._convictions.refuse(request, suspected_error())
        self._trials = None

    def _accuses(self, death: Death, requests: Iterable[EngineRequest]) -> bool:
        """Whether a death accuses the requests of its step; the next start cures a rejection."""
        if death.cause == "workspace_rejection":
            return any(request.has_met_rejection for request in requests)
        return death.blames_requests

    def _suspects(
        self, death: Death, present: Sequence[EngineRequest], left: Leavers
    ) -> tuple[list[EngineRequest], bool]:
        """Return the requests that a death accuses, and whether no other can have caused it."""
        if death.suspects is None:
            # A request that left long before is in no step any more, unless that step never ended.
            return [*present, *left.recent], death.cause != "stall" or not left.earlier
        return named_requests(
            self._outputs, death.suspects, [*present, *left.earlier, *left.recent]
        )

    def _gone(
        self, death: Death, present: Sequence[EngineRequest], left: Leavers
    ) -> Sequence[EngineRequest]:
        """Return the requests that a death found in the engine although their callers had left."""
        if death.cause in SHOWS_NOTHING:
            return ()
        found, _ = self._suspects(death, present, left)
        return [request for request in found if request not in present]

    def _judge(self, death: Death, present: list[EngineRequest], left: Leavers) -> BlameVerdict:
        suspects, is_complete = self._suspects(death, present, left)
        self._count_death(death, [*present, *suspects])
        if not suspects:
            # One that left too long ago to be a suspect may still have caused it.
            has_left = death.suspects is None and bool(left.recent or left.earlier)
            return BlameVerdict(has_suspects=has_left or not left.is_complete)
        culprits = suspects
        if len(suspects) > 1:
            keys = {request.context.key for request in suspects}
            # Their digests may take seconds of the event loop.
            may_be_known = len(keys) == 1 and self.suspicions.has_suspected(*keys)
            culprits = [*filter(self._convictions.is_suspected, suspects)] if may_be_known else []
        if not (culprits and is_complete):
            are_all_known = is_complete and (death.suspects is not None or left.is_complete)
            self._begin_trials(suspects, unexplained=1, is_conclusive=are_all_known)
            return BlameVerdict(has_suspects=True)
        for request in culprits:
            self._convictions.convict(request)
        for request in present:
            request.acquit()
        return BlameVerdict(1, bool(culprits[0].context.key), has_suspects=True)

    def _judge_recurrence(
        self,
        death: Death,
        present: list[EngineRequest],
        left: Leavers,
        gone_before: frozenset[tuple[str, str]],
    ) -> BlameVerdict:
        """Judge a death that accuses no request: those of two in a row are suspects."""
        gone = self._gone(death, present, left)
        for request in gone:
            request.deaths = max(request.deaths, self._convictions.identity(request) in gone_before)
        suspects = [request for request in [*present, *gone] if request.deaths]
        unexplained = 1 + max((request.deaths for request in suspects), default=0)
        is_alone = len(present) + len(gone) == 1
        self._count_death(death, [*present, *gone])
        if not suspects:
            self._gone_before = frozenset(map(self._convictions.identity, gone))
            return BlameVerdict(has_suspects=bool(gone))
        if len(suspects) == 1 and death.cause == "host_memory":
            self._convictions.refuse(suspects[0], suspected_error())
            return BlameVerdict(1, has_suspects=True)
        if is_alone and death.cause not in SHOWS_NOTHING:
            self._convictions.convict(suspects[0])
            return BlameVerdict(unexplained, bool(suspects[0].context.key), has_suspects=True)
        self._begin_trials(suspects, unexplained=unexplained, is_conclusive=False)
        return BlameVerdict(has_suspects=True)

    def _count_death(self, death: Death, requests: Iterable[EngineRequest]) -> None:
        for request in dict.fromkeys(requests):
            request.deaths += 1
            request.has_met_rejection |= death.cause == "workspace_rejection"
            sent = sent_tokens(self._outputs, request)
            request.reached_tokens = max(request.reached_tokens, sent)

    def _begin_trials(
        self, suspects: Iterable[EngineRequest], *, unexplained: int, is_conclusive: bool
    ) -> None:
        self._trials = Trials(
            suspects,
            self.suspicions.charged,
            self._clock,
            unexplained=unexplained,
            is_conclusive=is_conclusive,
        )

    def _judge_trial(self, death: Death, trials: Trials) -> BlameVerdict:
        suspects = (death.suspects if death.blames_requests else None) or ()
        running = [suspect for suspect in suspects if suspect.is_in_running_step]
        _, is_theirs = named_requests(self._outputs, running, trials.tried)
        found = trials.died(death, is_of_others=not is_theirs)
        if not is_theirs:
            # Those that had just passed may have done it, or one on trial before its first step.
            passed, _ = named_requests(self._outputs, running, trials.passed)
            trials.try_again(passed)
            return BlameVerdict(has_suspects=True)
        if not found:
            return BlameVerdict(has_suspects=death.cause not in SHOWS_NOTHING)
        if len(found) > 1:
            return self._judge_group(death, found, trials)
        (culprit,) = found
        explained = trials.explain()
        if death.blames_requests:
            self._convictions.quarantine(culprit, deaths=explained)
        else:
            self._convictions.convict(culprit)
        return BlameVerdict(explained, bool(culprit.context.key), has_suspects=True)

    def _judge_group(
        self, death: Death, group: Sequence[EngineRequest], trials: Trials
    ) -> BlameVerdict:
        key, are_harmless = group[0].context.key, are_harmless_alone(group)
        if not (key or are_harmless):
            return BlameVerdict(has_suspects=True)
        explained = trials.explain()
        # Their key pays even if each alone is harmless: they may be sent together again.
        self._convictions.charge(group[0], deaths=explained if death.blames_requests else 1)
        for request in group if are_harmless else ():
            self._convictions.refuse(request, suspected_error())
        return BlameVerdict(explained, bool(key), has_suspects=True)

    def _judge_left_over(self) -> BlameVerdict:
        """Blame requests that no engine can get again: all other suspects are acquitted.

        Of several, it is not known which it was, so that only a key that sent them all is charged.
        """
        requests = self._trials.left_over if self._trials is not None else ()
        keys = {request.context.key for request in requests}
        if len(keys) != 1 or (len(requests) > 1 and not any(keys)):
            return BlameVerdict()
        if len(requests) == 1:
            self._convictions.convict(requests[0])
        else:
            self._convictions.charge(requests[0], deaths=1)
        return BlameVerdict(1, any(keys), has_suspects=True)
