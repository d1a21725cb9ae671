"""Has suspects of a death tried in the next engine: in which order, and for how long?

`trial_runner` runs them. Belongs to one event loop.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence

from holdfast.engine.requests.request import EngineRequest
from holdfast.labels import DeathCause
from holdfast.records import Death

TRIAL_ENGINES = 2
"""How many engines the trials after one death may cost."""
LEAST_TRIAL_SECONDS = 15.0
"""The least time that trials get, however fast an engine starts."""
LEAST_SHARE_SECONDS = 2.0
"""The least of that time that a group gets while as much is left: with a share that is shorter than
a step, no suspect of many would pass."""
MOST_OVERTIME = 2.0
"""No trial begins once all have taken this many times as long as they may."""

OF_NO_REQUEST: frozenset[DeathCause] = frozenset({"requested", "node_lost"})
"""Causes that say nothing of any request."""
SHOWS_NOTHING = OF_NO_REQUEST | {"terminated", "host_memory"}
"""Causes that say nothing of a request on trial: the sender of a SIGTERM, or a neighbour."""

logger = logging.getLogger("holdfast.engine")


class Trials:
    """The trials that follow one death."""

    def __init__(
        self,
        suspects: Iterable[EngineRequest],
        charged: Callable[[str], int],
        clock: Callable[[], float],
        *,
        unexplained: int,
        is_conclusive: bool,
    ) -> None:
        """Take `charged`, which counts the engines that a key has ended.

        `unexplained` is the number of deaths that the suspects may explain so far. `is_conclusive`
        says that the death was of one of them.
        """
        self._charged = charged
        self._clock = clock
        suspects = list(suspects)
        triable = [request for request in suspects if request.is_replayable]
        self._untriable = [request for request in suspects if not request.is_replayable]
        self._triable_count = len(triable)
        self._is_conclusive = is_conclusive
        self._untried = self._groups(triable)
        """Groups to be tried together, the least likely to have caused the death first."""
        self._passed: list[EngineRequest] = []
        self._running: list[EngineRequest] | None = None
        self._allowed_seconds = 0.0
        """The time for all trials; 0 until the first one."""
        self._seconds_left = 0.0
        """How much of it is left."""
        self._overrun_seconds = defaultdict[str, float](float)
        """How much longer trials took than they were given, by `_payer`."""
        self._ends_seconds = 0.0
        """When the time for the group on trial is over."""
        self._engines_left = TRIAL_ENGINES
        self._is_rejected = False
        """Whether a group was refused workspace before."""
        self._unexplained = unexplained
        self._undecided: Sequence[EngineRequest] | None = None
        """The group whose last trial ended an engine without an accusation."""

    @property
    def is_running(self) -> bool:
        """Whether a group is on trial."""
        return self._running is not None

    @property
    def untried(self) -> Sequence[EngineRequest]:
        """The suspects that have not passed a trial."""
        return [request for group in self._untried for request in group]

    @property
    def seconds_until_overdue(self) -> float:
        """The time left for the group on trial; 0 or less if it is over."""
        return self._ends_seconds - self._clock()

    async def run(
        self,
        run_trial: Callable[[Sequence[EngineRequest]], Awaitable[Sequence[EngineRequest] | None]],
        seconds: float,
    ) -> bool:
        """Try the suspects within `seconds`, over all engines; False if the engine dies of one.

        `run_trial` runs a group, and returns those that it stopped because their time was over, or
        None if the engine died. The time of such a trial does not count, since engines are counted:
        it takes `--stall-timeout` to notice a hang, which would leave no time to the others.
        """
        if not self._allowed_seconds:
            self._allowed_seconds = self._seconds_left = max(seconds, LEAST_TRIAL_SECONDS)
        while self._engines_left > 0 and (tried := self._next_group()):
            self._running = tried
            names = ", ".join(request.request_id for request in tried)
            logger.info("trying requests alone, because they may have ended an engine: %s", names)
            began_seconds = self._clock()
            # A slow one leaves the others their share, and is tried again after them.
            left_seconds = self._seconds_for(tried)
            least_seconds = min(left_seconds, LEAST_SHARE_SECONDS)
            share_seconds = max(left_seconds / len(self._untried), least_seconds)
            self._ends_seconds = began_seconds + share_seconds
            stopped = await run_trial(tried)
            if stopped is None:
                return False
            taken_seconds = self._clock() - began_seconds
            # A step cannot be cut short. What it takes beyond the share is not the others' loss.
            self._seconds_left -= min(taken_seconds, share_seconds)
            self._overrun_seconds[_payer(tried)] += max(0.0, taken_seconds - share_seconds)
            self._running = None
            self._untried.remove(tried)
            # One that was refused meanwhile has shown nothing, and no engine gets it any more.
            wanted = [request for request in tried if request.refusal is None]
            for request in wanted:
                if request not in stopped:
                    request.acquit()
                    if len(tried) == 1:
                        request.passed_alone += 1
                        request.passed_tokens = request.reached_tokens + 1
                    self._passed.append(request)
            if again := [request for request in wanted if request in stopped]:
                self._untried.append(again)
        return True

    @property
    def tried(self) -> Sequence[EngineRequest]:
        """The group on trial."""
        return self._running or ()

    @property
    def passed(self) -> Sequence[EngineRequest]:
        """The requests that have passed their trials."""
        return self._passed

    @property
    def left_over(self) -> Sequence[EngineRequest]:
        """The suspects that no engine can get again, if it must have been one of them.

        All others have passed then, at least one, and no trial has ended an engine.
        """
        have_others_passed = 0 < len(self._passed) == self._triable_count
        return self._untriable if self._is_conclusive and have_others_passed else ()

    def cast_doubt(self) -> None:
        """Record that the death may have been of a request that has passed, or of none."""
        self._is_conclusive = False

    def died(self, death: Death, *, is_of_others: bool) -> Sequence[EngineRequest]:
        """Record that the engine died in a trial; return the requests that may have ended it.

        They are none if the death decides nothing: then the same group is tried again, if an engine
        is left for it. Unless it was ended for another reason than the group, the others come
        first, so that they do not pay for both engines. Of several, each is tried alone, if it was
        not before. `is_of_others` says that a step of requests that are not on trial was running.
        """
        tried, self._running = self._running or [], None
        if death.cause == "requested":
            return ()
        self._engines_left -= 1
        self.cast_doubt()
        if is_of_others:
            self._unexplained += 1
        if is_of_others or death.cause in OF_NO_REQUEST or death.cause == "terminated":
            return ()
        self._untried.remove(tried)
        # The next start reserves what was refused.
        is_cured = death.cause == "workspace_rejection" and not self._is_rejected
        self._is_rejected |= is_cured
        if is_cured or death.cause in SHOWS_NOTHING:
            self._untried.append(tried)
            return ()
        self._unexplained += 1
        # Those that are harmless alone have passed before, so that one death may be chance.
        is_group = len(tried) > 1 and are_harmless_alone(tried)
        is_third_death = all(request.deaths > 1 for request in tried)
        is_shown = tried is self._undecided if is_group else is_third_death
        for request in tried:
            request.deaths += 1
        if not (death.blames_requests or is_shown):
            self._undecided = tried
            self._untried.append(tried)
            return ()
        if len(tried) > 1 and not is_group:
            self._untried += self._apart(tried)
        return tried

    def try_again(self, requests: Iterable[EngineRequest]) -> None:
        """Try those again that have passed, each alone."""
        for request in requests:
            self._passed.remove(request)
            self._untried.append([request])
            request.deaths += 1

    def explain(self) -> int:
        """Return how many deaths a request that ended an engine alone explains."""
        explained, self._unexplained = self._unexplained, 0
        return explained

    def _next_group(self) -> list[EngineRequest] | None:
        """Return the first group that there is time for; None if there is none."""
        overrun_seconds = sum(self._overrun_seconds.values())
        taken_seconds = self._allowed_seconds - self._seconds_left + overrun_seconds
        if taken_seconds > MOST_OVERTIME * self._allowed_seconds:
            return None
        return next((group for group in self._untried if self._seconds_for(group) > 0), None)

    def _seconds_for(self, group: Sequence[EngineRequest]) -> float:
        """Return the time left for a group."""
        return self._seconds_left - self._overrun_seconds[_payer(group)]

    def _groups(self, suspects: Iterable[EngineRequest]) -> list[list[EngineRequest]]:
        """Group suspects by key, or set them apart if all have the same key."""
        ordered = self._least_suspect_first(suspects)
        by_key: dict[str, list[EngineRequest]] = {}
        for request in ordered:
            by_key.setdefault(request.context.key, []).append(request)
        return list(by_key.values()) if len(by_key) > 1 else self._apart(ordered)

    def _apart(self, suspects: Iterable[EngineRequest]) -> list[list[EngineRequest]]:
        """Set suspects of one key apart, except those that are harmless alone."""
        ordered = self._least_suspect_first(suspects)
        harmless = [request for request in ordered if request.is_harmless_alone]
        alone = [[request] for request in ordered if not request.is_harmless_alone]
        return [harmless, *alone] if harmless else alone

    def _least_suspect_first(self, suspects: Iterable[EngineRequest]) -> list[EngineRequest]:
        """Sort requests of keys that have ended few engines and have few suspects to the front."""
        suspects = list(suspects)
        suspects_of_key = Counter(request.context.key for request in suspects)
        return sorted(
            suspects,
            key=lambda request: (
                self._charged(request.context.key),
                suspects_of_key[request.context.key],
                request.deaths,
                request.is_prefilling,
            ),
        )


def _payer(group: Sequence[EngineRequest]) -> str:
    """Return whose time a trial takes that overruns: the key's, or its own if it has no key."""
    return group[0].context.key or group[0].request_id


def are_harmless_alone(requests: Iterable[EngineRequest]) -> bool:
    """Whether no one of them ends an engine alone, so that they can only do so together."""
    return all(request.is_harmless_alone for request in requests)
