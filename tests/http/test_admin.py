"""The admin routes over a scripted supervisor: what reaches it, what is answered and logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from asgi_server import serving
from holdfast.api.admin import admin_app, admin_route
from holdfast.api.router import OwnRoutes
from holdfast.errors import (
    ConflictError,
    EngineLostError,
    EngineRefusedError,
    EngineSilentError,
    HoldfastError,
    NotFoundError,
    NotReadyError,
)
from holdfast.labels import SLEEP_TAGS
from holdfast.lifecycle.commands import (
    Command,
    ProbeCommand,
    ProbeResult,
    SleepCommand,
    SleepResult,
    WakeCommand,
)
from holdfast.records import Lora, ProbeReport, ProbeStep, RankMemory, Status
from holdfast.request_context import current_request
from holdfast.verify.records import VerifyRun
from inner_app import InnerApp
from sample_status import a_fresh_status, a_status
from stub_engine import StubEngine

REPORT = ProbeReport("quick", True, False, 900, 1.5, (ProbeStep("first_token", "passed", 0.5, 3),))
DEADLINE_SECONDS = 60.0
ROUTES = (
    ("GET", "/admin/workspace"),
    ("POST", "/admin/probe"),
    ("POST", "/admin/drain"),
    ("POST", "/admin/restart"),
    ("POST", "/admin/sleep"),
    ("POST", "/admin/wake"),
    ("POST", "/admin/profile/start"),
    ("POST", "/admin/profile/stop"),
    ("POST", "/admin/cache/reset"),
    ("POST", "/admin/save-sharded-state"),
    ("GET", "/admin/loras"),
    ("POST", "/admin/loras"),
    ("POST", "/admin/loras/{name}/pin"),
    ("DELETE", "/admin/loras/{name}"),
    ("GET", "/admin/log-level"),
    ("PUT", "/admin/log-level"),
    ("PUT", "/admin/verify-run"),
)


WRONG_BODIES: tuple[tuple[str, Any], ...] = (
    ("/admin/probe", {"suite": "off"}),
    ("/admin/probe", {"suite": "quick", "force": True}),
    ("/admin/probe", {"max_age_seconds": -1}),
    ("/admin/probe", {"max_age_seconds": "1e400"}),
    ("/admin/probe", ["quick"]),
    ("/admin/restart", {}),
    ("/admin/restart", {"reason": ""}),
    ("/admin/restart", {"reason": "two\nlines"}),
    ("/admin/restart", {"reason": "x" * 201}),
    ("/admin/sleep", {"level": 3}),
    ("/admin/sleep", {"mode": "keep"}),
    ("/admin/wake", {"tags": []}),
    ("/admin/wake", {"tags": ["everything"]}),
    ("/admin/profile/start", {"prefix": "../up"}),
    ("/admin/cache/reset", {"caches": ["all"]}),
    ("/admin/save-sharded-state", {"path": "relative"}),
    ("/admin/save-sharded-state", {"path": "/x", "max_size_bytes": 0}),
    ("/admin/loras", {"name": "", "path": "/x"}),
    ("/admin/loras", {"name": "a\x00b", "path": "/x"}),
    ("/admin/loras", {"name": "lab/a/", "path": "/x"}),
    ("/admin/loras", {"name": "a,b", "path": "/x"}),
    ("/admin/log-level", {"level": "loud"}),
    ("/admin/verify-run", {"verdict": "passed"}),
    ("/admin/verify-run", {"verdict": "perfect", "profile": "quick"}),
    ("/admin/verify-run", {"verdict": "passed", "profile": "quick", "passed": -1}),
)
_PUT_PATHS = frozenset({"/admin/log-level", "/admin/verify-run"})


@dataclass
class Desk(StubEngine):
    """Supervisor, engine and adapters in one: notes what it is asked, and answers or refuses."""

    now: Status = field(default_factory=a_status)
    error: Exception | None = None
    asked: list[Any] = field(default_factory=list)
    is_slow: bool = False
    unanswered: list[asyncio.Future[Any]] = field(default_factory=list)
    adapters: dict[str, Lora] = field(default_factory=dict)

    def status(self) -> Status:
        return self.now

    def submit(self, command: Command) -> asyncio.Future[Any]:
        self._ask(command)
        answer = asyncio.get_running_loop().create_future()
        if self.is_slow:
            self.unanswered.append(answer)
        elif isinstance(command, ProbeCommand):
            answer.set_result(ProbeResult(REPORT, 2.5))
        else:
            answer.set_result(
                SleepResult(SLEEP_TAGS if isinstance(command, SleepCommand) else frozenset())
            )
        return answer

    @property
    def state(self) -> str:
        return self.now.state

    async def until_moved(self) -> None:
        await asyncio.sleep(0)
        if "stop" in self.asked:
            self.now = replace(self.now, state="DRAINING")

    def request_stop(self) -> None:
        self._ask("stop")

    def request_restart(self, reason: str) -> None:
        self._ask(reason)

    def serving_engine(self) -> Any:
        self._ask("engine")
        return self

    @property
    def maintenance(self) -> Any:
        return self

    async def start_profile(self, prefix: str | None) -> None:
        self._ask(("profile", prefix))

    async def stop_profile(self) -> None:
        self._ask("profile ends")

    async def reset_caches(self, kinds: frozenset[str]) -> None:
        self._ask(kinds)

    async def save_sharded_state(
        self, path: str, *, pattern: str | None, max_size_bytes: int | None
    ) -> None:
        self._ask((path, pattern, max_size_bytes))

    def listed(self) -> tuple[Lora, ...]:
        return tuple(self.adapters.values())

    async def load(self, name: str, path: str, *, is_replacing: bool) -> Lora:
        self._ask((name, path, is_replacing))
        self.adapters[name] = Lora(name, path, is_pinned=False)
        return self.adapters[name]

    async def unload(self, name: str) -> None:
        self._ask(("unload", name))
        del self.adapters[name]

    async def pin(self, name: str) -> Lora:
        self._ask(("pin", name))
        return Lora(name, self.adapters[name].path, is_pinned=True)

    def _ask(self, what: Any) -> None:
        self.asked.append(what)
        if self.error is not None:
            raise self.error


class Keyed:
    """Set the key, as the layer that checks keys does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            current_request().key = "key-1a2b3c4d"
        await self._app(scope, receive, send)


def _admin_app(desk: Any, adapters: Any, deadline_seconds: float = 1.0) -> FastAPI:
    """The application behind which a desk stands for what does the work."""
    return admin_app(desk, adapters, command_deadline_seconds=deadline_seconds)


def _front(desk: Desk, *, deadline_seconds: float = DEADLINE_SECONDS, root_path: str = "") -> Keyed:
    app = _admin_app(desk, lambda: desk, deadline_seconds)
    return Keyed(OwnRoutes([admin_route(app)], InnerApp(), root_path=root_path))


def _ask(desk: Desk, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with serving(_front(desk, **options)) as client:
            return await client.request(method, path, json=body)

    return asyncio.run(ask())


def _error(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code
    return str(error["message"])


@pytest.mark.parametrize(
    ("path", "body", "command"),
    [
        ("/admin/probe", None, ProbeCommand("quick", 60.0)),
        (
            "/admin/probe",
            {"suite": "worst-case", "max_age_seconds": 0},
            ProbeCommand("worst-case", 0.0),
        ),
        ("/admin/sleep", None, SleepCommand(1, is_abrupt=False)),
        ("/admin/sleep", {"level": 2, "mode": "abort"}, SleepCommand(2, is_abrupt=True)),
        ("/admin/wake", None, WakeCommand(SLEEP_TAGS)),
        ("/admin/wake", {"tags": ["weights"]}, WakeCommand(frozenset({"weights"}))),
    ],
)
def test_what_changes_the_state_is_a_command(path: str, body: Any, command: Command) -> None:
    """No body is a body with nothing in it."""
    desk = Desk()
    answer = _ask(desk, "POST", path, body)
    assert answer.status_code == 200
    assert desk.asked == [command]
    if isinstance(command, ProbeCommand):
        assert desk.asked[0].youngest_seconds == command.youngest_seconds
        assert answer.json()["report"]["steps"][0]["name"] == "first_token"
        assert answer.json()["age_seconds"] == 2.5


def test_a_stop_and_a_restart_are_accepted_at_once() -> None:
    """In every state; the answer is where the server stands then, also to a second stop."""
    desk = Desk(a_fresh_status())
    drained = [_ask(desk, "POST", "/admin/drain") for _ in range(2)]
    restarted = _ask(desk, "POST", "/admin/restart", {"reason": "new weights"})
    assert [one.status_code for one in (*drained, restarted)] == [202, 202, 202]
    assert [one.json()["state"] for one in drained] == ["DRAINING", "DRAINING"]
    assert desk.asked == ["stop", "stop", "new weights"]


@pytest.mark.parametrize(
    ("method", "path", "body", "asked"),
    [
        ("POST", "/admin/profile/start", {"prefix": "evening"}, ("profile", "evening")),
        ("POST", "/admin/profile/stop", None, "profile ends"),
        ("POST", "/admin/cache/reset", None, frozenset({"prefix"})),
        ("POST", "/admin/cache/reset", {"caches": ["mm", "encoder"]}, frozenset({"mm", "encoder"})),
        ("POST", "/admin/save-sharded-state", {"path": "/models/out"}, ("/models/out", None, None)),
        (
            "POST",
            "/admin/save-sharded-state",
            {"path": "/x", "pattern": "p-{part}", "max_size_bytes": 5},
            ("/x", "p-{part}", 5),
        ),
    ],
)
def test_the_engine_at_work_is_asked(method: str, path: str, body: Any, asked: Any) -> None:
    """Which is one that the supervisor gives out."""
    desk = Desk()
    assert _ask(desk, method, path, body).status_code == 200
    assert desk.asked == ["engine", asked]


def test_adapters_are_loaded_pinned_listed_and_unloaded() -> None:
    """A name may have slashes, as those of a model hub do."""
    desk = Desk()
    name = "lab/accent"

    async def live() -> list[httpx.Response]:
        async with serving(_front(desk)) as client:
            body = {"name": name, "path": "/loras/accent"}
            return [
                await client.post("/admin/loras", json=body),
                await client.post(f"/admin/loras/{name}/pin"),
                await client.get("/admin/loras"),
                await client.delete("/admin/loras/lab%2Faccent"),
            ]

    loaded, pinned, listed, unloaded = asyncio.run(live())
    assert loaded.json() == {"name": name, "path": "/loras/accent", "is_pinned": False}
    assert pinned.json()["is_pinned"] is True
    assert listed.json()["loras"] == [loaded.json()]
    assert unloaded.json() == {"loras": []}


def test_a_run_of_verify_is_told() -> None:
    """In every state of the server: the run may have been of an engine that has died since."""
    told: list[VerifyRun] = []
    desk: Any = Desk()
    app = admin_app(desk, lambda: None, command_deadline_seconds=1.0, on_verified=told.append)

    async def live() -> httpx.Response:
        async with serving(OwnRoutes([admin_route(app)], InnerApp())) as client:
            body = {"verdict": "failed", "profile": "quick", "passed": 3, "failed": 1}
            return await client.put("/admin/verify-run", json=body)

    assert asyncio.run(live()).json() == asdict(VerifyRun("failed", "quick", 3, 1, 0))
    assert told == [VerifyRun("failed", "quick", 3, 1, 0)]


def test_adapters_are_listed_before_there_is_an_engine() -> None:
    """None; to load one then is refused by the supervisor."""
    app = _admin_app(Desk(), lambda: None)

    async def live() -> tuple[httpx.Response, httpx.Response]:
        async with serving(OwnRoutes([admin_route(app)], InnerApp())) as client:
            body = {"name": "a", "path": "b"}
            return await client.get("/admin/loras"), await client.post("/admin/loras", json=body)

    listed, loaded = asyncio.run(live())
    assert listed.json() == {"loras": []}
    assert loaded.status_code == 503


def test_the_workspace_report_is_that_of_the_stats() -> None:
    """Every rank, with sizes in bytes, and nothing of its process and steps."""
    status = a_status()
    report = _ask(Desk(status), "GET", "/admin/workspace").json()
    assert report["state"] == status.state
    assert len(report["ranks"]) == len(status.ranks)
    assert set(report["ranks"][0]) == {one.name for one in fields(RankMemory)}
    assert report["ranks"][0]["slots"][0]["size_bytes"] == status.ranks[0].slots[0].size_bytes


def test_a_wrong_body_is_refused_before_anything_is_asked() -> None:
    """400 as OpenAI's clients read it, with the place of the mistake."""
    desk = Desk()

    async def live() -> list[httpx.Response]:
        async with serving(_front(desk)) as client:
            return [
                await client.request("PUT" if path in _PUT_PATHS else "POST", path, json=body)
                for path, body in WRONG_BODIES
            ]

    for answer, asked in zip(asyncio.run(live()), WRONG_BODIES, strict=True):
        assert answer.status_code == 400, asked
        assert _error(answer).startswith("body"), asked
    assert desk.asked == []


def test_a_field_that_does_not_exist_is_named_with_those_that_do() -> None:
    """An operator has misspelt it."""

    async def live() -> httpx.Response:
        async with serving(_front(Desk())) as client:
            return await client.post("/admin/probe", json={"suit": "quick"})

    told = _error(asyncio.run(live()))
    assert told == "body: there is no field 'suit'; the fields are: suite, max_age_seconds"


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 5000, b"reason=x"])
def test_what_is_no_json_is_refused(content: bytes) -> None:
    """400, whatever the bytes."""

    async def live() -> httpx.Response:
        headers = {"content-type": "application/json"}
        async with serving(_front(Desk())) as client:
            return await client.post("/admin/restart", content=content, headers=headers)

    answer = asyncio.run(live())
    assert answer.status_code == 400
    assert _error(answer)


def test_what_a_route_would_ignore_is_refused_before_anything_is_asked() -> None:
    """As by scripts for vLLM's own routes, whose parameters are in the query."""
    asked: tuple[tuple[str, str, bytes], ...] = (
        ("POST", "/admin/sleep?level=2&mode=abort", b""),
        ("POST", "/admin/sleep?level=2", b'{"level": 1}'),
        ("POST", "/admin/wake?tags=weights", b""),
        ("POST", "/admin/drain?now", b""),
        ("GET", "/admin/workspace?rank=0", b""),
        ("DELETE", "/admin/loras/accent?name=other", b""),
        ("POST", "/admin/drain", b'{"timeout": 5}'),
        ("POST", "/admin/drain", b"timeout=5"),
        ("POST", "/admin/profile/stop", b"null"),
        ("POST", "/admin/loras/accent/pin", b'{"name": "other"}'),
        ("DELETE", "/admin/loras/accent", b"[]"),
    )
    desk = Desk()

    async def live() -> None:
        headers = {"content-type": "application/json"}
        async with serving(_front(desk)) as client:
            for method, path, content in asked:
                answer = await client.request(method, path, content=content, headers=headers)
                assert answer.status_code == 400, (method, path, content)
                assert ("JSON body" if "?" in path else "no body") in _error(answer)

    asyncio.run(live())
    assert desk.asked == []


@pytest.mark.parametrize("content", [b"", b"{}", b" { }\n"])
def test_a_route_without_a_body_accepts_an_empty_one(content: bytes) -> None:
    """Clients that always send JSON send an empty object."""

    async def live() -> httpx.Response:
        async with serving(_front(Desk())) as client:
            headers = {"host": "[::1"}  # of no address
            return await client.post("/admin/drain?", content=content, headers=headers)

    assert asyncio.run(live()).status_code == 202


REFUSALS: tuple[tuple[HoldfastError, int], ...] = (
    (ConflictError("the server is asleep", remedy="wake it first."), 409),
    (NotReadyError("the server is STARTING", retry_after_seconds=7), 503),
    (EngineLostError("the engine died"), 503),
    (EngineRefusedError("the engine could not"), 500),
    (EngineSilentError("the engine did not"), 504),
    (NotFoundError("There is none."), 404),
)


def test_a_refusal_has_its_status_and_its_remedy() -> None:
    """Each has the status of the error tree, and `Retry-After` if a retry may help."""
    desk = Desk()

    async def live(error: HoldfastError, status: int, client: httpx.AsyncClient) -> None:
        desk.error = error
        for path in ("/admin/probe", "/admin/cache/reset"):
            answer = await client.post(path)
            assert answer.status_code == status
            assert _error(answer) == error.line
            assert ("retry-after" in answer.headers) == (status == 503)

    async def all_of_them() -> None:
        async with serving(_front(desk)) as client:
            for error, status in REFUSALS:
                await live(error, status, client)

    asyncio.run(all_of_them())


def test_a_mistake_of_ours_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """500 in the same form, without its text, and the next call is served."""
    desk = Desk(error=KeyError("a secret"))

    async def live() -> tuple[httpx.Response, httpx.Response]:
        async with serving(_front(desk)) as client:
            broken = await client.post("/admin/probe")
            desk.error = None
            return broken, await client.post("/admin/probe")

    with caplog.at_level(logging.INFO, "holdfast.admin"):
        broken, served = asyncio.run(live())
    assert (broken.status_code, served.status_code) == (500, 200)
    assert "secret" not in _error(broken)
    assert _lines(caplog)[0].startswith("admin probe by key-1a2b3c4d: refused with 500")


def test_a_command_that_takes_too_long_goes_on() -> None:
    """The late one gets 504, and others that wait for the command get the answer."""
    desk = Desk(is_slow=True)
    answer = _ask(desk, "POST", "/admin/probe", deadline_seconds=0.01)
    assert answer.status_code == 504
    assert not desk.unanswered[0].cancelled()


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "holdfast.admin"]


def test_every_call_is_a_line_with_its_key_and_its_result(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """This holds for refused calls and unknown routes too."""
    desk = Desk()

    async def live() -> None:
        async with serving(_front(desk)) as client:
            await client.post("/admin/restart", json={"reason": "new weights"})
            await client.post("/admin/cache/reset")
            desk.error = ConflictError("the server is asleep")
            await client.post("/admin/loras/accent/pin")
            await client.get("/admin/nothing%0Ahere")

    with caplog.at_level(logging.INFO, "holdfast.admin"):
        asyncio.run(live())
    assert _lines(caplog) == [
        "admin restart by key-1a2b3c4d: accepted",
        "admin cache reset by key-1a2b3c4d: done",
        "admin lora pin 'accent' by key-1a2b3c4d: refused with 409: the server is asleep",
        r"admin '/admin/nothing\nhere' by key-1a2b3c4d: refused with 404: Not Found",
    ]


def test_what_is_no_route_is_answered_in_the_same_form() -> None:
    """And never by the application behind."""
    asked = [
        ("GET", "/admin", 404),
        ("GET", "/admin/", 404),
        ("GET", "/admin/nothing", 404),
        ("GET", "/admin/openapi.json", 404),
        ("GET", "/admin/docs", 404),
        ("GET", "/admin/drain", 405),
        ("DELETE", "/admin/loras", 405),
        ("HEAD", "/admin/restart", 405),
    ]

    async def live() -> None:
        async with serving(_front(Desk())) as client:
            for method, path, status in asked:
                answer = await client.request(method, path)
                assert answer.status_code == status
                assert method == "HEAD" or _error(answer)
                assert ("allow" in answer.headers) == (status == 405)

    asyncio.run(live())


@pytest.mark.parametrize("path", ["/administrator", "/v1/admin/drain", "/adminx/drain"])
def test_other_paths_belong_to_the_application(path: str) -> None:
    """Only `/admin` and what is below it is ours."""
    desk = Desk()
    assert "error" not in _ask(desk, "POST", path).text
    assert desk.asked == []


@pytest.mark.parametrize("path", ["/prefix/admin/drain", "/admin/drain", "/admin/drain/"])
def test_the_routes_are_found_under_the_root_path(path: str) -> None:
    """A proxy may leave the root path in the request or take it away."""
    desk = Desk()
    assert _ask(desk, "POST", path, root_path="/prefix").status_code == 202


def test_the_document_has_every_route_and_every_status() -> None:
    """All of it below `/admin`; nothing that is not answered."""
    document = _admin_app(Desk(), lambda: None).openapi()
    operations = {
        (method.upper(), path): operation
        for path, its in document["paths"].items()
        for method, operation in its.items()
    }
    assert set(operations) == set(ROUTES)
    for (_, path), operation in operations.items():
        answers = set(operation["responses"])
        success = "202" if path in {"/admin/drain", "/admin/restart"} else "200"
        assert answers == {success, "400", "401", "403", "404", "409", "500", "503", "504"}
        assert operation["description"]
    assert "HTTPValidationError" not in document["components"]["schemas"]


@pytest.fixture
def levels() -> Iterator[tuple[logging.Logger, logging.Handler]]:
    """vLLM's logger as vLLM configures it, and ours; both are as before at the end."""
    loggers = [logging.getLogger(name) for name in ("holdfast", "vllm")]
    before = [logger.level for logger in loggers]
    handler = logging.NullHandler(logging.INFO)
    loggers[1].addHandler(handler)
    yield loggers[1], handler
    loggers[1].removeHandler(handler)
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def test_the_log_level_is_changed_while_the_server_runs(
    levels: tuple[logging.Logger, logging.Handler],
) -> None:
    """Of both loggers, or of one; vLLM's handler lets through what its logger does."""
    vllm, handler = levels
    _ask(Desk(), "PUT", "/admin/log-level", {"level": "warning"})
    changed = _ask(Desk(), "PUT", "/admin/log-level", {"level": "debug", "logger": "vllm"})
    assert changed.json() == {"levels": {"holdfast": "warning", "vllm": "debug"}}
    assert _ask(Desk(), "GET", "/admin/log-level").json() == changed.json()
    assert vllm.level == handler.level == logging.DEBUG
