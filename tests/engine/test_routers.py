"""Real routers in front of two replicas: what goes wrong behind them costs no client an answer."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cut_streams import Asked as AskedStream
from cut_streams import streams
from faults import FaultyServer
from holdfast.demo.switches import DemoFault, DemoSwitches
from routed_replicas import (
    DEADLINE_SECONDS,
    FILES,
    MODEL,
    Asked,
    Replicas,
    Reply,
    a_client,
    asking,
    chat,
    replicas,
    require_routers,
    routers,
    until_answered,
    until_back,
    until_bad,
    until_serving,
    vllm_router,
)
from servers import Server, descendants, wait_until
from untrained import untrained_demo

pytestmark = [pytest.mark.engine, pytest.mark.tools, pytest.mark.timeout(900)]

POISON_TOKENS = range(3001, 3061)
"""A prompt of any of these lengths ends the engine that computes it; no chunk of a longer one ends
here."""
POISON: dict[str, Any] = {"model": MODEL, "prompt": "p" * POISON_TOKENS[20], "max_tokens": 1}
PROMPTS = tuple(f"{letter * 40} goes behind a router" for letter in "abcdef")
PER_ROUTER = 3
INTERVALS = 2
"""Of the health checks of a router, until it has noticed what happened to a replica."""
OVERLOAD_CLIENTS = 64
STREAM = AskedStream(
    "chat",
    {
        "messages": [{"role": "user", "content": "hold fast"}],
        "max_tokens": 150,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    },
)


@dataclass(frozen=True, slots=True)
class Site:
    """Two replicas, the routers in front of them, and what an undisturbed replica answers."""

    replicas: Replicas
    routers: Mapping[str, Server]
    """By policy those of vllm-router, and LiteLLM's proxy."""
    plain: Server
    """A vllm-router in front of the first replica alone, which never tries again."""
    both: Server
    """A vllm-router in front of both, which never tries again."""
    expected: Mapping[str, str]


@pytest.fixture(scope="module")
def site(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """All of them, ready."""
    require_routers()
    directory = tmp_path_factory.mktemp("routers")
    fault = DemoFault("context", POISON_TOKENS[0], "crash", until=POISON_TOKENS[-1])
    model = untrained_demo(models, DemoSwitches(faults=(fault,)))
    once = ("--policy=round_robin", "--disable-retries", "--disable-circuit-breaker")
    seldom = "--health-check-interval-secs=600"
    with (
        replicas(directory / "replicas", str(model)) as pair,
        routers(directory, pair) as all_routers,
        vllm_router(directory / "plain", [pair.servers[0].url], *once, seldom) as plain,
        vllm_router(directory / "both", [one.url for one in pair.servers], *once, seldom) as both,
        a_client() as client,
    ):
        url = pair.servers[0].url
        expected = {prompt: chat(client, url, prompt).text for prompt in PROMPTS}
        yield Site(pair, all_routers, plain, both, expected)


def grown(site: Site, name: str, prompts: tuple[str, ...]) -> list[float]:
    """Ask one router after the other, and return how many each replica has answered."""
    before = site.replicas.answers
    with a_client() as client:
        for prompt in prompts:
            assert chat(client, site.routers[name].url, prompt).text == site.expected[prompt]
    return [now - then for now, then in zip(site.replicas.answers, before, strict=True)]


def until_spread(site: Site, name: str, prompts: tuple[str, ...], wanted: list[float]) -> None:
    """Ask until the replicas have got these shares; one that was slow once may have been out."""
    wait_until(
        lambda: sorted(grown(site, name, prompts)) == wanted,
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: f"never {wanted}",
    )


def test_round_robin_asks_each_replica_in_turn(site: Site) -> None:
    """Half of the requests each."""
    until_spread(site, "round_robin", PROMPTS, [len(PROMPTS) / 2] * 2)


@pytest.mark.parametrize("prompt", PROMPTS[:2], ids=["one", "another"])
def test_cache_aware_keeps_a_prompt_where_it_was(site: Site, prompt: str) -> None:
    """The replica that has it in its cache gets all of them."""
    until_spread(site, "cache_aware", (prompt,) * 4, [0, 4])


def test_replicas_show_what_the_endpoint_picker_reads(site: Site) -> None:
    """Except for adapters, which these cannot have."""
    text = (FILES / "llm-d" / "endpoint-picker-config.yaml").read_text()
    wanted = set(re.findall(r"\b(?:vllm:|holdfast_)\w+", text)) - {"vllm:lora_requests_info"}
    for server in site.replicas.servers:
        families = text_string_to_metric_families(server.get("/metrics/routing").text)
        assert {family.name for family in families} == wanted


def test_litellm_asks_both_replicas(site: Site) -> None:
    """It chooses at random."""
    for server in site.replicas.servers:
        until_serving(site.routers["litellm"], server, PROMPTS)


def test_an_engine_that_is_killed_costs_no_answer(site: Site) -> None:
    """Its replica refuses with 503, which passes through, and gets traffic again once READY."""
    first, _ = site.replicas.servers
    since = len(site.replicas.members[0].wire.asked)
    before = first.metric("engine_deaths_total")
    with asking(site.routers, PROMPTS, clients=PER_ROUTER) as asked:
        until_answered(asked)
        FaultyServer(first, Path()).process("EngineCore").kill()
        first.until(lambda: first.metric("engine_deaths_total") > before, "a death")
        refusal = _first_refusal(site.plain)
        first.until_ready()
        until_answered(asked)
        outage = until_back(site.replicas.members[0], since)
    assert _failures(asked, site.expected) == []
    assert outage.is_within(INTERVALS), outage
    assert refusal.status == 503
    assert refusal.headers["x-holdfast-state"] == "RECOVERING"
    assert int(refusal.headers["retry-after"]) > 0
    for name in ("round_robin", "litellm"):
        until_serving(site.routers[name], first, PROMPTS)


def _failures(asked: Mapping[str, Asked], expected: Mapping[str, str]) -> list[tuple[str, Reply]]:
    """Every chat that was not answered, or not as by an undisturbed server, with its router."""
    return [
        (name, reply)
        for name, of in asked.items()
        for reply in [*of.lost(), *of.cut(), *of.wrong(expected)]
    ]


def _first_refusal(router: Server) -> Reply:
    """Ask a router until a chat is refused."""
    with a_client() as client:
        found = wait_until(
            lambda: [
                reply for reply in [chat(client, router.url, PROMPTS[0])] if reply.status != 200
            ],
            deadline_seconds=DEADLINE_SECONDS,
            what=lambda: "nothing is refused",
        )
    return found[0]


def test_overload_is_told_as_429(site: Site) -> None:
    """Clients get our own error, with the time after which to try again."""
    refused = _overloaded(site.both)
    error = json.loads(refused.text)["error"]
    assert (refused.status, error["code"]) == (429, 429)
    assert int(refused.headers["retry-after"]) > 0


def test_litellm_tells_overload_as_429(site: Site) -> None:
    """In its own words, after it has tried the other replica."""
    assert _overloaded(site.routers["litellm"]).status == 429


def _overloaded(router: Server) -> Reply:
    """Ask a router with more clients than both replicas take, until one is refused."""
    with asking({"it": router}, PROMPTS, clients=OVERLOAD_CLIENTS, max_tokens=64) as asked:
        refused = wait_until(
            asked["it"].lost, deadline_seconds=DEADLINE_SECONDS, what=lambda: "nothing is refused"
        )
    assert {reply.status for reply in asked["it"].replies} == {200, 429}
    return refused[0]


def test_a_request_that_ends_an_engine_ends_only_one(site: Site) -> None:
    """No router sends it to the other replica."""
    before = site.replicas.deaths
    answer = site.routers["round_robin"].post("/v1/completions", POISON, timeout=300)
    site.replicas.until_ready()
    assert answer.status_code == 422, answer.text
    assert site.replicas.deaths == before + 1


def test_what_ends_only_one_engine_is_quarantined_when_sent_again(site: Site) -> None:
    """On both replicas, with the second death: they share what they know of it."""
    before = site.replicas.deaths
    for router in (site.routers["round_robin"], *site.routers.values()):
        for _ in site.replicas.servers:
            again = router.post("/v1/completions", POISON, timeout=300)
            assert 400 <= again.status_code < 429, again.text
            site.replicas.until_ready()
    assert site.replicas.deaths == before + 1


def test_a_replica_that_drains_loses_nothing(site: Site) -> None:
    """Its streams go to their end, new requests go to the other, and traffic comes back to it."""
    _, second = site.replicas.servers
    since = len(site.replicas.members[1].wire.asked)
    router = site.routers["round_robin"]
    with asking(site.routers, PROMPTS, clients=PER_ROUTER) as asked:
        until_answered(asked)
        with streams(router, [STREAM] * 4) as begun:
            for stream in begun:
                assert stream.has_begun.wait(DEADLINE_SECONDS)
            second.process.send_signal(signal.SIGTERM)
        assert second.wait() == 0
        until_answered(asked)
        site.replicas.members[1].start()
        site.replicas.until_ready()
        outage = until_back(site.replicas.members[1], since)
    assert [(stream.error, stream.finish_reasons) for stream in begun] == [("", ["length"])] * 4
    assert _failures(asked, site.expected) == []
    assert outage.is_within(INTERVALS), outage
    for name in ("round_robin", "litellm"):
        until_serving(site.routers[name], site.replicas.servers[1], PROMPTS)


def test_a_server_that_is_killed_costs_no_answer(site: Site) -> None:
    """Even what it was computing is asked again, if nothing of the answer had been sent.

    LiteLLM does not ask again if only the head of the answer had come: it says that there was an
    error, with the status 200 of that head. That can be no more than what it was waiting for.
    """
    first, second = site.replicas.servers
    since = len(site.replicas.members[0].wire.asked)
    processes = list(descendants(first.process.pid))
    try:
        with asking(site.routers, PROMPTS, clients=PER_ROUTER) as asked:
            until_answered(asked)
            first.process.kill()
            until_answered(asked, more=8)
            until_bad(site.replicas.members[0], since, more_than=INTERVALS)
            until_answered(asked)
        outage = site.replicas.members[0].wire.outage(since)
        assert outage is not None
        assert outage.is_within(INTERVALS), outage
        cut = asked["litellm"].cut()
        assert len(cut) <= PER_ROUTER, cut
        assert [one for one in _failures(asked, site.expected) if one[1] not in cut] == []
        assert second.get("/readyz").status_code == 200
        assert psutil.wait_procs(processes, timeout=60)[1] == []
    finally:
        for process in processes:
            if process.is_running():
                process.kill()
