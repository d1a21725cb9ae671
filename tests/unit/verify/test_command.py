"""`holdfast verify` as its users meet it: flags, lines, files, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from asgi_server import serving
from holdfast import cli
from holdfast.api.admin.models import VerifyRunRequest
from holdfast.verify.records import CheckStatus
from holdfast.verify.report import FORMS
from obstruction import Obstruction
from openai_double import OpenAIDouble
from several_models import Several
from verified import Run, interrupted, started, verified, verified_at

WATCHES_CONNECTIONS = """
import json, os, sys


def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[1] if event == "socket.connect" else arguments
        with open(os.environ["SEEN"], "a") as seen:
            seen.write(json.dumps(host[:2], default=repr) + chr(10))


sys.addaudithook(watch)
"""
"""What a process does as it starts: it writes down each host that it looks up or connects to."""
REFUSED_BY_A_PROCESS = ((), ("http://x", "--out", "/proc"))
"""Bad usage that the parser finds, and some that it does not. For the rest, a process would cost a
second of CPU time and show nothing more."""


def run(app: OpenAIDouble, directory: Path, *arguments: str) -> Run:
    """A whole run."""
    return asyncio.run(verified(app, directory, *arguments))


def run_at(url: str, directory: Path, *arguments: str) -> Run:
    """A run without a server of ours."""
    return asyncio.run(verified_at(url, directory, *arguments))


@dataclass(frozen=True, slots=True)
class Verified:
    """A server, and a run against it at which several tests look."""

    app: OpenAIDouble
    run: Run


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> Verified:
    """One without a defect."""
    app = OpenAIDouble()
    return Verified(app, run(app, tmp_path_factory.mktemp("well")))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Verified:
    """One that knows no capital, and refuses to show the verdict."""
    directory = tmp_path_factory.mktemp("wrong")
    key = directory / "admin-key"
    key.write_text("the-admin-key\n")
    app = Shown("no such capital", status=403)
    return Verified(app, run(app, directory, f"--admin-api-key-file={key}"))


def test_a_server_that_is_well_passes(well: Verified) -> None:
    """Exit 0, every form of the report, and one line for each check."""
    done = well.run
    assert (done.code, done.errors) == (0, "")
    assert done.report["verdict"] == "passed"
    assert {path.name for path in done.directory.iterdir()} == set(FORMS)
    lines = done.output.splitlines()
    begun = [line.split()[:2] for line in lines]
    named = done.named(*CheckStatus)
    assert [name for _, name in begun[: len(named)]] == named
    assert lines[-1] == f"report: {done.directory / 'report.html'}"


def test_the_report_names_what_was_verified(well: Verified) -> None:
    """As Holdfast told it."""
    told = json.loads(json.dumps(asdict(well.app.configuration)))
    assert well.run.report["server"]["configuration"] == told


def test_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole run, with its packages, looks up and connects to no host but the server."""
    hooks, seen = tmp_path / "hooks", tmp_path / "seen"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(WATCHES_CONNECTIONS)
    monkeypatch.setenv("PYTHONPATH", str(hooks))
    monkeypatch.setenv("SEEN", str(seen))
    done = run(OpenAIDouble(), tmp_path, "--profile=standard")
    assert {"wire.provider_check", "tools.probe", "tools.replay", "skill.programs"}.isdisjoint(
        done.named(CheckStatus.SKIPPED)
    )
    address = urlsplit(done.report["server"]["url"])
    hosts = {tuple(json.loads(line)) for line in seen.read_text().splitlines()}
    assert hosts == {(address.hostname, address.port)}


def test_a_server_that_is_wrong_fails(wrong: Verified) -> None:
    """Exit 7, and the line of the check says why."""
    done = wrong.run
    assert done.code == 7
    assert done.named(CheckStatus.FAILED) == ["chat.capital"]
    (line,) = (line for line in done.output.splitlines() if "chat.capital  " in line)
    assert line.startswith("failed ")
    assert "and not Paris" in line


def test_an_engine_that_dies_unseen_fails_the_run(tmp_path: Path) -> None:
    """Every answer is right, because the next engine gives it."""
    done = run(OpenAIDouble("an engine dies unseen"), tmp_path)
    assert done.code == 7
    assert done.named(CheckStatus.FAILED) == ["survive.unharmed"]
    assert (done.report["server"]["holdfast"]["deaths"], done.report["after"]["deaths"]) == (0, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_a_report(number: signal.Signals, tmp_path: Path) -> None:
    """It has what was made; the check that ran is inconclusive, and those after it are skipped."""
    done = asyncio.run(interrupted(OpenAIDouble("chats that never come"), tmp_path, number))
    assert (done.code, done.errors) == (8, "")
    assert done.report["verdict"] == "inconclusive"
    assert done.report["is_interrupted"]
    passed, hung, *others = done.report["checks"]
    assert (passed["name"], passed["status"]) == ("models", "passed")
    assert (hung["name"], hung["status"]) == ("chat", "inconclusive")
    reasons = {(one["status"], one["reason"]) for one in others}
    assert reasons == {("skipped", "the run was interrupted")}
    assert hung["reason"] == "the run was interrupted"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_the_first_check_there_is_nothing_to_report(
    number: signal.Signals, tmp_path: Path
) -> None:
    """The exit code says so, and not that the server is well."""
    app = OpenAIDouble("a list of models that never comes")
    done = asyncio.run(interrupted(app, tmp_path, number))
    assert (done.code, done.errors) == (8, "")
    assert done.output == "inconclusive: interrupted before there was a report\n"
    assert list(done.directory.iterdir()) == []


def test_a_reader_that_leaves_ends_nothing(tmp_path: Path) -> None:
    """As after `| head`: the report is written, and the exit code is that of the run."""
    out = tmp_path / "out"

    async def unread() -> tuple[int | None, bytes]:
        reader, writer = os.pipe()
        os.close(reader)
        try:
            async with (
                serving(OpenAIDouble()) as client,
                started(str(client.base_url), f"--out={out}", stdout=writer) as process,
            ):
                _, errors = await process.communicate()
                return process.returncode, errors
        finally:
            os.close(writer)

    assert asyncio.run(unread()) == (0, b"")
    assert {path.name for path in out.iterdir()} == set(FORMS)


def test_a_report_that_cannot_be_written_is_exit_1(tmp_path: Path) -> None:
    """The verdict is shown all the same, and the last line names the file and what to do."""
    done = run(Obstruction().obstructing(tmp_path / "out" / "report.json"), tmp_path)
    assert done.code == 1
    assert done.output.splitlines()[-1].startswith("passed in ")
    assert done.errors.startswith("holdfast: error: ")
    assert "report.json could not be written: Is a directory. Remedy: " in done.errors
    assert len(done.errors.splitlines()) == 1


def test_a_directory_in_place_of_a_file_is_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would be found when the run is over; a link to one is replaced as any other."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.html").symlink_to(tmp_path)
    (tmp_path / "junit.xml").mkdir()
    assert cli._run(["verify", "http://x", "--out=."]) == 2
    assert "--out: junit.xml is a directory, and the report has a file" in capfd.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "junit.xml"}


def test_no_server_is_exit_3(tmp_path: Path) -> None:
    """The last line names the address and what to do; no earlier report is taken for its own."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.json").write_text('{"schema": "holdfast-verify/1"}')
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        done = run_at(url, tmp_path)
    assert done.code == 3
    assert [path.name for path in out.iterdir()] == ["report.json.earlier"]
    assert done.errors.startswith(f"holdfast: error: {url}/v1/models did not answer")
    assert "Remedy: start the server" in done.errors


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("spark:8000",),
        ("http://x/v1?api-version=1",),
        ("http://x", "--profile", "huge"),
        ("http://x", "--api-key-file", "/nowhere"),
        ("http://x", "--api-key-file", "/dev/null"),
        ("http://x", "--admin-api-key-file", "/nowhere"),
        ("http://x", "--out", "/dev/null/out"),
        ("http://x", "--tasks", "/nowhere"),
        ("http://x", "--lm-eval", ""),
        ("http://x", "--kill-command", ""),
        ("http://x", "--kill-command", "kill 'it"),
        ("http://x", "--kill-command", "true"),
        ("http://x", "--profile", "soak", "--kill-command", "true"),
        ("http://x", "--out", "/proc"),
        ("http://x", "--record", "/proc/baseline"),
        ("http://x", "--hours", "6"),
        ("http://x", "--profile", "soak", "--hours", "six"),
        ("http://x", "--profile", "soak", "--hours", "0"),
    ],
    ids=" ".join,
)
def test_bad_usage_is_exit_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
) -> None:
    """One line says what is wrong, before anything is asked, and no directory is made."""

    async def used() -> tuple[int | None, str]:
        async with started(*arguments, directory=tmp_path) as process:
            _, errors = await process.communicate()
        return process.returncode, errors.decode()

    if arguments in REFUSED_BY_A_PROCESS:
        code, errors = asyncio.run(used())
    else:
        monkeypatch.chdir(tmp_path)
        code, errors = cli._run(["verify", *arguments]), capfd.readouterr().err
    assert code == 2
    assert errors.startswith("holdfast: error: ")
    assert "Remedy: " in errors
    assert len(errors.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_model_that_is_named_is_in_the_report(tmp_path: Path) -> None:
    """Not the first that the server lists."""
    done = run(Several(), tmp_path, "--model=double")
    assert (done.code, done.errors) == (0, "")
    assert done.report["server"]["model"] == "double"
    assert done.report["server"]["models"] == ["another", "double"]


def test_a_model_that_is_not_listed_is_exit_2(tmp_path: Path) -> None:
    """One line, which names those that are."""
    done = run(Several(), tmp_path, "--model=qwen")
    assert (done.code, len(done.errors.splitlines())) == (2, 1)
    assert "--model: the server lists 'another', 'double', and not 'qwen'" in done.errors
    assert "Remedy: name one of these with --model, or leave it out" in done.errors


def test_a_server_that_asks_for_a_key_is_exit_2(tmp_path: Path) -> None:
    """Without a key and with a wrong one."""
    app = OpenAIDouble(api_key="right")
    path = tmp_path / "key"
    path.write_text("wrong\n")
    for arguments, said in (((), "asks for a key"), ((f"--api-key-file={path}",), "refused")):
        done = run(app, tmp_path, *arguments)
        assert done.code == 2
        assert said in done.errors


def test_no_key_is_written(tmp_path: Path) -> None:
    """The key is used, and stands nowhere, even if the server repeats it."""
    key = "sk-holdfast-<xyzzy>&secret"
    path = tmp_path / "key"
    path.write_text(f"# for this server\n{key}\n")
    done = run(OpenAIDouble("every chat repeats the key", key), tmp_path, f"--api-key-file={path}")
    assert done.code == 7
    written = [done.output, *(one.read_text() for one in done.directory.iterdir())]
    assert all("xyzzy" not in text for text in written)
    assert (done.report["has_key"], done.report["has_admin_key"]) == (True, False)
    assert '-H "Authorization: Bearer $KEY"' in (done.directory / "report.md").read_text()
    assert "[hidden]" in done.output


def test_a_user_in_the_address_is_not_written(tmp_path: Path) -> None:
    """Nor its password."""
    app = OpenAIDouble()

    async def verify() -> Run:
        async with serving(app) as client:
            address = str(client.base_url).removeprefix("http://")
            return await verified_at(f"http://ada:enigma@{address}/v1", tmp_path)

    done = asyncio.run(verify())
    assert done.code == 0
    written = [done.output, *(one.read_text() for one in done.directory.iterdir())]
    assert all("enigma" not in text for text in written)


class Shown(OpenAIDouble):
    """A server that is told of the verdict."""

    def __init__(self, *arguments: Any, status: int = 200) -> None:
        super().__init__(*arguments)
        self.told: list[tuple[str, VerifyRunRequest]] = []
        self._status = status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take the verdict as the admin API does."""
        if scope["type"] != "http" or scope["path"] != "/admin/verify-run":
            await super().__call__(scope, receive, send)
            return
        request = Request(scope, receive)
        body = VerifyRunRequest.model_validate(await request.json())
        self.told.append((f"{request.method} {request.headers['authorization']}", body))
        await JSONResponse({}, self._status)(scope, receive, send)


def test_the_status_page_is_told_of_the_verdict(tmp_path: Path) -> None:
    """With the admin key, in the words of the admin API."""
    key = tmp_path / "admin-key"
    key.write_text("the-admin-key\n")
    app = Shown()
    done = run(app, tmp_path, f"--admin-api-key-file={key}")
    ((how, told),) = app.told
    assert (done.code, how) == (0, "PUT Bearer the-admin-key")
    assert (told.verdict, told.profile) == ("passed", "quick")
    assert told.passed == len(done.named(CheckStatus.PASSED))
    assert done.output.splitlines()[-1] == "the status page shows the verdict"


def test_a_server_that_shows_no_verdict_changes_none(wrong: Verified) -> None:
    """Another server has no status page, or another admin key."""
    assert wrong.run.code == 7
    last = wrong.run.output.splitlines()[-1]
    assert last == "the status page does not show the verdict: the server answered 403"


class Speechless(Shown):
    """Takes the verdict, and never says so."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait until the client leaves."""
        if scope["type"] == "http" and scope["path"] == "/admin/verify-run":
            await self._hang(Request(scope, receive))
        else:
            await super().__call__(scope, receive, send)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_after_the_report_hides_no_failure(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Only the status page may lack the verdict."""
    key = tmp_path / "admin-key"
    key.write_text("the-admin-key\n")
    app = Speechless("no such capital")
    done = asyncio.run(interrupted(app, tmp_path, number, f"--admin-api-key-file={key}"))
    assert (done.code, done.errors) == (7, "")
    last = done.output.splitlines()[-1]
    assert last == "the status page may not show the verdict: interrupted"
