"""Requests that crash native code, sent by a client with a key: nobody else notices for long."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from holdfast.demo.switches import DemoFault, DemoSwitches
from servers import SMALL, Server, running
from untrained import untrained_demo

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CRASH_TOKENS = 3001
"""A prompt of this length ends every process that computes it by SIGSEGV."""
RAISE_TOKENS = 3003
HONEST, HOSTILE = "an-honest-key-of-a-neighbour", "a-key-that-was-given-to-an-attacker"


def authorized(key: str) -> dict[str, str]:
    """The header with a key."""
    return {"authorization": f"Bearer {key}"}


@dataclass(frozen=True, slots=True)
class Siege:
    """A server with two keys, what one of them sent, and what came of it."""

    server: Server
    answers: dict[str, httpx.Response]
    deaths: dict[str, float]
    """Deaths that were counted after each of the answers."""
    seconds: float
    """From before the first crash until after the last answer."""
    undisturbed: str
    neighbour: httpx.Response
    """Asked while the key of the attacker is suspended."""


def post(server: Server, key: str, tokens: int, **options: object) -> httpx.Response:
    """A completion of a prompt of this many tokens."""
    body = {"model": "besieged", "prompt": [50] * tokens, "max_tokens": 8, "temperature": 0}
    headers = authorized(key)
    return server.post("/v1/completions", {**body, **options}, headers=headers, timeout=300)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two servers, one after the other, keep their state in."""
    return tmp_path_factory.mktemp("siege")


@pytest.fixture(scope="module")
def flags(models: Path) -> tuple[str, ...]:
    """A model that crashes at some lengths, and two keys."""
    faults = (
        DemoFault("context", CRASH_TOKENS, "crash", until=CRASH_TOKENS),
        DemoFault("context", RAISE_TOKENS, "raise", until=RAISE_TOKENS),
    )
    model = untrained_demo(models, DemoSwitches(faults=faults))
    return (
        str(model),
        *SMALL,
        "--dtype=float32",
        "--probe=quick",
        "--max-model-len=3072",
        "--max-engine-restarts=1",
        "--served-model-name=besieged",
        "--api-key",
        HONEST,
        HOSTILE,
    )


@pytest.fixture(scope="module")
def siege(state: Path, flags: tuple[str, ...]) -> Iterator[Siege]:
    """Three crashes, each alone in the engine, sent one after the other."""
    with running(state, *flags) as server:
        server.until_ready()
        undisturbed = post(server, HONEST, 9).json()["choices"][0]["text"]
        answers: dict[str, httpx.Response] = {}
        deaths: dict[str, float] = {}
        began_seconds = time.monotonic()

        def attack(name: str, tokens: int, **options: object) -> None:
            answers[name] = post(server, HOSTILE, tokens, **options)
            server.until_ready()
            deaths[name] = server.metric("engine_deaths_total")

        attack("first", CRASH_TOKENS)
        attack("varied", CRASH_TOKENS, seed=3, max_tokens=9, cache_salt="salt")
        attack("third", CRASH_TOKENS)
        attack("streamed", CRASH_TOKENS, stream=True)
        attack("another", RAISE_TOKENS)
        attack("suspended", 9)
        seconds = time.monotonic() - began_seconds
        yield Siege(server, answers, deaths, seconds, undisturbed, post(server, HONEST, 9))


def test_a_crash_is_not_made_again(siege: Siege) -> None:
    """The first time its client gets 422, which no router retries, and is told not to retry."""
    answer = siege.answers["first"]
    assert answer.status_code == 422
    assert answer.headers["x-should-retry"] == "false"
    assert siege.deaths["first"] == 1


def test_the_log_has_the_python_stacks_of_a_crash(siege: Siege) -> None:
    """The process does not stay to look for the names of C functions, which may never end."""
    assert siege.server.log.count("Fatal Python error: Segmentation fault") == 2
    assert "Segfault encountered" not in siege.server.log


def test_its_like_is_quarantined_whatever_is_varied(siege: Siege) -> None:
    """With the second death; from then on it reaches no engine, streamed or not."""
    statuses = {name: siege.answers[name].status_code for name in ("varied", "third", "streamed")}
    assert statuses == dict.fromkeys(statuses, 422)
    assert all(siege.answers[name].headers["x-should-retry"] == "false" for name in statuses)
    assert siege.deaths["varied"] == siege.deaths["third"] == siege.deaths["streamed"] == 2
    error = siege.answers["third"].json()["error"]
    assert (error["code"], "is not tried again" in error["message"]) == (422, True)


def test_a_key_that_ends_engines_has_to_wait(siege: Siege) -> None:
    """After three deaths within an hour, for what is left of the hour."""
    assert siege.deaths["another"] == 3
    answer = siege.answers["suspended"]
    assert answer.status_code == 429
    assert 3600 - siege.seconds <= int(answer.headers["retry-after"]) <= 3600
    assert answer.headers["x-should-retry"] == "false"
    assert siege.server.metric("requests_refused_total", reason="key_suspended") == 1


def test_nobody_else_pays(siege: Siege) -> None:
    """The neighbour is served, and three deaths have cost nothing of a budget of one."""
    assert siege.neighbour.status_code == 200
    assert siege.neighbour.json()["choices"][0]["text"] == siege.undisturbed
    headers = authorized(HONEST)
    report = siege.server.get("/statusz", headers=headers).json()
    assert report["state"] == "READY"
    assert siege.server.metric("engine_restarts_left") == 1


def test_what_is_known_outlives_the_server(
    siege: Siege, state: Path, flags: tuple[str, ...]
) -> None:
    """Another one on the same state directory refuses the request, and no prompt lies there."""
    (kept,) = (state / "state" / "holdfast").glob("suspicions-*.json")
    assert len(json.loads(kept.read_text())["suspicions"]) == 2
    assert HOSTILE not in kept.read_text()
    with running(state, *flags) as server:
        server.until_ready()
        assert post(server, HONEST, CRASH_TOKENS).status_code == 422
        assert post(server, HOSTILE, 9).status_code == 429
        assert server.metric("engine_deaths_total") == 0
    assert siege.server.process.poll() is None
