"""Runs `holdfast verify` against a server in this process: as its users do, or check by check."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jsonschema
import pytest

from asgi_server import serving
from double_limits import SLOW_SECONDS
from holdfast.demo.trained import is_trained
from holdfast.verify.baseline import Baseline
from holdfast.verify.check import Check
from holdfast.verify.checks import ALL, oracle
from holdfast.verify.checks.oracle import recording
from holdfast.verify.options import Options
from holdfast.verify.records import CheckResult, CheckStatus, Profile, Request
from holdfast.verify.report import as_json
from holdfast.verify.runner import RunContext, run
from holdfast.verify.streams import StreamedAnswer
from holdfast.verify.survey import survey
from holdfast.verify.target import PATIENT_SECONDS, REQUEST_SECONDS, Target
from openai_double import OpenAIDouble
from standstills import run_timed

DEADLINE_SECONDS = 120
SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
REPORT_SCHEMA: dict[str, Any] = json.loads((SCHEMAS / "holdfast-verify-1.schema.json").read_text())
OF_THE_MODEL = ("chat", "tools", "skill")
"""Groups that judge what a model says; one with random weights says nothing of sense."""
BEYOND_RANDOM_WEIGHTS = (*OF_THE_MODEL, "self.needles", "wire.provider_check")
"""How the names of checks begin that random weights cannot pass."""

_OF_TIMES = ("client_leaves", "incremental")
"""The checks that judge when something comes."""
BEYOND_TRAINED_WEIGHTS: Mapping[str, CheckStatus] = MappingProxyType(
    {
        "tools.probe": CheckStatus.WARNED,
        "tools.replay": CheckStatus.SKIPPED,
        "skill.own_tasks": CheckStatus.SKIPPED,
        "skill.lm_eval": CheckStatus.SKIPPED,
    }
)
"""What comes of the checks that the trained demo does not pass: the first warns of its calls, as
`docs/demo-model.md` says, and the others find nothing to judge in this server."""


def beyond_the_demo() -> tuple[str, ...]:
    """Return how the names of checks begin that the weights of the package cannot pass."""
    return tuple(BEYOND_TRAINED_WEIGHTS) if is_trained() else BEYOND_RANDOM_WEIGHTS


def is_left_to_chance(name: str) -> bool:
    """Whether random weights decide what comes of a check, so that no test can name it."""
    return not is_trained() and name.startswith(BEYOND_RANDOM_WEIGHTS)


def of_standard() -> list[Check]:
    """Return the checks of profile standard that a model with random weights can pass."""
    return [
        check
        for check in ALL
        if "standard" in check.profiles
        and oracle.is_asked_for(check, Options())
        and not check.full_name.startswith(BEYOND_RANDOM_WEIGHTS)
    ]


def require_report(document: Any) -> None:
    """Fail unless a report.json keeps to its published schema."""
    jsonschema.validate(document, REPORT_SCHEMA)


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is over."""

    code: int
    output: str
    errors: str
    directory: Path

    @property
    def report(self) -> dict[str, Any]:
        """Its report.json."""
        return dict(json.loads((self.directory / "report.json").read_text()))

    @property
    def results(self) -> dict[str, CheckResult]:
        """What it reports of each check, by their full names."""
        return {f"{one.group}.{one.name}": one for one in as_json.read(self.directory).checks}

    def named(self, *statuses: CheckStatus) -> list[str]:
        """The checks that have one of some statuses: `wire.models`."""
        checks = self.report["checks"]
        return [f"{one['group']}.{one['name']}" for one in checks if one["status"] in statuses]


async def verified(app: OpenAIDouble, directory: Path, *arguments: str) -> Run:
    """A run against a server that is up for as long as it lasts."""
    async with serving(app) as client:
        return await verified_at(str(client.base_url), directory, *arguments)


async def verified_at(
    url: str, directory: Path, *arguments: str, deadline_seconds: float = DEADLINE_SECONDS
) -> Run:
    """A run against a server that is there, or not."""
    out = directory / "out"
    begun = started(url, f"--out={out}", *arguments, deadline_seconds=deadline_seconds)
    async with begun as process:
        output, errors = await process.communicate()
    assert process.returncode is not None
    return Run(process.returncode, output.decode(), errors.decode(), out)


async def interrupted(
    app: OpenAIDouble, directory: Path, number: signal.Signals, *arguments: str
) -> Run:
    """A run that gets a signal once the server hangs."""
    out = directory / "out"
    async with (
        serving(app) as client,
        started(str(client.base_url), f"--out={out}", *arguments) as process,
    ):
        await app.is_hanging.wait()
        process.send_signal(number)
        output, errors = await process.communicate()
    assert process.returncode is not None
    return Run(process.returncode, output.decode(), errors.decode(), out)


@asynccontextmanager
async def started(
    *arguments: str,
    stdout: int = asyncio.subprocess.PIPE,
    directory: Path | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command, just begun; when left, or after the deadline, it has ended."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "holdfast", "verify", *arguments),
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
        cwd=directory,
    )
    try:
        async with asyncio.timeout(deadline_seconds):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


class Unseen:
    """A view that nobody looks at."""

    def begun(self, check: Check) -> None: ...

    def ended(self, result: CheckResult) -> None: ...


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each request that nobody gave more patience fail unless its answer comes soon."""
    stream = Target.stream

    async def hurried(
        target: Target, request: Request, *, deadline_seconds: float = REQUEST_SECONDS
    ) -> StreamedAnswer:
        if deadline_seconds < PATIENT_SECONDS:
            deadline_seconds = SLOW_SECONDS - 1.0
        return await stream(target, request, deadline_seconds=deadline_seconds)

    monkeypatch.setattr(Target, "stream", hurried)


def results(
    app: OpenAIDouble,
    checks: Sequence[Check],
    profile: Profile = "standard",
    options: Options | None = None,
    interrupted: asyncio.Event | None = None,
) -> dict[str, CheckResult]:
    """What comes of some checks against a server, by their full names; in this process."""

    async def judged() -> dict[str, CheckResult]:
        async with serving(app) as client:
            target = Target(str(client.base_url), app.api_key, app.admin_key)
            made, _ = await _judged(target, checks, profile, options, interrupted)
        return made

    timed = [check.full_name for check in checks if check.name in _OF_TIMES]

    def is_doubtful(made: Mapping[str, CheckResult]) -> bool:
        return len(timed) == len(made) or not not_passed(made).keys().isdisjoint(timed)

    return run_timed(app, judged, is_doubtful) if timed else asyncio.run(judged())


def results_at(
    url: str,
    checks: Sequence[Check],
    options: Options | None = None,
    api_key: str = "",
    profile: Profile = "standard",
    admin_key: str = "",
) -> dict[str, CheckResult]:
    """What comes of some checks against a server of another process."""
    target = Target(url, api_key, admin_key)
    made, _ = asyncio.run(_judged(target, checks, profile, options))
    return made


def recorded(app: OpenAIDouble) -> Baseline:
    """What a server is recorded as."""

    async def judged() -> Baseline:
        async with serving(app) as client:
            return await _recorded(str(client.base_url), app.api_key)

    return asyncio.run(judged())


def recorded_at(url: str, api_key: str = "") -> Baseline:
    """What a server of another process is recorded as."""
    return asyncio.run(_recorded(url, api_key))


async def _recorded(url: str, api_key: str) -> Baseline:
    options = Options(records=True)
    made, context = await _judged(Target(url, api_key), recording.CHECKS, "standard", options)
    assert not_passed(made) == {}, made
    baseline: Baseline = context.measured[recording.measured]
    return baseline


async def _judged(
    target: Target,
    checks: Sequence[Check],
    profile: Profile,
    options: Options | None,
    interruption: asyncio.Event | None = None,
) -> tuple[dict[str, CheckResult], RunContext]:
    async with target:
        server = await survey(target)
        interrupted = interruption or asyncio.Event()
        context = RunContext(target, server, profile, interrupted, options or Options())
        made = await run(checks, context, Unseen())
    return {f"{one.group}.{one.name}": one for one in made}, context


def not_passed(made: Mapping[str, CheckResult]) -> dict[str, CheckStatus]:
    """Those that did not pass, with their status."""
    return {name: one.status for name, one in made.items() if one.status is not CheckStatus.PASSED}
