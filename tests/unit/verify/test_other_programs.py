"""Other people's programs: what they are given, what is read of them, and that they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from asgi_server import serving
from holdfast.verify.options import Options
from holdfast.verify.other_programs import OtherProgram, path_of, results_of
from holdfast.verify.survey import survey
from holdfast.verify.target import Target
from holdfast.verify.trial import InconclusiveError, SkippedError, Trial
from openai_double import OpenAIDouble
from stand_in_programs import install, install_none

TOOL = OtherProgram("a-tool", "pip install a-tool", results="**/told.json")
KEY = "sk-holdfast-0123456789"
TELLS = """
told = {"arguments": sys.argv[1:], "variables": dict(os.environ)}
(Path(given("--out")) / "deep").mkdir()
(Path(given("--out")) / "deep" / "told.json").write_text(json.dumps(told))
"""
HANGS = """
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
Path(given("--out"), "noted").write_text(json.dumps([os.getpid(), child.pid, given("--out")]))
Path(given("--out"), "noted").rename({where!r})
time.sleep(600)
"""
LEAVES = """
child = subprocess.Popen(["sleep", "600"]{output}{group})
Path({where!r}).write_text(str(child.pid))
time.sleep(2)
"""
"""Long enough to be seen."""
DEADLINE_SECONDS = 60


@asynccontextmanager
async def trying(key: str = "", user: str = "") -> AsyncIterator[Trial]:
    """A trial of a server that is well."""
    async with serving(OpenAIDouble(api_key=key)) as client:
        url = str(client.base_url).replace("://", f"://{user}")
        async with Target(url, key) as target:
            yield Trial(target, await survey(target), "full", Options(), {})


def arguments(directory: Path) -> Sequence[str]:
    return ["run", f"--out={directory}"]


def told(key: str = "", user: str = "", tool: OtherProgram = TOOL) -> Mapping[str, Any]:
    """What the program writes."""

    async def tell() -> Mapping[str, Any]:
        async with trying(key, user) as trial:
            return await results_of(tool, trial, arguments)

    return asyncio.run(tell())


@pytest.mark.parametrize("output", ["", ", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"])
@pytest.mark.parametrize("group", ["", ", start_new_session=True"])
def test_what_outlives_it_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str, group: str
) -> None:
    """Whether or not that has its output still, or is in a session of its own."""
    noted = tmp_path / "noted"
    begun = LEAVES.format(output=output, group=group, where=str(noted))
    install(monkeypatch, tmp_path, "a-tool", begun + TELLS)
    assert told()["arguments"][0] == "run"
    assert not psutil.wait_procs(processes(int(noted.read_text())), timeout=DEADLINE_SECONDS)[1]


def test_its_results_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They lie in a directory that is gone when they have been read."""
    install(monkeypatch, tmp_path, "a-tool", TELLS)
    found = told()
    assert found["arguments"][0] == "run"
    directory = found["arguments"][1].partition("=")[2]
    assert found["variables"]["TMPDIR"] == directory
    assert not Path(directory).exists()


def test_the_key_is_in_no_argument(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is in the environment, where no list of processes shows it."""
    install(monkeypatch, tmp_path, "a-tool", TELLS)
    found = told(KEY)
    assert found["variables"]["OPENAI_API_KEY"] == KEY
    assert not any(KEY in one for one in found["arguments"])


def test_a_key_of_another_server_is_not_passed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That of the environment, where the verified server has none."""
    install(monkeypatch, tmp_path, "a-tool", TELLS)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert "OPENAI_API_KEY" not in told()["variables"]


def test_nothing_is_downloaded_or_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The program is told so, except where it has its own way."""
    install(monkeypatch, tmp_path, "a-tool", TELLS)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    found = told()["variables"]
    assert (found["HF_HUB_OFFLINE"], found["HF_DATASETS_OFFLINE"]) == ("1", "1")
    assert (found["DO_NOT_TRACK"], found["HF_HUB_DISABLE_TELEMETRY"]) == ("1", "1")
    own = OtherProgram("a-tool", "", results="**/told.json", variables={"HF_HUB_OFFLINE": ""})
    assert "HF_HUB_OFFLINE" not in told(tool=own)["variables"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sys.exit('no such task')", "a-tool ended with 1: no such task"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "a-tool ended with -9: it said nothing"),
        (f"sys.exit('Bearer {KEY}')", r"a-tool ended with 1: Bearer \[hidden\]"),
        (
            "for _ in range(100): print('x' * 100_000)\nsys.exit('too much')",
            "a-tool ended with 1: too much",
        ),
        ("", "a-tool wrote no results that can be read"),
        ("Path(given('--out'), 'told.json').write_text('[]')", "no results that can be read"),
        ("Path(given('--out'), 'told.json').write_text('{')", "no results that can be read"),
    ],
)
def test_a_program_that_fails_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, said: str
) -> None:
    """The check is inconclusive, and says what the program said last, without a key."""
    install(monkeypatch, tmp_path, "a-tool", body)
    with pytest.raises(InconclusiveError, match=f"^{said}|{said}$") as caught:
        told(KEY)
    assert KEY not in str(caught.value)


def test_a_complaint_is_preferred_to_the_last_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some programs end with the name of their log."""
    body = "print('hi')\nprint('1:00 ERROR nothing answers')\nsys.exit('Log: x.log')"
    install(monkeypatch, tmp_path, "a-tool", body)
    with pytest.raises(InconclusiveError, match=r"1:00 ERROR nothing answers$"):
        told(tool=OtherProgram("a-tool", "", results="x", complaint=" ERROR "))


def test_a_program_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At the deadline of its check, or by Ctrl-C: with a child in another group, and its files."""
    noted = tmp_path / "noted"
    install(monkeypatch, tmp_path, "a-tool", HANGS.format(where=str(noted)))

    async def cancelled() -> None:
        async with trying() as trial, asyncio.timeout(DEADLINE_SECONDS):
            asking = asyncio.create_task(results_of(TOOL, trial, arguments))
            while not noted.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()

    asyncio.run(cancelled())
    *pids, directory = json.loads(noted.read_text())
    assert not any(is_running(pid) for pid in pids)
    assert not Path(directory).exists()


def test_a_program_ends_with_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the run is killed and cannot end it."""
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux kills a process with its parent")
    noted = tmp_path / "noted"
    install(monkeypatch, tmp_path, "a-tool", HANGS.format(where=str(noted)))

    async def killed() -> None:
        command = (sys.executable, "-c", f"import {__name__} as t; t.told()")
        paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(tmp_path)}
        )
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not noted.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.05)
            process.kill()
            await process.wait()

    asyncio.run(killed())
    pid, child, _ = json.loads(noted.read_text())
    try:
        assert not psutil.wait_procs(processes(pid), timeout=DEADLINE_SECONDS)[1]
    finally:
        for one in (pid, child):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)


def test_a_password_in_the_address_is_in_no_argument(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The program is not begun."""
    install(monkeypatch, tmp_path, "a-tool", "Path(sys.argv[0]).unlink()")
    with pytest.raises(SkippedError, match="takes no user, password or query"):
        told(user="ada:enigma@")
    assert path_of(TOOL) is not None


def test_a_program_is_found_beside_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its environment may not be activated."""
    install_none(monkeypatch, tmp_path)
    assert path_of(TOOL) is None
    path = install(monkeypatch, tmp_path, "a-tool", "")
    monkeypatch.setenv("PATH", tempfile.gettempdir())
    monkeypatch.setattr(sys, "executable", str(path.parent / "python"))
    assert path_of(TOOL) == str(path)


def processes(*pids: int) -> list[psutil.Process]:
    """Those that still exist."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def is_running(pid: int) -> bool:
    """Whether it is there, and no zombie that its parent has not yet reaped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
