"""Keys of a server with a real engine: who gets in, how they are changed, and who can read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import anthropic
import httpx
import openai
import psutil
import pytest

from holdfast.verify.checks.tools import replay
from holdfast.verify.records import CheckStatus
from servers import SMALL, Server, descendants, running, wait_until
from verified import results_at

pytestmark = pytest.mark.engine

SEEN_DEADLINE_SECONDS = 60.0
FIRST, SECOND, THIRD, LIMITED = "hush-first", "hush-second", "hush-third", "hush-limited"
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
    file.write_text(f"alice: {FIRST}\n{SECOND}\nlimited: {LIMITED} max_requests_per_minute=1\n")
    keys = ("--api-key", GIVEN, "--admin-api-key", ADMIN, f"--api-key-file={file}")
    variables = {"VLLM_API_KEY": VARIABLE, "HOLDFAST_ADMIN_API_KEY": VARIABLE}
    tools = ("--enable-auto-tool-choice", "--tool-call-parser=hermes", "--enable-scale-out")
    usage = f"--usage-dir={directory / 'usage'}"
    flags = ("--demo", *SMALL, "--probe=quick", *tools, *keys, usage)
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


def test_verify_with_a_key_has_recorded_answers_parsed(locked: Locked) -> None:
    """By vLLM's own parser, which takes markup in an argument for the end of the call."""
    (made,) = results_at(locked.server.url, replay.CHECKS, api_key=GIVEN).values()
    assert made.status in {CheckStatus.PASSED, CheckStatus.WARNED}, made.reason
    wrong = {one.what.partition(",")[0] for one in made.warnings}
    assert wrong <= {"qwen3-hermes/marker-in-arguments"}, made.warnings
    (score,) = made.numbers
    assert (score.of or 0) > 20
    assert score.value >= 95


def _used(locked: Locked, key: str) -> tuple[float, float, float]:
    """Requests, tokens of prompts and tokens of answers of a key."""
    names = ("key_requests_total", "key_prompt_tokens_total", "key_output_tokens_total")
    requests, prompt, output = (locked.server.metric(name, key=key) for name in names)
    return requests, prompt, output


def test_a_key_is_counted_by_its_name(locked: Locked) -> None:
    """What its answers say of tokens, however many prompts and answers a request has."""
    before = _used(locked, "alice")
    with locked.client(FIRST) as client:
        answer = client.completions.create(
            model="holdfast-demo", prompt=["hold", "hold fast"], max_tokens=3, n=2
        )
    assert answer.usage is not None
    gained = tuple(now - then for now, then in zip(_used(locked, "alice"), before, strict=True))
    assert answer.usage.completion_tokens > 0
    assert gained == (1, answer.usage.prompt_tokens, answer.usage.completion_tokens)


def test_an_answer_that_its_client_left_is_counted(locked: Locked) -> None:
    """As far as it was generated."""
    before = _used(locked, "alice")
    with locked.client(FIRST) as client:
        stream = client.completions.create(
            model="holdfast-demo",
            prompt="hold",
            max_tokens=100,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        stream.close()
    wait_until(
        lambda: _used(locked, "alice")[2] > before[2],
        deadline_seconds=SEEN_DEADLINE_SECONDS,
        what=lambda: "no token is counted",
    )
    assert _used(locked, "alice")[0] == before[0] + 1
    assert _used(locked, "alice")[1] > before[1]


def test_usage_is_on_disk(locked: Locked) -> None:
    """Within seconds, while the server runs."""
    directory = locked.file.parent / "usage"
    wait_until(
        lambda: any('"alice"' in path.read_text() for path in directory.glob("usage-*.jsonl")),
        deadline_seconds=SEEN_DEADLINE_SECONDS,
        what=lambda: "there is no line for the key",
    )


def test_the_official_client_is_told_of_a_limit(locked: Locked) -> None:
    """And when to come again; a request that the engine never got does not count."""
    with locked.client(LIMITED) as client:
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="no-such-model", prompt="hold", max_tokens=2)
        client.completions.create(model="holdfast-demo", prompt="hold", max_tokens=2)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="holdfast-demo", prompt="hold", max_tokens=2)
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    assert _used(locked, "limited")[0] == 1
    assert locked.server.metric("requests_refused_total", reason="key_request_rate") == 1


def test_anthropics_client_gets_in(locked: Locked) -> None:
    """With its own header, which opens its own routes alone."""
    with anthropic.Anthropic(
        base_url=locked.server.url, api_key=FIRST, max_retries=0, timeout=60
    ) as client:
        answer = client.messages.create(
            model="holdfast-demo",
            max_tokens=2,
            messages=[{"role": "user", "content": "hold"}],
        )
    assert answer.usage.output_tokens
    refused = locked.server.get("/v1/models", headers={"x-api-key": FIRST})
    assert refused.status_code == 401


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
        for name in ("cmdline", "environ"):
            assert b"hush" not in _content(Path("/proc", str(process.pid), name))
    assert "hush" not in locked.ask("/statusz", GIVEN).text
    assert "hush" not in locked.server.log


def test_no_key_is_written(locked: Locked) -> None:
    """To what is learned and kept beside the log."""
    kept = [path for path in locked.file.parent.rglob("*") if path.is_file()]
    assert len(kept) > 1
    for path in set(kept) - {locked.file}:
        assert b"hush" not in _content(path), path


def _content(path: Path) -> bytes:
    """Empty for a process or a file that has just gone: the server runs on."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
