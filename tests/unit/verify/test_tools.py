"""The group `tools`: each defect of a server is found by the check that is meant for it, alone."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Sequence

import jsonschema
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from double_defects import Defect
from double_limits import AlternatingDouble
from double_model import Generated, tokens_of
from holdfast.verify import packages, records
from holdfast.verify.baseline import Baseline, Score
from holdfast.verify.checks import tools
from holdfast.verify.checks.tools import asking, parser, replay, schemas
from holdfast.verify.checks.tools.calls import Call, Turn, as_read, streamed_turn
from holdfast.verify.checks.tools.keywords import MAKERS, Case, cases
from holdfast.verify.checks.tools.scenes import all_functions, all_scenes, triggers
from holdfast.verify.options import Options
from holdfast.verify.records import CheckResult, CheckStatus, Profile
from holdfast.verify.streams import Chunk, StreamedAnswer
from openai_double import DERENDER, Body, OpenAIDouble
from schema_keywords import limiting, used_by
from unseeded_double import Unseeded
from verified import not_passed, results

OWN = [check for check in tools.CHECKS if check.name not in ("probe", "replay")]
REPLAY = [check for check in tools.CHECKS if check.name == "replay"]
PROBE = [check for check in tools.CHECKS if check.name == "probe"]
FORM = [check for check in tools.CHECKS if check.name == "form"]
ENDS_BY_STOP = "an answer whose calls the model chose to make ends by stop, and not by tool_calls"
_MOST_SECONDS = 5.0
"""Many times what it takes, and a fraction of what a square would take."""

FOUND_BY: dict[Defect, str] = {
    "calls that share an id": "form",
    "streamed calls numbered from 1": "form",
    "calls that end by stop": "form",
    "streams without the last of several calls": "stream_twin",
    "markup of calls left in the text": "markup",
    "the second call dropped": "parser",
    "the second call left in the text as JSON": "parser",
    "arguments of forced calls cut": "schemas",
    "forced calls of an unknown function": "schemas",
    "forced calls beside their schema": "schemas",
    "demanded calls not made": "schemas",
    "results of functions ignored": "scenes",
    "functions called for nothing": "trigger",
}
BASELINE = Baseline(
    scores={
        "scenes, pass^1": Score(42, 12),
        "trigger F1": Score(100, 400),
        replay.SCORE: Score(100, 23),
    }
)
"""What a model is asked to do, where a recorded one did it."""


def made_by(app: OpenAIDouble) -> dict[str, CheckResult]:
    return results(app, OWN, options=Options(BASELINE))


def test_a_server_that_is_well_passes() -> None:
    """Nothing is blamed, warned of or skipped, and the scores keep to the baseline."""
    made = made_by(OpenAIDouble())
    assert {name: (one.status, one.reason) for name, one in made.items() if one.reason} == {}
    numbers = {one.name: one for one in made["tools.schemas"].numbers}
    assert numbers["calls"].value == 60
    assert numbers["valid calls"].value == 100


@pytest.mark.parametrize("defect", FOUND_BY)
def test_a_defect_is_found_by_its_check(defect: Defect) -> None:
    """No other one fails."""
    made = not_passed(made_by(OpenAIDouble(defect)))
    failed = {name for name, status in made.items() if status is CheckStatus.FAILED}
    assert failed == {f"tools.{FOUND_BY[defect]}"}


def test_both_ways_of_an_answer_have_to_say_that_it_ends_with_calls() -> None:
    """A call that was demanded may end by stop, and other servers are only warned of."""
    app = OpenAIDouble("calls that end by stop").owned_by("somebody")
    (made,) = results(app, FORM).values()
    assert made.status is CheckStatus.WARNED
    assert {one.what for one in made.warnings} == {ENDS_BY_STOP}
    asked = [one.request.body or {} for one in made.warnings if one.request]
    assert [body.get("stream", False) for body in asked] == [False, True] * 2
    assert not any("tool_choice" in body for body in asked)


class Ending(OpenAIDouble):
    """Ends answers with calls, or those without, by a reason of its own."""

    def __init__(self, reason: str, *, calls: bool, demanded: bool) -> None:
        super().__init__()
        self._reason, self._calls, self._demanded = reason, calls, demanded

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        answer = await super()._chat(request)
        is_meant = ("tool_choice" in body) is self._demanded and body.get("tools")
        if is_meant and isinstance(answer, JSONResponse):
            told = json.loads(bytes(answer.body))
            self._end(told, has_calls="tool_calls" in told["choices"][0]["message"])
            return JSONResponse(told)
        if is_meant and isinstance(answer, StreamingResponse):
            parts = [part async for part in answer.body_iterator]
            events = [part if isinstance(part, str) else bytes(part).decode() for part in parts]
            has_calls = any('"tool_calls": [' in event for event in events)
            return StreamingResponse(
                (self._ended(event, has_calls=has_calls) for event in events),
                media_type=answer.media_type,
            )
        return answer

    def _ended(self, event: str, *, has_calls: bool) -> str:
        if "[DONE]" in event:
            return event
        told = json.loads(event.removeprefix("data: "))
        self._end(told, has_calls=has_calls)
        return f"data: {json.dumps(told)}\n\n"

    def _end(self, told: Body, *, has_calls: bool) -> None:
        for choice in told["choices"]:
            if has_calls is self._calls and choice.get("finish_reason"):
                choice["finish_reason"] = self._reason


@pytest.mark.parametrize(
    ("app", "status", "said"),
    [
        (
            Ending("tool_calls", calls=False, demanded=False),
            CheckStatus.FAILED,
            "an answer without a call ends by tool_calls",
        ),
        (
            Ending("function_call", calls=False, demanded=False),
            CheckStatus.FAILED,
            "an answer without a call ends by function_call",
        ),
        (
            Ending("length", calls=True, demanded=False),
            CheckStatus.WARNED,
            "an answer with calls that nothing cut ends by length",
        ),
        (
            Ending("content_filter", calls=True, demanded=True),
            CheckStatus.FAILED,
            "an answer with calls that nothing cut ends by content_filter",
        ),
        (Ending("tool_calls", calls=True, demanded=True), CheckStatus.PASSED, ""),
        (Ending("stop", calls=True, demanded=True), CheckStatus.PASSED, ""),
        (Ending("length", calls=False, demanded=False), CheckStatus.PASSED, ""),
    ],
)
def test_an_answer_ends_by_a_reason_that_fits_its_calls(
    app: Ending, status: CheckStatus, said: str
) -> None:
    """At once and as a stream: clients run functions, or do not, by what the reason says."""
    (made,) = results(app, FORM).values()
    assert made.status is status, made.reason
    noted = [*made.faults, *made.warnings]
    assert {one.what for one in noted} == ({said} if said else set())
    asked = [one.request.body or {} for one in noted if one.request]
    ways = {body.get("stream", False) for body in asked}
    assert ways == ({False, True} if said else set())


def test_a_call_that_was_cut_may_end_by_length() -> None:
    """Though it is whole by then."""

    class Cut(Ending):
        def _end(self, told: Body, *, has_calls: bool) -> None:
            super()._end(told, has_calls=has_calls)
            if told.get("usage"):
                told["usage"]["completion_tokens"] = asking.ANSWER_TOKENS

    (made,) = results(Cut("length", calls=True, demanded=False), FORM).values()
    assert made.status is CheckStatus.PASSED, made.reason


def test_a_demand_that_ends_without_a_call_is_warned_of() -> None:
    """vLLM says tool_calls where a thinking model ends in its thoughts."""

    class Ended(Ending):
        async def _body(self, request: Request) -> Body:
            body = await super()._body(request)
            return {**body, "tool_choice": "none"} if "tool_choice" in body else body

    (made,) = results(Ended("tool_calls", calls=False, demanded=True), FORM).values()
    assert made.status is CheckStatus.WARNED
    assert {one.what for one in made.warnings} == {"an answer without a call ends by tool_calls"}


class Unforced(OpenAIDouble):
    """Cannot be forced to call a function, as thinking models of some servers."""

    async def _body(self, request: Request) -> Body:
        body = await super()._body(request)
        if body.get("tool_choice", "auto") != "auto":
            raise HTTPException(400, "Thinking mode does not support this tool_choice")
        return body


def test_a_server_that_cannot_force_a_call_is_not_blamed() -> None:
    """Its words are a warning, and calls that the model makes of its own are judged."""
    made = made_by(Unforced())
    warned = dict.fromkeys(("tools.form", "tools.stream_twin", "tools.markup"), CheckStatus.WARNED)
    assert not_passed(made) == {**warned, "tools.schemas": CheckStatus.SKIPPED}
    said = [one.what for one in made["tools.form"].warnings]
    assert len(said) == 2
    assert all("Thinking mode does not support this tool_choice" in one for one in said)
    assert {one.name: one.value for one in made["tools.form"].numbers} == {"calls": 3}


def test_a_server_that_fails_at_a_forced_call_is_blamed() -> None:
    """Only a 4xx says that it cannot do it."""

    class Failing(Unforced):
        async def _refused(self, request: Request, error: Exception) -> Response:
            answer = await super()._refused(request, error)
            answer.status_code = 500
            return answer

    form = [check for check in OWN if check.name == "form"]
    assert not_passed(results(Failing(), form)) == {"tools.form": CheckStatus.FAILED}


class Remembering(Unforced):
    """Thinks before each answer, and takes no turn back without its thoughts."""

    def __init__(self, name: str, thought: str = "Let me see.") -> None:
        super().__init__()
        self._name, self._told = name, thought

    def _thought(self, _made: Generated, _body: Body) -> Body:
        return {self._name: self._told}

    async def _body(self, request: Request) -> Body:
        body = await super()._body(request)
        own = [one for one in body.get("messages", ()) if one["role"] == "assistant"]
        if any(one.get(self._name) != self._told for one in own):
            raise HTTPException(400, f"the {self._name} must be passed back")
        return body


@pytest.mark.parametrize("app", [Remembering("reasoning"), Remembering("reasoning_content", "")])
def test_thoughts_go_back_with_their_turn(app: OpenAIDouble) -> None:
    """Under the name under which they came, also empty ones."""
    scenes = [check for check in OWN if check.name == "scenes"]
    made = results(app, scenes, options=Options(BASELINE))
    assert not_passed(made) == {}


def test_scores_without_a_baseline_are_only_told() -> None:
    """A model may be as bad at functions as it likes."""
    scored = [check for check in OWN if check.name in ("scenes", "trigger")]
    made = results(OpenAIDouble("functions called for nothing"), scored)
    assert not_passed(made) == {}
    numbers = {one.name: one for result in made.values() for one in result.numbers}
    assert numbers["trigger F1"].standard_error
    assert numbers["scenes, pass^1"].limit is None


class Rehearsed(OpenAIDouble):
    """Counts how often a conversation with the functions of the scenes begins."""

    def __init__(self) -> None:
        super().__init__()
        self.plays = 0

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        is_scene = len(body.get("tools", ())) == len(all_functions())
        self.plays += is_scene and len(body["messages"]) == 1
        return await super()._chat(request)


@pytest.mark.parametrize(("profile", "tries"), [("standard", 1), ("full", 5)])
def test_pass_k_asks_for_each_try(profile: Profile, tries: int) -> None:
    """A scene is played once or five times, and counts if it passes each time."""
    app = Rehearsed()
    (made,) = results(app, [check for check in OWN if check.name == "scenes"], profile).values()
    numbers = {one.name: one for one in made.numbers}
    every = numbers[f"scenes, pass^{tries}"]
    assert (app.plays, every.of) == (12 * tries, 12)
    assert every.value <= numbers.get(f"scenes, pass@{tries}", every).value


def test_full_forces_two_hundred_calls_each_way() -> None:
    """At once and as a stream."""
    full = [check for check in OWN if check.name == "schemas"]
    (made,) = results(OpenAIDouble(), full, "full").values()
    assert made.status is CheckStatus.PASSED, made.reason
    assert {one.name: one.value for one in made.numbers}["calls"] == 2 * 200


class Comparing(OpenAIDouble):
    """Tells the warmer of two cities, after it has looked up both in one turn."""

    def _generate(self, body: Body, prompt: str) -> Generated:
        if '"celsius": -4' in prompt:
            return Generated(tokens_of("Cairo is warmer."), "stop")
        return super()._generate(body, prompt)


class SingleCalls(Comparing):
    """Refuses several calls in one turn in Llama 3.1's words, or crashes."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self._status = status

    async def _chat(self, request: Request) -> Response:
        said = (await request.json())["messages"]
        if any(len(one.get("tool_calls") or ()) > 1 for one in said):
            raise HTTPException(self._status, "This model only supports single tool-calls at once!")
        return await super()._chat(request)


@pytest.mark.parametrize("status", [400, 500])
def test_a_scene_that_is_refused_is_not_passed(status: int) -> None:
    """The others are still played; a failure of the server's own fails the check."""
    (check,) = (check for check in OWN if check.name == "scenes")
    (whole,) = results(Comparing(), [check]).values()
    (made,) = results(SingleCalls(status), [check]).values()
    if status != 400:
        assert made.status is CheckStatus.FAILED, made.reason
        return
    assert made.status is CheckStatus.WARNED, made.reason
    assert "only supports single tool-calls" in made.reason
    (score,), (best,) = made.numbers, whole.numbers
    assert 0 < score.value < best.value


class WithoutResults(OpenAIDouble):
    """Refuses what a function returns, after however few calls."""

    async def _chat(self, request: Request) -> Response:
        said = (await request.json())["messages"]
        if any(one["role"] == "tool" for one in said):
            raise HTTPException(400, "there is no such role")
        return await super()._chat(request)


def test_a_scene_may_only_be_refused_for_several_calls() -> None:
    """A server that takes no result of a single call is of no use to an agent."""
    (check,) = (check for check in OWN if check.name == "scenes")
    (made,) = results(WithoutResults(), [check]).values()
    assert made.status is CheckStatus.FAILED, made.reason


def test_scenes_are_played_without_seeds_where_they_are_refused() -> None:
    """Each of their tries."""
    (check,) = (check for check in OWN if check.name == "scenes")
    (made,) = results(Unseeded().without("/statusz"), [check], "full").values()
    assert made.status is CheckStatus.PASSED, made.reason


def test_a_server_without_functions_is_not_blamed() -> None:
    """Every check is skipped, and says what to serve it with."""
    made = results(OpenAIDouble("functions are 400"), tools.CHECKS)
    assert {one.status for one in made.values()} == {CheckStatus.SKIPPED}
    said = "functions need --enable-auto-tool-choice (HTTP 400)"
    assert {one.reason for one in made.values()} == {
        f"the server does not support tool calls: {said}"
    }
    assert all("--enable-auto-tool-choice" in one.remedy for one in made.values())


def test_a_model_that_ends_no_call_is_not_blamed() -> None:
    """What `max_tokens` cut is nobody's fault."""
    made = results(OpenAIDouble("chats that never end"), OWN)
    failed = {name: one.reason for name, one in made.items() if one.status is CheckStatus.FAILED}
    assert failed == {}
    assert made["tools.schemas"].status is CheckStatus.SKIPPED


class Lax(OpenAIDouble):
    """Refuses to hold a call to its schema."""

    async def _chat(self, request: Request) -> Response:
        offered = (await request.json()).get("tools", ())
        is_strict = any(one["function"].get("strict") for one in offered)
        return JSONResponse({}, 400) if is_strict else await super()._chat(request)


def test_a_server_that_refuses_every_forced_call_does_not_pass() -> None:
    """It is judged no better than one that refuses some."""
    (made,) = results(Lax(), [check for check in OWN if check.name == "schemas"]).values()
    assert made.status is CheckStatus.INCONCLUSIVE
    assert made.reason == "no forced call finished: refused by the server"
    assert "answered 400" in made.warnings[0].what


@pytest.mark.parametrize(
    ("content", "calls"),
    [
        ('{"name": "get_weather", "arguments": {"city": "Oslo"}}', ["get_weather"]),
        ('[get_weather(city="Oslo"), set_alarm(hour=7)]', ["get_weather", "set_alarm"]),
        ("<function=set_alarm>\n<parameter=hour>7</parameter>", ["set_alarm"]),
        ('get_weather[ARGS]{"city": "Oslo"}get_weather{"city": "Rome"}', ["get_weather"] * 2),
        ('<invoke name="set_alarm"><parameter name="hour">7</parameter>', ["set_alarm"]),
        ("<tool_call>set_alarm\n<arg_key>hour</arg_key>", ["set_alarm"]),
        ("Of get_weather and set_alarm() I need neither.", []),
        ('<think>\nget_weather(city="Oslo")?\n</think>\nNo.', []),
    ],
)
def test_a_call_in_the_text_is_known_by_its_form(content: str, calls: list[str]) -> None:
    """Whichever parser would have read it; a mention and a thought are none."""
    assert sorted(parser.left_in(content).elements()) == calls


def test_calls_of_a_server_that_cannot_tokenize_chats_are_not_judged() -> None:
    """Nothing shows what the model wrote."""

    class Untemplated(OpenAIDouble):
        async def _tokenize(self, request: Request) -> Response:
            if "messages" in await request.json():
                return JSONResponse({}, 400)
            return await super()._tokenize(request)

    app = Untemplated().without("/version", "/statusz")
    (made,) = results(app, [check for check in OWN if check.name == "parser"]).values()
    assert (made.status, made.reason) == (CheckStatus.SKIPPED, "/tokenize does not accept chats")


class Respelling(OpenAIDouble):
    """Writes calls at once with other spaces than in a stream, within them and beside them."""

    def _choice(self, index: int, made: Generated, body: Body, *, is_chat: bool) -> Body:
        choice = super()._choice(index, made, body, is_chat=is_chat)
        for call in choice.get("message", {}).get("tool_calls", ()):
            choice["message"]["content"] = "\n\n"
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
        return choice


def test_calls_may_differ_in_their_spelling() -> None:
    """Clients read the same of them, as of `vllm serve` with a Hermes parser."""
    (made,) = results(
        Respelling(), [check for check in OWN if check.name == "stream_twin"]
    ).values()
    assert (made.status, made.reason) == (CheckStatus.PASSED, "")


@pytest.mark.parametrize(
    ("arguments", "content", "is_same"),
    [
        ('{"a":1,"b":[]}', "\n", True),
        ('{"b": [], "a": 1.0}', "", False),
        ('{"a": "1", "b": []}', "", False),
        ('{"a": 1, "b": []', "", False),
        ('{"a": 1, "b": []}', "Yes.", False),
    ],
)
def test_calls_are_compared_as_clients_read_them(
    arguments: str, content: str, is_same: bool
) -> None:
    """Other values, broken JSON and words are not a matter of spelling."""
    turn = Turn("", "", (Call("f", '{"a": 1, "b": []}'),), "tool_calls")
    other = Turn(content, "", (Call("f", arguments),), "tool_calls")
    assert (as_read(turn) == as_read(other)) is is_same


@pytest.mark.parametrize(
    ("indices", "arguments"), [([0] * 20_000, "x" * 1000), (range(50_000), "")], ids=("one", "many")
)
def test_many_parts_are_put_together_in_a_time_that_grows_with_them(
    indices: Sequence[int], arguments: str
) -> None:
    """Of one call or of as many; in it neither a deadline nor Ctrl-C ends a check."""
    parts = [{"index": index, "function": {"arguments": arguments}} for index in indices]
    delta = {"delta": {"tool_calls": parts}, "index": 0, "finish_reason": "tool_calls"}
    text = f"data: {json.dumps({'choices': [delta]})}\n\ndata: [DONE]\n\n"
    chunks = (Chunk(0.0, text.encode()),)
    answer = StreamedAnswer(records.Request("POST", "/"), 200, "text/event-stream", chunks, 0.0)
    started_seconds = time.process_time()
    turn = streamed_turn(answer)
    assert time.process_time() - started_seconds < _MOST_SECONDS
    assert sum(len(call.arguments) for call in turn.calls) == len(indices) * len(arguments)


class Cut(OpenAIDouble):
    """Cannot end a call within its tokens."""

    def _generate(self, body: Body, _prompt: str) -> Generated:
        most = body.get("max_tokens") or 0
        return Generated(tokens_of("<tool_call>" + "on and on, " * most)[:most], "length")


def test_half_a_call_is_not_markup_that_was_left() -> None:
    """What `max_tokens` cut cannot be parsed."""
    (made,) = results(Cut(), [check for check in OWN if check.name == "markup"]).values()
    assert made.status is CheckStatus.SKIPPED


@pytest.fixture
def _canitoolcall() -> None:
    """Skip where the package is not installed."""
    if not packages.has_module("canitoolcall"):
        pytest.skip(f"canitoolcall is not installed: {packages.REMEDY}")


@pytest.mark.usefixtures("_canitoolcall")
def test_recorded_answers_come_out_as_they_were_meant() -> None:
    """Each is parsed at once and as streams, and the score keeps to the baseline."""
    (made,) = results(OpenAIDouble(), REPLAY, options=Options(BASELINE)).values()
    assert (made.status, made.reason) == (CheckStatus.PASSED, "")
    (score,) = made.numbers
    assert (score.name, score.value) == (replay.SCORE, 100)
    assert score.limit is not None


@pytest.mark.usefixtures("_canitoolcall")
def test_a_parser_that_loses_streamed_calls_falls_behind_its_baseline() -> None:
    """No other check fails. Without a baseline, what goes wrong is only named."""
    app = OpenAIDouble("calls lost in parts of several tokens")
    made = not_passed(results(app, [*OWN, *REPLAY], options=Options(BASELINE)))
    assert made == {"tools.replay": CheckStatus.FAILED}
    (told,) = results(app, REPLAY).values()
    assert told.status is CheckStatus.WARNED
    assert any("instruct2507-parallel-calls, as a stream" in one.what for one in told.warnings)


@pytest.mark.usefixtures("_canitoolcall")
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((), "does not say which parser"),
        (("--tool-call-parser", "granite"), "has no answers for the parser granite"),
    ],
)
def test_without_a_known_parser_nothing_is_replayed(flags: tuple[str, ...], reason: str) -> None:
    """The check is skipped, and says why."""
    app = OpenAIDouble()
    app.configuration = dataclasses.replace(app.configuration, flags=flags)
    (made,) = results(app, REPLAY).values()
    assert made.status is CheckStatus.SKIPPED
    assert reason in made.reason


class Unparsing(OpenAIDouble):
    """Parses nothing on request, and says so in its own way."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self._status = status

    async def _derender(self, _request: Request) -> Response:
        return JSONResponse({}, self._status)


@pytest.mark.usefixtures("_canitoolcall")
@pytest.mark.parametrize("status", [403, 404, 405, 501, 302])
def test_a_server_that_parses_nothing_on_request_is_not_blamed(status: int) -> None:
    """It says which flag is missing."""
    (made,) = results(Unparsing(status), REPLAY).values()
    assert made.status is CheckStatus.SKIPPED
    assert "--enable-scale-out" in made.remedy
    (made,) = results(Unparsing(status).listing(DERENDER).owned_by("openai"), REPLAY).values()
    assert made.status is CheckStatus.SKIPPED


@pytest.mark.usefixtures("_canitoolcall")
@pytest.mark.parametrize("owner", ["", "vllm"], ids=("Holdfast", "vLLM"))
@pytest.mark.parametrize("status", [404, 405, 501, 302])
def test_a_listed_route_of_vllm_has_to_parse(status: int, owner: str) -> None:
    """It is listed only where the server was started with it."""
    app = Unparsing(status).listing(DERENDER)
    (made,) = results(app.owned_by(owner) if owner else app, REPLAY).values()
    assert made.status is CheckStatus.FAILED
    assert f"{DERENDER} answered {status}" in made.reason


@pytest.mark.usefixtures("_canitoolcall")
def test_a_limit_of_requests_does_not_hide_that_nothing_is_parsed_on_request() -> None:
    """The check waits until it is past."""
    app = AlternatingDouble()
    app.limited = (DERENDER,)
    app.router.routes = [one for one in app.router.routes if getattr(one, "path", "") != DERENDER]
    (made,) = results(app, REPLAY).values()
    assert made.status is CheckStatus.SKIPPED
    assert "--enable-scale-out" in made.remedy


@pytest.mark.parametrize("case", cases(len(MAKERS)), ids=lambda case: str(case.name))
def test_each_case_can_be_met(case: Case) -> None:
    """Its schema is one, and accepts the arguments that the model is asked for."""
    jsonschema.Draft202012Validator.check_schema(case.parameters)
    jsonschema.Draft202012Validator(case.parameters).validate(case.arguments)


def test_the_cases_are_the_same_each_time() -> None:
    """30 of `standard` and 200 of `full`, with names of their own."""
    many = cases(200)
    assert many == cases(200)
    assert many[:30] == cases(30)
    assert len({case.name for case in many}) == len(many) == 200
    for case in many:
        jsonschema.Draft202012Validator(case.parameters).validate(case.arguments)


def test_the_cases_have_every_keyword() -> None:
    """Those of `standard` have what pydantic writes for a model within a model."""
    assert {"$ref", "$defs"} <= used_by(cases(30))
    assert limiting() <= used_by(cases(200))


def test_the_scenes_use_functions_that_there_are() -> None:
    """Each call of a scene and each trigger has its function, with its parameters."""
    known = {one["function"]["name"]: one["function"]["parameters"] for one in all_functions()}
    calls = [
        call for scene in all_scenes() for turn in scene.turns for call in turn.get("calls", ())
    ]
    for call in calls:
        jsonschema.Draft202012Validator(known[call["name"]]).validate(call["arguments"])
    assert {name for name in triggers().values() if name} <= known.keys()
    assert len(triggers()) == 40


@pytest.mark.parametrize(
    ("defect", "status"),
    [
        ("", CheckStatus.PASSED),
        ("markup of calls left in the text", CheckStatus.FAILED),
        ("streams without the last of several calls", CheckStatus.FAILED),
        ("functions called for nothing", CheckStatus.WARNED),
        ("the second call dropped", CheckStatus.WARNED),
    ],
)
@pytest.mark.usefixtures("_canitoolcall")
def test_the_probe_of_canitoolcall_is_made(defect: Defect, status: CheckStatus) -> None:
    """It fails a server for what is the server's, and warns of what may be the model's."""
    (made,) = results(OpenAIDouble(defect), PROBE).values()
    assert made.status is status, made.reason


@pytest.mark.usefixtures("_canitoolcall")
def test_what_a_server_of_thinking_models_refuses_is_a_warning_of_the_probe() -> None:
    """The probe forces a call, and sends one back without thoughts."""
    (made,) = results(Remembering("reasoning_content", ""), PROBE).values()
    assert made.status is CheckStatus.WARNED
    refused = {one.what.split(",")[0] for one in made.warnings if "HTTP 400" in one.what}
    assert refused == {"forced-tool-choice", "tool-result-followup"}


class NineCharacterIds(OpenAIDouble):
    """Takes the ids of calls that Mistral's tokenizers v3 to v11 take, and only for known calls."""

    async def _chat(self, request: Request) -> Response:
        messages = (await request.json())["messages"]
        called = [call["id"] for said in messages for call in said.get("tool_calls") or ()]
        returned = [said["tool_call_id"] for said in messages if said["role"] == "tool"]
        for one in (*called, *returned):
            if not re.fullmatch("[a-zA-Z0-9]{9}", one):
                said = f"Tool call id was {one} but must be a-z, A-Z, 0-9, with a length of 9."
                raise HTTPException(400, said)
        if called != returned:
            raise HTTPException(400, "Not the same number of function calls and responses")
        return await super()._chat(request)


@pytest.mark.usefixtures("_canitoolcall")
def test_the_probe_names_a_call_as_every_model_takes_it() -> None:
    """Its call and its result have the same id, of nine letters and digits."""
    (made,) = results(NineCharacterIds(), PROBE).values()
    assert (made.status, made.reason) == (CheckStatus.PASSED, "")


class Roomy(OpenAIDouble):
    """Has a long context, and remembers how many tokens it was asked for in streams of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = set[int]()
        routes = self.router.routes
        self.router.routes = [one for one in routes if getattr(one, "path", "") != "/statusz"]

    async def _models(self, request: Request) -> Response:
        listed = json.loads(bytes((await super()._models(request)).body))
        return JSONResponse({**listed, "data": [{**listed["data"][0], "max_model_len": 8192}]})

    async def _body(self, request: Request) -> Body:
        body = await super()._body(request)
        if body.get("stream"):
            self.asked.add(body["max_tokens"])
        return body


@pytest.mark.usefixtures("_canitoolcall")
def test_the_probe_leaves_a_thinker_room() -> None:
    """It would take half a call, which `max_tokens` cut, for markup."""
    app = Roomy()
    (made,) = results(app, PROBE).values()
    assert made.status is CheckStatus.PASSED
    assert app.asked == {1024}


@pytest.mark.parametrize(
    ("format_", "wrong"),
    [("date", "2024-13-45"), ("email", "nobody"), ("uuid", "no-uuid")],
)
def test_a_format_is_a_part_of_a_schema(format_: str, wrong: str) -> None:
    """A text that is not in it does not keep to the schema."""
    schema = {"type": "object", "properties": {"x": {"type": "string", "format": format_}}}
    assert schemas._refusal(Case("x", schema, {}), {"x": wrong})
