"""Keys of a server with a real engine: who gets in, how they are changed, and who can read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from servers import SMALL, Server, descendants, running, wait_until

pytestmark = pytest.mark.engine

SEEN_DEADLINE_SECONDS = 60.0
FIRST, SECOND, THIRD = "hush-first", "hush-second", "hush-third"
ADMIN, GIVEN, VARIABLE = "hush-admin", "hush-given", "hush-variable"


@dataclass(frozen=True, slots=True)
class Locked:
    """A server, and the file that its keys are in."""

    server: Server
    file: Path

    def client(self, key: str) -> openai.OpenAI:
        """The official client with a key."""
        return openai.OpenAI(
            base_url=f"{self.server.url}/v1", api_key=key, max_retries=0, timeout=60
        )

    def ask(self, path: str, key: str = "") -> httpx.Response:
        """One GET, with a key or without."""
        return self.server.get(path, headers={"authorization": f"Bearer {key}"} if key else {})


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    """The demo model behind keys of every origin."""
    directory = tmp_path_factory.mktemp("keys")
    file = directory / "keys.txt"
    file.write_text(f"{FIRST}\n{SECOND}\n")
    keys = ("--api-key", GIVEN, "--admin-api-key", ADMIN, f"--api-key-file={file}")
    variables = {"VLLM_API_KEY": VARIABLE, "HOLDFAST_ADMIN_API_KEY": VARIABLE}
    flags = ("--demo", *SMALL, "--probe=quick", *keys)
    with running(directory, *flags, environment=variables) as server:
        server.until_ready()
        yield Locked(server, file)


# pytest puts the ids into the environment, which the server takes over.
@pytest.mark.parametrize("key", [FIRST, SECOND, GIVEN], ids=["first", "second", "given"])
def test_the_official_client_gets_in_with_each_key(locked: Locked, key: str) -> None:
    """Of a flag and of the file."""
    with locked.client(key) as client:
        answer = client.completions.create(model="holdfast-demo", prompt="hold", max_tokens=2)
    assert answer.choices


def test_nobody_else_gets_in(locked: Locked) -> None:
    """Neither with a variable that a flag overrules, nor as an admin; probes and scrapes do."""
    for key in (VARIABLE, ADMIN):
        with locked.client(key) as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
    for path in ("/v1/models", "/statusz", "/docs", "/openapi.json", "/version"):
        assert locked.ask(path).status_code == 401
        assert locked.ask(path, GIVEN).status_code == 200
    for path in ("/livez", "/readyz", "/health", "/metrics"):
        assert locked.ask(path).status_code == 200
    assert locked.ask("/admin", GIVEN).status_code == 403


def test_a_key_is_changed_without_a_restart(locked: Locked) -> None:
    """What the file says now is right, within moments."""
    locked.file.write_text(f"{SECOND}\n{THIRD}\n")
    wait_until(
        lambda: locked.ask("/v1/models", THIRD).status_code == 200,
        deadline_seconds=SEEN_DEADLINE_SECONDS,
        what=lambda: "the new key stays wrong",
    )
    assert locked.ask("/v1/models", FIRST).status_code == 401
    assert locked.ask("/v1/models", SECOND).status_code == 200


def test_no_key_can_be_read(locked: Locked) -> None:
    """In the log, the report, or what the system shows of any process of the server."""
    family = {psutil.Process(locked.server.process.pid), *descendants(locked.server.process.pid)}
    assert len(family) > 1
    for process in family:
        shown = Path("/proc", str(process.pid))
        assert b"hush" not in (shown / "cmdline").read_bytes()
        assert b"hush" not in (shown / "environ").read_bytes()
    assert "hush" not in locked.ask("/statusz", GIVEN).text
    assert "hush" not in locked.server.log


def test_no_key_is_written(locked: Locked) -> None:
    """To what is learned and kept beside the log."""
    kept = [path for path in locked.file.parent.rglob("*") if path.is_file()]
    assert len(kept) > 1
    for path in set(kept) - {locked.file}:
        assert b"hush" not in path.read_bytes(), path
