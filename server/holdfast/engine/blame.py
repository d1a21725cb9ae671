"""Concludes from a death, and from trials after it, which request ended the engine.

* A request that was alone in the failed step is a lone suspect: it is not made again. A second such
  death quarantines requests like it.
* If there are several suspects, each is tried alone, in an engine that runs nothing else, until it
  is past the point where the engine died. One that ends the engine then is quarantined. Trials may
  cost two engines and the time of one start; an untried suspect is answered like a lone one.
* If the suspects belong to several keys, those of one key are tried together first, so that a key
  which has sent many killers takes no other key's request with it.
* Only an accusing death makes suspects: an exception, a refusal, a stall, or a signal that a
  process sends to itself. After any other death, and after the first refusal of a workspace, which
  the next start reserves, only requests that the previous death found in the engine are suspects.
* A client that leaves changes nothing: the request is tried without it.

A death explained in this way is charged to the key that sent the request. Only two things convict,
so that no key can have another key charged or its request quarantined: to have been alone in the
step twice, and to have ended an engine alone.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from holdfast.engine.losses import quarantine_error, suspected_error
from holdfast.engine.request import Call, Dialect
from holdfast.engine.suspicions import Suspicions
from holdfast.errors import HoldfastError
from holdfast.records import Death, Suspect

logger = logging.getLogger("holdfast.engine")

TRIAL_ENGINES = 2
"""How many engines the trials after one death may end."""
TRIABLE_SECONDS = 10.0
"""How long the prompt of a request is kept for a trial after its client has left."""
TRIABLE_BYTES = 256 << 20
"""The most that all these prompts may take; the oldest are forgotten first."""
LEAST_TRIAL_SECONDS = 15.0
"""How long trials may take at least, however fast an engine starts."""
KEPT_SECONDS = 900.0
"""How long a digest is kept: longer than it takes to find an engine stalled."""
KEPT = 256
"""How many digests are kept."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a death has revealed."""

    explained: int = 0
    """How many deaths this explains: itself, and the one that led to a trial."""
    is_charged: bool = False
    """Whether they are charged to a key."""
    has_suspects: bool = False
    """Whether clients' requests may have caused this death."""


@dataclass(slots=True)
class _Inquiry:
    """The trials after one death."""

    untried: list[list[Call]]
    """Groups to be tried together, the least likely to have caused the death first."""
    seconds_left: float | None = None
    """The time left for trials; None until the first trial."""
    engines_left: int = TRIAL_ENGINES
    unexplained: int = 1
    """How many deaths no request has explained yet."""


class Blame:
    """Judges the calls of one `Calls`, on its event loop."""

    def __init__(
        self,
        dialect: Dialect,
        suspicions: Suspicions,
        *,
        in_step: Callable[[], Iterable[str]],
        refused: Callable[[Call], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take callbacks: `refused` is called with each call that gets a refusal.

        `in_step` returns the engine's own names of the requests in the running steps.
        """
        self._dialect = dialect
        self.suspicions = suspicions
        self._in_step = in_step
        self._refused = refused
        self._clock = clock
        self._left: deque[tuple[float, Call]] = deque()
        self._triable: deque[tuple[float, Call]] = deque()
        """Calls that have left and whose prompts are kept."""
        self._has_lost_some = False
        """Whether too many have left since the last death for all of them to be kept."""
        self._inquiry: _Inquiry | None = None
        self._on_trial: list[Call] | None = None

    def is_quarantined(self, call: Call) -> bool:
        """Whether requests like it may not reach an engine; cheap while none is quarantined."""
        self._forget_old()
        return self.suspicions.has_quarantined and self.suspicions.is_quarantined(
            self._digest(call)
        )

    def left(self, call: Call) -> None:
        """Remember a call that ends while the engine has it."""
        self._forget_old()
        if not call.context.is_probe:
            if len(self._left) == KEPT:
                self._forget_one()
            self._left.append((self._clock(), call))
            self._triable.append((self._clock(), call))
            call.size_bytes = self._dialect.size_bytes(call.arguments)
            self._forget_prompts()

    def accuse(self, death: Death, present: Iterable[Call]) -> Verdict:
        """Judge a death; `present` are the clients' calls that the engine had."""
        self._forget_old()
        tried, self._on_trial = self._on_trial, None
        if tried is not None and self._inquiry is not None:
            return self._judge_trial(death, tried, self._inquiry)
        alive = list(present)
        left, has_lost_some = list(self._left), self._has_lost_some
        self._left.clear()
        self._triable.clear()
        self._has_lost_some = False
        if not alive and not left:
            return Verdict()
        self._inquiry = None
        suspects, is_complete = self._suspects(death, alive, left)
        for call in alive:
            call.deaths += 1
        if not suspects:
            # A forgotten call was still a client's.
            has_lost_some |= death.suspects is None and bool(left)
            return Verdict(has_suspects=death.is_accusing and has_lost_some)
        return self._judge(death, suspects, alive, is_complete=is_complete)

    async def try_suspects(
        self, survive: Callable[[Sequence[Call]], Awaitable[bool]], seconds: float
    ) -> bool:
        """Run the suspects without other calls; False if the engine dies of them.

        `survive` runs a group, and returns whether the engine outlived it. The trials after one
        death may take `seconds`.
        """
        inquiry = self._inquiry
        if inquiry is None:
            return True
        if inquiry.seconds_left is None:
            inquiry.seconds_left = max(seconds, LEAST_TRIAL_SECONDS)
        while inquiry.untried:
            if inquiry.engines_left < 1 or inquiry.seconds_left <= 0:
                self._refuse_untried(call for calls in inquiry.untried for call in calls)
                break
            tried = inquiry.untried[0]
            names = ", ".join(call.request_id for call in tried)
            logger.info("retrying requests alone, as an engine died of one of them: %s", names)
            self._on_trial = tried
            began_seconds = self._clock()
            have_survived = await survive(tried)
            inquiry.seconds_left -= self._clock() - began_seconds
            if not have_survived:
                return False
            self._on_trial = None
            inquiry.untried.remove(tried)
            for call in tried:
                call.deaths = 0
        self._inquiry = None
        return True

    # Which calls may have caused it

    def _suspects(
        self, death: Death, alive: Sequence[Call], left: Sequence[tuple[float, Call]]
    ) -> tuple[list[Call], bool]:
        """The calls that may have caused a death, and whether these are all that may have."""
        everybody = [*alive, *(call for _, call in left)]
        is_cured = death.cause == "workspace_rejection"
        if not death.is_accusing or (is_cured and not any(call.deaths for call in everybody)):
            return [call for call in everybody if call.deaths], True
        if death.suspects is None:
            # A call that left long before was not in a step any more, unless that step never ended.
            since = self._clock() - TRIABLE_SECONDS
            recent = [call for at, call in left if at >= since]
            is_complete = death.cause != "stall" or len(recent) == len(left)
            return [*alive, *recent], is_complete
        return self._named(death.suspects, everybody)

    def _named(self, suspects: Iterable[Suspect], calls: Iterable[Call]) -> tuple[list[Call], bool]:
        by_name: dict[str, Call] = {}
        for call in calls:
            by_name.setdefault(call.request_id, call)
        named: dict[Call, None] = {}
        is_complete = True
        for suspect in suspects:
            names = self._dialect.request_ids(suspect.request_id)
            found = [by_name[name] for name in names if name in by_name]
            if not found:
                is_complete = is_complete and not suspect.is_in_running_step
            elif (call := found[0]) not in named:
                call.reached_tokens = suspect.reached_tokens
                call.is_prefilling = suspect.is_prefill
                named[call] = None
        return list(named), is_complete

    # What is concluded

    def _judge(
        self, death: Death, suspects: list[Call], alive: list[Call], *, is_complete: bool
    ) -> Verdict:
        known = [call for call in suspects if death.is_accusing and self._is_suspected(call)]
        if known or (len(suspects) == 1 and is_complete):
            for call in known or suspects:
                self._blame_alone(death, call)
            for call in alive:
                call.deaths = 0
            is_charged = death.is_accusing and bool((known or suspects)[0].context.key)
            return Verdict(1, is_charged, has_suspects=True)
        triable = [call for call in suspects if call.is_replayable]
        self._inquiry = _Inquiry(self._trials(triable))
        return Verdict(has_suspects=death.is_accusing)

    def _blame_alone(self, death: Death, call: Call) -> None:
        if not death.is_accusing:
            self._refuse(call, suspected_error())
        elif self._is_suspected(call):
            self._convict(call, deaths=1)
        else:
            logger.error("request %s is not retried: an engine died of it", call.request_id)
            self.suspicions.suspect(self._digest(call), call.context.key)
            self._charge(call, deaths=1)
            self._refuse(call, suspected_error())

    def _judge_trial(self, death: Death, tried: list[Call], inquiry: _Inquiry) -> Verdict:
        inquiry.engines_left -= 1
        if not death.is_accusing:  # tried again, if the trials may use another engine
            return Verdict()
        inquiry.untried.remove(tried)
        inquiry.unexplained += 1
        if len(tried) > 1:
            inquiry.untried += [[call] for call in self._ordered(tried)]
            return Verdict(has_suspects=True)
        explained, inquiry.unexplained = inquiry.unexplained, 0
        self._convict(tried[0], deaths=explained)
        return Verdict(explained, bool(tried[0].context.key), has_suspects=True)

    def _convict(self, call: Call, *, deaths: int) -> None:
        logger.error("request %s is quarantined: engines died of it", call.request_id)
        self.suspicions.quarantine(self._digest(call), call.context.key)
        self._charge(call, deaths=deaths)
        self._refuse(call, quarantine_error())

    def _charge(self, call: Call, *, deaths: int) -> None:
        if call.context.key:
            self.suspicions.charge(call.context.key, deaths)

    def _refuse_untried(self, calls: Iterable[Call]) -> None:
        for call in calls:
            logger.warning(
                "request %s is not retried: there was no time or engine left to try it alone",
                call.request_id,
            )
            self._refuse(call, suspected_error())

    def _refuse(self, call: Call, error: HoldfastError) -> None:
        call.refusal = error
        self._refused(call)

    def _trials(self, suspects: Iterable[Call]) -> list[list[Call]]:
        """The groups to try in turn: each key's calls together, or each call alone for one key."""
        ordered = self._ordered(suspects)
        by_key: dict[str, list[Call]] = {}
        for call in ordered:
            by_key.setdefault(call.context.key, []).append(call)
        return list(by_key.values()) if len(by_key) > 1 else [[call] for call in ordered]

    def _ordered(self, suspects: Iterable[Call]) -> list[Call]:
        """Sort calls whose keys have ended few engines and have few suspects to the front."""
        suspects = list(suspects)
        crowds = Counter(call.context.key for call in suspects)
        return sorted(
            suspects,
            key=lambda call: (
                self.suspicions.charged(call.context.key),
                crowds[call.context.key],
                call.deaths,
                call.is_prefilling,
            ),
        )

    def _is_suspected(self, call: Call) -> bool:
        return self.suspicions.is_suspected(self._digest(call), call.context.key)

    def _digest(self, call: Call) -> str:
        if call.digest is None and call.digesting is not None:
            call.digest = call.digesting.result()
        call.digest = call.digest or self._dialect.identity(call.arguments)
        return call.digest

    def _forget_one(self) -> None:
        """Forget the oldest outside running steps: a crowd must not hide what hangs the engine."""
        running = {name for one in self._in_step() for name in self._dialect.request_ids(one)}
        found = (at for at, (_, call) in enumerate(self._left) if call.request_id not in running)
        del self._left[next(found, 0)]
        self._has_lost_some = True

    def _forget_old(self) -> None:
        now = self._clock()
        while self._left and self._left[0][0] < now - KEPT_SECONDS:
            self._left.popleft()
        while self._triable and self._triable[0][0] < now - TRIABLE_SECONDS:
            self._forget_prompt()

    def _forget_prompts(self) -> None:
        kept_bytes = sum(call.size_bytes for _, call in self._triable)
        while kept_bytes > TRIABLE_BYTES or len(self._triable) > KEPT:
            kept_bytes -= self._triable[0][1].size_bytes
            self._forget_prompt()

    def _forget_prompt(self) -> None:
        _, call = self._triable.popleft()
        call.forget_prompt()
