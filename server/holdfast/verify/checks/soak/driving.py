"""Does a mixed load of many hours go on without an error? This check makes the soak.

The load pauses at the end of each interval for another look at the answers. Samples of the server's
memory are taken by whichever client finds that the last one is old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast.verify.answers import MalformedError
from holdfast.verify.check import ONLY_SOAK, Check
from holdfast.verify.checks.soak.history import SoakHistory, begun, plan
from holdfast.verify.checks.soak.looks import CachedPrompt, cached_prompt, limits_of, look
from holdfast.verify.checks.soak.mix import Client, room_of
from holdfast.verify.checks.soak.samples import Sampler
from holdfast.verify.course import deaths_in, restarts_in
from holdfast.verify.records import equal_to
from holdfast.verify.target import NoAnswerError
from holdfast.verify.trial import InconclusiveError, SkippedError, Trial, UnexpectedStatusError
from holdfast.verify.waiting import UNAVAILABLE

_MOST_ERRORS_IN_A_ROW = 50
"""More show nothing new; a server that refuses connections would be asked without end."""
_LOOKS_BEFORE = 2
"""The second may find a prefix in a cache, as all later ones do."""
_MINUTE_SECONDS = 60.0
_SHOWN_BODY_CHARACTERS = 20_000
"""The maximum of a request that a report repeats."""


_FAILED = (NoAnswerError, UnexpectedStatusError, MalformedError, InconclusiveError)
"""The last one says that the server did not let a request in before its deadline."""


class LostError(Exception):
    """The server answers no more."""


class Soak:
    """One soak."""

    def __init__(self, trial: Trial, history: SoakHistory) -> None:
        self._trial = trial
        self._history = history
        self._plan = plan(trial)
        self._started_seconds = self._plan.clock()
        self._sampler = Sampler(trial, history, self._plan.spacing_seconds, self._now_seconds)
        self._cached_prompt: CachedPrompt | None = None
        self._errors_in_a_row = 0

    async def run(self) -> None:
        """Load the server, interval by interval.

        Raises:
            LostError: it answers no more.
            InconclusiveError: it does not say how long a prompt is.
            UnexpectedStatusError: it fails before the soak begins.
            SkippedError: it answers neither chats nor completions.
        """
        room = await room_of(self._trial)
        try:
            self._history.limits = await limits_of(self._trial)
            self._cached_prompt = await cached_prompt(self._trial)
            if self._cached_prompt is not None:
                self._history.cached_limits = self._cached_prompt.limits
        except (SkippedError, InconclusiveError) as error:
            self._history.obstacle = error
        self._started_seconds = self._plan.clock()
        clients = [
            Client(self._trial, room, number, self._plan.seed)
            for number in range(self._plan.clients)
        ]
        await self._sampler.look()
        for _ in range(_LOOKS_BEFORE):
            await self._look()
        for end_seconds in self._plan.interval_ends_seconds:
            await self._load(clients, end_seconds)
            await self._sampler.look()
            await self._look()

    def _now_seconds(self) -> float:
        """Since the soak began."""
        self._history.lasted_seconds = self._plan.clock() - self._started_seconds
        return self._history.lasted_seconds

    async def _load(self, clients: Sequence[Client], end_seconds: float) -> None:
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(self._one(client, end_seconds))
        if self._is_lost:
            raise LostError

    @property
    def _is_lost(self) -> bool:
        return self._errors_in_a_row >= _MOST_ERRORS_IN_A_ROW

    async def _one(self, client: Client, end_seconds: float) -> None:
        """Ask until the interval ends; what is under way then is waited for."""
        while self._now_seconds() < end_seconds and not self._is_lost:
            kind = client.next_kind()
            self._history.asked[kind] += 1
            asked_seconds = self._plan.clock()
            try:
                is_timed = await client.ask(kind)
            except _FAILED as error:
                self._blame(kind, error)
            else:
                self._errors_in_a_row = 0
                if is_timed:
                    self._history.answered_at_seconds.append(self._now_seconds())
                    self._history.answer_seconds.append(self._plan.clock() - asked_seconds)
            await self._sampler.look_if_due()

    async def _look(self) -> None:
        has_scores = self._history.limits is not None
        try:
            found = await look(
                self._trial, self._now_seconds(), self._cached_prompt, has_scores=has_scores
            )
        except (NoAnswerError, UnexpectedStatusError, InconclusiveError) as error:
            self._blame("requests of the canary", error)
        else:
            self._history.looks.append(found)

    def _blame(
        self,
        kind: str,
        error: NoAnswerError | UnexpectedStatusError | MalformedError | InconclusiveError,
    ) -> None:
        self._history.errors += 1
        self._errors_in_a_row += 1
        request = None
        if isinstance(error, NoAnswerError | UnexpectedStatusError):
            request = error.request
        if request is not None and len(str(request.body)) > _SHOWN_BODY_CHARACTERS:
            request = None
        minutes = self._now_seconds() / _MINUTE_SECONDS
        self._trial.blame(f"{kind}, after {minutes:.1f} minutes: {error}", request=request)


async def load(trial: Trial) -> None:
    """The soak; however it ends, its numbers are noted."""
    history = await trial.once(begun)
    try:
        await Soak(trial, history).run()
    except LostError:
        # Not as one more fault: a report keeps only the first ones.
        trial.warn(f"the soak stopped after {_MOST_ERRORS_IN_A_ROW} errors in a row")
    finally:
        _note(trial, history)


def _note(trial: Trial, history: SoakHistory) -> None:
    trial.measure("minutes", history.lasted_seconds / _MINUTE_SECONDS, "min")
    trial.measure("clients", plan(trial).clients)
    trial.measure("seed", plan(trial).seed)
    for kind, count in sorted(history.asked.items()):
        trial.measure(kind, count)
    trial.measure("unexpected errors", history.errors, limit=equal_to(0))
    trial.measure("requests refused for now with 503", trial.refusals[UNAVAILABLE])
    told = [facts for _, facts in history.told]
    if (restarts := restarts_in(told)) is not None:
        trial.measure("restarts of the server", restarts, limit=equal_to(0))
    if any(facts.deaths is not None for facts in told):
        trial.measure("engines that died", deaths_in(told), limit=equal_to(0))


CHECKS = (
    Check(
        "load",
        "soak",
        load,
        "A mixed load of hours gets no unexpected error.",
        profiles=ONLY_SOAK,
        deadline_seconds=3600.0,
        is_soak=True,
    ),
)
