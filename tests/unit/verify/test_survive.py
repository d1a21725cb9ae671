"""The group `survive`: each way not to survive is found by its check, alone."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from double_defects import Defect
from double_limits import EVERY
from holdfast.verify.check import Check
from holdfast.verify.checks import survive
from holdfast.verify.checks.survive import overload
from holdfast.verify.course import restarts_in
from holdfast.verify.options import Options
from holdfast.verify.records import CheckResult, CheckStatus, HoldfastFacts
from holdfast.verify.trial import Trial
from mortal_double import MortalDouble
from openai_double import MAX_BODY_BYTES, MODEL, Body, OpenAIDouble
from verified import not_passed, results

FOUND_BY: dict[Defect, str] = {
    "the longest prompt is 500": "longest_prompt",
    "a prompt beyond the context taken": "longest_prompt",
    "large bodies are 500": "large_bodies",
    "the 100th completion is 500": "overload",
    "answers lost with the engine": "death",
    "answers that change with the engine": "death",
    "an engine dies unseen": "unharmed",
    "a workspace grows unseen": "unharmed",
    "a workspace is refused unseen": "unharmed",
}
CHECKS = [check for check in survive.CHECKS if "standard" in check.profiles]
"""Those that need no other program."""
DEATH = [check for check in survive.CHECKS if check.name == "death"]


def made(
    directory: Path, defect: Defect | None = None, command: str = "touch"
) -> dict[str, CheckResult]:
    """What comes of the group against a server whose engine the command kills."""
    file = directory / "dead"
    app = MortalDouble(file, defect or "")
    return results(app, CHECKS, options=Options(kill_command=(command, str(file))))


def test_a_server_that_survives_passes(tmp_path: Path) -> None:
    """Nothing is blamed, warned of or skipped."""
    found = made(tmp_path)
    assert {name: (one.status, one.reason) for name, one in found.items() if one.reason} == {}
    numbers = {one.name: one.value for one in found["survive.death"].numbers}
    assert numbers["answers that were waited for"] == 16


class Reviving(OpenAIDouble):
    """Dies of a large body and of many clients, and is there again after two answers of 503."""

    def __init__(self) -> None:
        super().__init__()
        self._clients = self._away = 0

    async def _completion(self, request: Request) -> Response:
        body = await request.body()
        self._clients += b"Client" in body
        if self._away:
            self._away -= 1
            return JSONResponse({}, 503, {"Retry-After": "0"})
        if len(body) > MAX_BODY_BYTES or self._clients == 256:
            self._away = 2
        return await super()._completion(request)


@pytest.mark.parametrize("name", ["large_bodies", "overload"])
def test_a_server_that_is_started_again_has_not_survived(name: str) -> None:
    """Behind a gateway, its next request gets 503 with `Retry-After`, as if it were only busy."""
    made = results(Reviving(), [check for check in CHECKS if check.name == name])
    assert not_passed(made) == {f"survive.{name}": CheckStatus.FAILED}
    assert "answered 503" in made[f"survive.{name}"].reason


class Busy(OpenAIDouble):
    """Has no time for the first of many clients, nor for some requests behind them."""

    def __init__(self, refused_later: int, retry_after: str = "0") -> None:
        super().__init__()
        self._crowd_left, self._later_left = 1, refused_later
        self._retry_after = retry_after

    async def _completion(self, request: Request) -> Response:
        is_in_crowd = b"Client" in await request.body()
        if is_in_crowd and self._crowd_left:
            self._crowd_left = 0
            return JSONResponse({}, 503, {"Retry-After": "0"})
        if not is_in_crowd and self._later_left and not self._crowd_left:
            self._later_left -= 1
            return JSONResponse({}, 503, {"Retry-After": self._retry_after})
        return await super()._completion(request)


@pytest.mark.parametrize(
    ("app", "busy_seconds", "status"),
    [
        (Busy(3), 20.0, CheckStatus.WARNED),
        (Busy(EVERY), 1.0, CheckStatus.FAILED),
        (Busy(1, "100"), 60.0, CheckStatus.FAILED),
    ],
)
def test_a_server_may_still_be_busy_with_a_crowd(
    app: Busy, busy_seconds: float, status: CheckStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it told the crowd so, too, and only for a minute."""
    monkeypatch.setattr(overload, "_BUSY_SECONDS", busy_seconds)
    monkeypatch.setattr("holdfast.verify.survey.PATIENT_SECONDS", 0.3)
    made = results(app, [check for check in CHECKS if check.name == "overload"])
    assert made["survive.overload"].status is status


class Recovering(MortalDouble):
    """Refuses requests for a moment after its engine has died, and says so."""

    _away = 2

    async def _completion(self, request: Request) -> Response:
        is_late = self._file.exists() and (await request.json()).get("max_tokens") == 4
        if not is_late or not self._away:
            return await super()._completion(request)
        self._away -= 1
        return JSONResponse({}, 503, {"Retry-After": "0"})


def test_the_next_engine_may_take_its_time(tmp_path: Path) -> None:
    """Where the check itself killed the one before, and no answer is lost: that is a warning."""
    file = tmp_path / "dead"
    options = Options(kill_command=("touch", str(file)))
    (found,) = results(Recovering(file), DEATH, options=options).values()
    assert found.status is CheckStatus.WARNED, found.reason
    assert found.reason.endswith("with 503 and Retry-After: 2")


def test_an_engine_that_a_check_kills_is_not_blamed_on_the_server(tmp_path: Path) -> None:
    """It died, and nothing else did."""
    (died,) = (n for n in made(tmp_path)["survive.unharmed"].numbers if "died" in n.name)
    assert died.value == 0


@pytest.mark.parametrize("defect", FOUND_BY)
def test_a_defect_is_found_by_its_check(defect: Defect, tmp_path: Path) -> None:
    """No other one fails."""
    assert not_passed(made(tmp_path, defect)) == {f"survive.{FOUND_BY[defect]}": CheckStatus.FAILED}


def test_no_other_server_is_harmed_unasked() -> None:
    """It is not even asked, and the report says how to have it tried."""
    app = OpenAIDouble()
    app.router.routes = [one for one in app.router.routes if getattr(one, "path", "") != "/statusz"]
    found = results(app, CHECKS)
    assert {one.status for one in found.values()} == {CheckStatus.SKIPPED}
    asking = [one for one in found.values() if one.name != "unharmed"]
    assert all("--kill-command" in one.remedy for one in asking)
    assert all(one.requests == () for one in found.values())


def test_without_a_command_the_engine_of_holdfast_lives() -> None:
    """All the others are made."""
    assert not_passed(results(OpenAIDouble(), CHECKS)) == {"survive.death": CheckStatus.SKIPPED}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("no-such-command", "could not be run"),
        ("false", "ended with 1"),
    ],
)
def test_a_command_that_fails_proves_nothing(command: str, said: str, tmp_path: Path) -> None:
    """The check is inconclusive, and no answer is waited for any longer."""
    app = MortalDouble(tmp_path / "dead")
    options = Options(kill_command=(command, "x"))
    (found,) = results(app, DEATH, options=options).values()
    assert found.status is CheckStatus.INCONCLUSIVE
    assert said in found.reason


def test_a_command_is_not_waited_for_longer_than_it_runs(tmp_path: Path) -> None:
    """What it leaves running writes to the same place and outlives it."""
    noted = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {noted}; echo lost; exit 3"
    options = Options(kill_command=("sh", "-c", script))
    try:
        (found,) = results(MortalDouble(tmp_path / "dead"), DEATH, options=options).values()
        assert found.reason == "the command ended with 3: lost"
    finally:
        os.kill(int(noted.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("code", [0, 1])
def test_a_kill_is_not_blamed_on_the_server_whatever_the_command_says(
    code: int, tmp_path: Path
) -> None:
    """A command may kill the engine and then fail at another process."""
    file = tmp_path / "dead"
    options = Options(kill_command=("sh", "-c", f"touch {file}; exit {code}"))
    found = results(MortalDouble(file), CHECKS, options=options)
    assert not_passed(found) == ({"survive.death": CheckStatus.INCONCLUSIVE} if code else {})


def test_a_command_that_kills_nothing_proves_nothing() -> None:
    """Where the answers come all the same, the engine may have lived on."""
    (found,) = results(OpenAIDouble(), DEATH, options=Options(kill_command=("true",))).values()
    assert found.status is CheckStatus.INCONCLUSIVE


def test_no_large_request_is_in_the_report(tmp_path: Path) -> None:
    """Neither one that was answered nor one that was refused."""
    assert all(len(repr(one)) < 100_000 for one in made(tmp_path, "large bodies are 500").values())


class Boasting(OpenAIDouble):
    """Claims to take a prompt of any length."""

    async def _models(self, _request: Request) -> Response:
        entry = {"id": MODEL, "object": "model", "max_model_len": 10**12}
        return JSONResponse({"object": "list", "data": [entry]})


def test_a_claim_of_any_length_fills_no_memory() -> None:
    """The check is skipped, and says which length is too much."""
    only = [check for check in survive.CHECKS if check.name == "longest_prompt"]
    (found,) = results(Boasting(), only).values()
    assert found.status is CheckStatus.SKIPPED
    assert str(10**12) in found.reason


class Restarted(OpenAIDouble):
    """Has had a bad day, and starts again once it is asked, with one growth."""

    async def _metrics(self, _request: Request) -> Response:
        deaths, start = (0, 200) if self._completions > 1 else (3, 100)
        name = 'holdfast_engine_deaths_total{cause="stall"}'
        return PlainTextResponse(f"{name} {deaths}\nprocess_start_time_seconds {start}\n")

    def _workspace(self) -> Body:
        return {"growths": {"locked": 1 if self._completions > 1 else 5}, "rejections": {}}


def test_a_restart_is_found_behind_a_moment_that_is_not_known() -> None:
    """The server may not say when it started, for example while it starts."""
    known = HoldfastFacts("READY", {}, 1, 0, 0, 0, 0, started_at_seconds=100.0)
    unknown = replace(known, started_at_seconds=None)
    again = replace(known, started_at_seconds=200.0)
    assert restarts_in([known, unknown, again]) == 1
    assert restarts_in([known, unknown]) is None


def test_a_restart_of_the_server_is_found() -> None:
    """What it counted before is not taken off what it counts now."""

    async def completes(trial: Trial) -> None:
        await trial.complete("Hello", max_tokens=2)

    only = [check for check in survive.CHECKS if check.name == "unharmed"]
    checks = [Check("one", "survive", completes, "Something."), *only]
    app = Restarted().without("/v1/chat/completions")
    made = results(app, checks)["survive.unharmed"]
    assert made.status is CheckStatus.FAILED
    assert {one.name: one.value for one in made.numbers} == {
        "restarts of the server": 1,
        "growths": 1,
        "rejections": 0,
        "engines that died": 0,
    }
