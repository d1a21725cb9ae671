"""What a check is given: it asks the server through it, and notes there what it finds."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from holdfast.verify.answers import MalformedError, dig, excerpt, quoted, shortened
from holdfast.verify.baseline import Baseline, limit_of
from holdfast.verify.naming import body_for
from holdfast.verify.options import Options
from holdfast.verify.records import Fault, Limit, Number, Profile, Request, Series, Server
from holdfast.verify.streams import StreamedAnswer
from holdfast.verify.target import PATIENT_SECONDS, REQUEST_SECONDS, Answer, Target
from holdfast.verify.tasks import score_key
from holdfast.verify.texts import with_texts
from holdfast.verify.waiting import AnyAnswer, LimitedError, is_limited, until_admitted

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
TOKENIZE = "/tokenize"
UNKNOWN_FIELD = (400, 422)
"""How a server refuses a field that it does not know."""
_OK = 200
_MANY_TOKENS = 256
"""The tokens of an answer that takes minutes on a slow server, or behind others in its one slot."""
_MAX_REQUESTS = 8
"""More do not help to repeat a check."""
_MAX_FAULTS = 20
_MOST_ASKED_CHARACTERS = 2_000_000
"""The maximum of a text in a request; no check writes a longer one that a report repeats."""

Measurement = TypeVar("Measurement")
ChatMessage = Mapping[str, Any]
ChatPrompt = str | Sequence[ChatMessage]
"""What a user says, or a whole conversation."""


class SkippedError(Exception):
    """The server cannot show what the check looks at; the text says why."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.remedy = remedy


class InconclusiveError(Exception):
    """The check cannot judge; the text says why."""


class UnexpectedStatusError(Exception):
    """A request that is right was not answered with 200."""

    def __init__(self, answer: Answer | StreamedAnswer) -> None:
        request = answer.request
        said = excerpt(answer.text)
        super().__init__(f"{request.method} {request.path} answered {answer.status}: {said}")
        self.request = request
        self.status = answer.status


class Trial:
    """One attempt of one check."""

    def __init__(
        self,
        target: Target,
        server: Server,
        profile: Profile,
        options: Options,
        measured: dict[Any, Any],
    ) -> None:
        self.target = target
        self.server = server
        self.profile = profile
        self.options = options
        self._measured = measured
        self.numbers: list[Number] = []
        self.series: list[Series] = []
        self.faults: list[Fault] = []
        self.warnings: list[Fault] = []
        self._requests: list[Request] = []
        self._shared_requests: list[Request] = []
        self._measuring = 0
        """How many shared measurements are under way, each within the one before."""
        self.refusals: Counter[int] = Counter()
        """How often a request was refused only for now, and had to wait; by status."""
        self.answered_at_seconds = -math.inf
        """When the last answer came, by the clock of `time.monotonic`."""

    @property
    def requests(self) -> tuple[Request, ...]:
        """The requests that repeat the check; the first few of many."""
        return tuple(map(_repeatable, self._requests or self._shared_requests))

    @property
    def baseline(self) -> Baseline | None:
        """The recorded run that the server is compared with; None without one."""
        return self.options.baseline

    async def once(self, measure: Callable[[Trial], Awaitable[Measurement]]) -> Measurement:
        """What `measure` finds, which all checks of a run share; if it raises, the next one tries.

        Its requests are not the check's own, and are in the report only if the check has none.
        """
        if measure not in self._measured:
            self._measuring += 1
            try:
                self._measured[measure] = await measure(self)
            finally:
                self._measuring -= 1
        found: Measurement = self._measured[measure]
        return found

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        method: str = "",
        raw: str = "",
        deadline_seconds: float = REQUEST_SECONDS,
    ) -> Answer:
        """The answer to a request, with any status.

        Raises:
            NoAnswerError: there is none in time.
        """
        has_body = body is not None or raw
        request = self.request(path, body, method or ("POST" if has_body else "GET"), raw)
        self._note(request)
        answer = await self.target.ask(request, deadline_seconds=deadline_seconds)
        self.answered_at_seconds = time.monotonic()
        return answer

    async def admitted(
        self,
        ask: Callable[..., Awaitable[AnyAnswer]],
        deadline_seconds: float = REQUEST_SECONDS,
        *,
        is_refused: Callable[[AnyAnswer], bool] = is_limited,
    ) -> AnyAnswer:
        """The answer that `ask` gets, see `until_admitted`.

        Raises:
            NoAnswerError: none came in time.
            InconclusiveError: the server does not let it in before the deadline.
        """
        try:
            answer = await until_admitted(ask, deadline_seconds, self._note_refusal, is_refused)
        except LimitedError as error:
            raise InconclusiveError(str(error)) from None
        self.answered_at_seconds = time.monotonic()
        return answer

    async def post(
        self, path: str, body: Mapping[str, Any], *, deadline_seconds: float | None = None
    ) -> Answer:
        """The answer to a request that is right; by default, its tokens decide the deadline.

        Raises:
            NoAnswerError: there is none in time.
            UnexpectedStatusError: its status is not 200.
            InconclusiveError: it is not let in before the deadline.
        """
        deadline_seconds = deadline_seconds or _deadline_seconds_of(body)
        answer = await self.admitted(partial(self.ask, path, body), deadline_seconds)
        if answer.status != _OK:
            raise UnexpectedStatusError(answer)
        return answer

    async def chat(
        self, asked: ChatPrompt, *, deadline_seconds: float | None = None, **options: Any
    ) -> Answer:
        """The answer to a chat: greedy, unless `options` say otherwise.

        Raises:
            NoAnswerError: there is none in time.
            UnexpectedStatusError: its status is not 200.
        """
        body = self.chat_body(asked, **options)
        return await self.post(CHAT, body, deadline_seconds=deadline_seconds)

    async def complete(
        self,
        prompt: str | Sequence[Any],
        *,
        deadline_seconds: float | None = None,
        **options: Any,
    ) -> Answer:
        """The answer to a completion, as `chat`."""
        body = self.completion_body(prompt, **options)
        return await self.post(COMPLETIONS, body, deadline_seconds=deadline_seconds)

    async def stream(
        self, path: str, body: Mapping[str, Any], *, deadline_seconds: float | None = None
    ) -> StreamedAnswer:
        """The same request as a stream; that of a chat or a completion ends with the usage.

        Raises:
            NoAnswerError: it does not end in time.
            UnexpectedStatusError: its status is not 200.
            InconclusiveError: it is not let in before the deadline.
        """
        option = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETIONS) else {}
        request = self.request(path, {"stream": True, **option, **body})
        self._note(request)
        deadline_seconds = deadline_seconds or _deadline_seconds_of(body)
        answer = await self.admitted(partial(self.target.stream, request), deadline_seconds)
        if answer.status != _OK:
            raise UnexpectedStatusError(answer)
        return answer

    async def leave(self, path: str, body: Mapping[str, Any], *, after_bytes: int) -> int:
        """Go away in the middle of a stream, and return its status."""
        request = self.request(path, {"stream": True, **body})
        self._note(request)
        leave = partial(self.target.leave_early, request, after_bytes=after_bytes)
        return (await self.admitted(leave)).status

    async def count_tokens(self, body: Mapping[str, Any]) -> int:
        """The tokens of the prompt of a chat or a completion, as `/tokenize` counts them."""
        return dig((await self.tokenize(body)).document, "count", kind=int)

    async def tokenize(self, body: Mapping[str, Any]) -> Answer:
        """What `/tokenize` says of the prompt of a chat or a completion.

        Raises:
            SkippedError: it does not accept chats, as SGLang's does not.
        """
        names = ("model", "messages", "prompt", "tools", "chat_template_kwargs")
        asked = {name: body[name] for name in names if name in body}
        try:
            return await self.post(TOKENIZE, asked)
        except UnexpectedStatusError as error:
            is_refused = error.status in UNKNOWN_FIELD and not self.server.is_vllm
            if "messages" in body and is_refused:
                raise SkippedError(f"{TOKENIZE} does not accept chats") from None
            raise

    def request(
        self, path: str, body: Mapping[str, Any] | None, method: str = "POST", raw: str = ""
    ) -> Request:
        """The request, with the names that the server takes."""
        return Request(method, path, body_for(self.server, path, body), raw)

    def chat_body(self, asked: ChatPrompt, **options: Any) -> dict[str, Any]:
        """The body of a chat."""
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        return {"model": self.server.model, "messages": messages, "temperature": 0, **options}

    def completion_body(self, prompt: str | Sequence[Any], **options: Any) -> dict[str, Any]:
        """The body of a completion."""
        return {"model": self.server.model, "prompt": prompt, "temperature": 0, **options}

    def _note_refusal(self, status: int) -> None:
        self.refusals[status] += 1

    def require(
        self, holds: object, what: str, answer: Answer | StreamedAnswer | None = None
    ) -> bool:
        """Note `what` as a fault unless it holds."""
        if not holds:
            self.blame(what, answer)
        return bool(holds)

    @contextmanager
    def demanding_form(self, answer: Answer | StreamedAnswer) -> Iterator[None]:
        """A malformed answer is a fault here, and does not only hinder what is looked for."""
        try:
            yield
        except MalformedError as error:
            self.blame(str(error), answer)

    def blame(
        self,
        what: str,
        answer: Answer | StreamedAnswer | None = None,
        request: Request | None = None,
    ) -> None:
        """Note a fault, and the answer that shows it, or only the request; the check fails."""
        if len(self.faults) < _MAX_FAULTS:
            self.faults.append(fault_of(what, answer, request))

    def warn(self, what: str, answer: Answer | StreamedAnswer | None = None) -> None:
        """Note what is allowed, but not recommended."""
        if len(self.warnings) < _MAX_FAULTS:
            self.warnings.append(fault_of(what, answer))

    def measure(self, name: str, value: float, unit: str = "", limit: Limit | None = None) -> None:
        """Note a number; beyond its limit the check fails."""
        self.numbers.append(Number(name, value, unit, limit))

    def score(self, name: str, right: float, of: float) -> None:
        """Note which share of some tasks came out right.

        `name` is the score's in every run, and that of no other check. A baseline that knows the
        score of the same questions limits it (`baseline.limit_of`); else it is only reported.
        """
        share = Number(name, 100 * right / of, "%", of=of)
        key = score_key(name, self.profile, self.options.tasks)
        self.numbers.append(replace(share, limit=limit_of(share, key, self.baseline)))

    def draw(
        self,
        name: str,
        x_name: str,
        y_name: str,
        points: Iterable[tuple[float, float]],
        limit: Limit | None = None,
    ) -> None:
        """Note numbers for a chart."""
        self.series.append(Series(name, x_name, y_name, tuple(points), limit))

    def _note(self, request: Request) -> None:
        noted = self._shared_requests if self._measuring else self._requests
        if len(noted) < _MAX_REQUESTS and request not in noted:
            noted.append(request)


def _deadline_seconds_of(body: Mapping[str, Any]) -> float:
    """How long an answer may take, by how many tokens it may have."""
    is_long = body.get("max_tokens", 0) >= _MANY_TOKENS
    return PATIENT_SECONDS if is_long else REQUEST_SECONDS


def fault_of(
    what: str, answer: Answer | StreamedAnswer | None = None, request: Request | None = None
) -> Fault:
    """What is wrong, with the answer or the request that shows it; nothing in it is long."""
    shows = answer.request if answer is not None else request
    answered = excerpt(answer.text) if answer is not None else ""
    return Fault(quoted(what), shows and _repeatable(shows), answered)


def _repeatable(request: Request) -> Request:
    """The request as a report has it: a model's answer may be a part of it, and of any length."""
    return with_texts(request, partial(shortened, characters=_MOST_ASKED_CHARACTERS))
