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
from typing import Any

from asgi_server import serving
from holdfast.verify.check import Check
from holdfast.verify.options import Options
from holdfast.verify.records import CheckResult, Profile, Status
from holdfast.verify.runner import Bench, run
from holdfast.verify.survey import survey
from holdfast.verify.target import Target
from openai_double import OpenAIDouble

DEADLINE_SECONDS = 120


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

    def named(self, *statuses: Status) -> list[str]:
        """The checks that have one of some statuses: `wire.models`."""
        checks = self.report["checks"]
        return [f"{one['group']}.{one['name']}" for one in checks if one["status"] in statuses]


async def verified(app: OpenAIDouble, directory: Path, *arguments: str) -> Run:
    """A run against a server that is up for as long as it lasts."""
    async with serving(app) as client:
        return await verified_at(str(client.base_url), directory, *arguments)


async def verified_at(url: str, directory: Path, *arguments: str) -> Run:
    """A run against a server that is there, or not."""
    out = directory / "out"
    async with started(url, f"--out={out}", *arguments) as process:
        output, errors = await process.communicate()
    assert process.returncode is not None
    return Run(process.returncode, output.decode(), errors.decode(), out)


async def interrupted(app: OpenAIDouble, directory: Path, number: signal.Signals) -> Run:
    """A run that gets a signal once the server hangs."""
    out = directory / "out"
    async with (
        serving(app) as client,
        started(str(client.base_url), f"--out={out}") as process,
    ):
        await app.is_hanging.wait()
        process.send_signal(number)
        output, errors = await process.communicate()
    assert process.returncode is not None
    return Run(process.returncode, output.decode(), errors.decode(), out)


@asynccontextmanager
async def started(
    *arguments: str, stdout: int = asyncio.subprocess.PIPE
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command, just begun; when left, or after the deadline, it has ended."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "holdfast", "verify", *arguments),
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


class Unseen:
    """A view that nobody looks at."""

    def begun(self, check: Check) -> None: ...

    def ended(self, result: CheckResult) -> None: ...


def results(
    app: OpenAIDouble,
    checks: Sequence[Check],
    profile: Profile = "standard",
    options: Options | None = None,
    interrupted: asyncio.Event | None = None,
) -> dict[str, CheckResult]:
    """What comes of some checks against a server, by their full names; in this process."""
    interruption = interrupted or asyncio.Event()

    async def judged() -> dict[str, CheckResult]:
        async with serving(app) as client, Target(str(client.base_url), app.api_key) as target:
            server = await survey(target)
            bench = Bench(target, server, profile, interruption, options or Options())
            made = await run(checks, bench, Unseen())
        return {f"{one.group}.{one.name}": one for one in made}

    return asyncio.run(judged())


def not_passed(made: Mapping[str, CheckResult]) -> dict[str, Status]:
    """Those that did not pass, with their status."""
    return {name: one.status for name, one in made.items() if one.status is not Status.PASSED}
