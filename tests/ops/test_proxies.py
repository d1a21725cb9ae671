"""Routers with the shipped files before replicas in every state: who is asked, who hears of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

from proxies import envoy, nginx
from routed_replicas import MODEL, litellm, vllm_router
from servers import Server, wait_until
from stub_replicas import (
    AWAY,
    BROKEN,
    CHAT,
    FULL,
    READY,
    REALTIME,
    SLOW,
    SUSPICIOUS,
    State,
    StubReplica,
    silent_replica,
    talking_replica,
)
from stub_replicas import stub_replicas as replicas

pytestmark = pytest.mark.tools

PROXIES = {"nginx": nginx, "Envoy": envoy}
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hold fast"}]}
DEADLINE_SECONDS = 120.0
HURRY_SECONDS = 20.0
MANY = 40
HUNDREDS = 300
INTERVALS = 2
"""Of health checks or, where there are none, of the time that a replica is left out."""
LEFT_OUT_SECONDS = {"nginx": 5, "LiteLLM": 5}
"""`fail_timeout` and `cooldown_time` of the files."""


@dataclass(frozen=True, slots=True)
class Site:
    """A router before two replicas."""

    router: Server
    replicas: list[StubReplica]
    chats_at: list[float] = field(default_factory=list)
    """When clients asked for one."""

    def chat(self) -> httpx.Response:
        """What a client gets for a chat."""
        self.chats_at.append(time.monotonic())
        return self.router.post(CHAT, BODY)

    @property
    def attempts(self) -> int:
        """How many chats the replicas have been asked for."""
        return sum(len(one.chats) for one in self.replicas)

    def put(self, state: State) -> None:
        """Bring both replicas into a state."""
        for one in self.replicas:
            one.state = state


@contextmanager
def site(name: str, directory: Path) -> Iterator[Site]:
    """One with the router of this name."""
    with replicas() as pair:
        ports, urls = [one.wire.port for one in pair], [one.wire.url for one in pair]
        makers: dict[str, Callable[[], AbstractContextManager[Server]]] = {
            "nginx": lambda: nginx(directory, ports),
            "Envoy": lambda: envoy(directory, ports),
            "vllm-router": lambda: vllm_router(directory, urls, "--policy=round_robin"),
            "LiteLLM": lambda: litellm(directory, urls),
        }
        with makers[name]() as router:
            of_site = Site(router, pair)
            # A proxy that has just started may not have asked for anybody's health yet.
            router.until(lambda: of_site.chat().status_code == 200, "an answer")
            yield of_site


@pytest.fixture(scope="module", params=PROXIES)
def proxied(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """Replicas behind a proxy that knows nothing of models; each test makes them ready again."""
    with site(request.param, tmp_path_factory.mktemp("proxy")) as made:
        yield made


@pytest.mark.parametrize("state", [FULL, SUSPICIOUS, BROKEN], ids=["429", "422", "500"])
def test_a_proxy_passes_on_what_another_replica_must_not_meet(proxied: Site, state: State) -> None:
    """At once, with every header, and one replica has seen it."""
    until_both_serve(proxied)
    proxied.put(state)
    before = proxied.attempts
    answer = proxied.chat()
    assert answer.status_code == state.chat
    assert {name: answer.headers[name] for name in state.headers} == state.headers
    assert proxied.attempts == before + 1


def test_a_proxy_goes_on_asking_a_replica_that_was_too_full_for_one_chat(proxied: Site) -> None:
    """It serves the next one: 503 in place of 429 would have taken it away from everybody."""
    until_both_serve(proxied)
    first, _ = proxied.replicas
    before = len(first.chats)
    first.state = FULL
    wait_until(
        lambda: proxied.chat().status_code == FULL.chat,
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: "it gets no chats",
    )
    first.state = READY
    assert {proxied.chat().status_code for _ in range(20)} == {200}
    assert len(first.chats) > before + 1


def test_a_proxy_asks_another_replica_if_one_is_away(proxied: Site) -> None:
    """No client hears of it."""
    until_both_serve(proxied)
    away, other = proxied.replicas
    away.state = AWAY
    before = len(other.chats)
    assert {proxied.chat().status_code for _ in range(20)} == {200}
    assert len(other.chats) == before + 20


def test_envoy_asks_another_replica_for_all_chats_of_one_that_is_away(tmp_path: Path) -> None:
    """However many there are at once: by default it retries three requests at a time."""
    with site("Envoy", tmp_path) as made, ThreadPoolExecutor(MANY) as threads:
        away, slow = made.replicas
        until_both_serve(made)
        before = len(slow.chats)
        away.state, slow.state = State(health=200, chat=503), SLOW
        asked = [threads.submit(made.chat) for _ in range(MANY)]
        try:
            wait_until(
                lambda: len(slow.chats) == before + MANY or any(one.done() for one in asked),
                deadline_seconds=DEADLINE_SECONDS,
                what=lambda: f"{len(slow.chats) - before} of {MANY} chats",
            )
        finally:
            slow.may_go_on.set()
        assert {one.result().status_code for one in asked} == {200}


@pytest.mark.parametrize("name", PROXIES)
def test_a_proxy_asks_another_replica_for_a_chat_with_a_large_image(
    name: str, tmp_path: Path
) -> None:
    """It has kept all that --max-body-size lets through."""
    body = {**BODY, "image": "x" * (31 << 20)}
    with site(name, tmp_path) as made:
        until_both_serve(made)
        away = made.replicas[0]
        away.state = State(health=200, chat=503)
        before = len(away.chats)

        def was_asked() -> bool:
            assert made.router.post(CHAT, body).status_code == 200
            return len(away.chats) > before

        wait_until(was_asked, deadline_seconds=DEADLINE_SECONDS, what=lambda: "it gets no chats")


def test_a_proxy_says_when_to_come_again_if_all_are_away(proxied: Site) -> None:
    """As long as it asks them, and when it has taken them out."""
    until_both_serve(proxied)
    proxied.put(AWAY)
    answers = [proxied.chat() for _ in range(20)]
    assert {one.status_code for one in answers} == {503}
    assert all(int(one.headers["Retry-After"]) > 0 for one in answers)
    assert {one.headers["x-should-retry"] for one in answers} == {"true"}
    assert {one.json()["error"]["code"] for one in answers} == {503}


@pytest.mark.parametrize("name", PROXIES)
def test_a_replica_that_answers_no_packet_costs_no_client_its_answer(
    name: str, tmp_path: Path
) -> None:
    """The other replica gives it, before a client that is in a hurry gives up."""
    with (
        silent_replica() as silent,
        replicas(1) as (other,),
        PROXIES[name](tmp_path, [silent, other.wire.port]) as router,
    ):
        router.until(lambda: chat_soon(router).status_code == 200, "an answer")
        assert [chat_soon(router).status_code for _ in range(20)] == [200] * 20


def test_nginx_says_when_to_come_again_if_no_replica_answers_a_packet(tmp_path: Path) -> None:
    """As it does if they refuse to connect."""
    with (
        silent_replica() as one,
        silent_replica() as other,
        nginx(tmp_path, [one, other]) as router,
    ):
        answer = chat_soon(router)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
    assert int(answer.headers["Retry-After"]) > 0


def test_nginx_repeats_no_prompt_that_took_too_long(tmp_path: Path) -> None:
    """Neither asks it another replica, nor does the client: here, the times are 1/300."""
    with replicas() as pair:
        ports = [one.wire.port for one in pair]
        shorter = {"_timeout 600s;": "_timeout 2s;", "_timeout 300s;": "_timeout 1s;"}
        with nginx(tmp_path, ports, changes=shorter) as router:
            for one in pair:
                one.state = SLOW
            answer = chat_soon(router)
            asked = sum(len(one.chats) for one in pair)
            for one in pair:
                one.may_go_on.set()
    assert (answer.status_code, asked) == (503, 1)
    assert answer.headers["x-should-retry"] == "false"


def test_nginx_takes_hundreds_of_chats_at_once(tmp_path: Path) -> None:
    """In each worker, where one takes two connections: by default there are 512."""

    async def chats(url: str) -> list[int]:
        options = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            timeout=DEADLINE_SECONDS, limits=options, trust_env=False
        ) as client:
            asked = [asyncio.create_task(client.post(url, json=BODY)) for _ in range(HUNDREDS)]
            await asyncio.to_thread(until_all_are_there, asked)
            for one in pair:
                one.may_go_on.set()
            return [answer.status_code for answer in await asyncio.gather(*asked)]

    def until_all_are_there(asked: Sequence[asyncio.Task[httpx.Response]]) -> None:
        wait_until(
            lambda: (
                sum(len(one.chats) for one in pair) == HUNDREDS or any(one.done() for one in asked)
            ),
            deadline_seconds=DEADLINE_SECONDS,
            what=lambda: "chats are missing",
        )

    with replicas() as pair:
        ports = [one.wire.port for one in pair]
        with nginx(
            tmp_path, ports, changes={"worker_processes auto;": "worker_processes 1;"}
        ) as router:
            for one in pair:
                one.state = SLOW
            statuses = asyncio.run(chats(f"{router.url}{CHAT}"))
    assert statuses == [200] * HUNDREDS


def chat_soon(router: Server) -> httpx.Response:
    """What a client gets that does not wait for a minute."""
    return httpx.post(f"{router.url}{CHAT}", json=BODY, timeout=HURRY_SECONDS, trust_env=False)


def test_a_proxy_passes_a_stream_on_as_it_comes(proxied: Site) -> None:
    """The first event is there before the replica has made the second."""
    until_both_serve(proxied)
    for one in proxied.replicas:
        one.may_go_on.clear()
    with httpx.stream(
        "POST", f"{proxied.router.url}{CHAT}", json={**BODY, "stream": True}, trust_env=False
    ) as answer:
        events = answer.iter_bytes()
        assert next(events) == b"data: begun\n\n"
        for one in proxied.replicas:
            one.may_go_on.set()
        assert b"".join(events) == b"data: [DONE]\n\n"


@pytest.mark.parametrize("name", PROXIES)
def test_a_proxy_passes_a_websocket_on(name: str, tmp_path: Path) -> None:
    """In both directions."""
    with talking_replica() as port, PROXIES[name](tmp_path, [port, port]) as router:
        router.until(lambda: router.get("/v1/models").status_code == 200, "an answer")
        url = f"{router.url}{REALTIME}".replace("http", "ws")
        with connect(url) as websocket:
            websocket.send("hold fast")
            assert websocket.recv(DEADLINE_SECONDS) == "hold fast"


def test_nginx_keeps_its_connections_to_replicas(tmp_path: Path) -> None:
    """Each of its workers has one to each replica while one request comes after the other."""
    with replicas() as pair:
        ports = [one.wire.port for one in pair]
        one_worker = {"worker_processes auto;": "worker_processes 1;"}
        with nginx(tmp_path, ports, changes=one_worker) as router:
            assert {router.post(CHAT, BODY).status_code for _ in range(20)} == {200}
        assert [one.connections for one in pair] == [1, 1]


@pytest.mark.parametrize("path", ["/metrics", "/v1/../metrics", "/v1/%2e%2e/metrics", "//metrics"])
def test_a_proxy_shows_clients_the_api_alone(proxied: Site, path: str) -> None:
    """However the path is written, no replica is asked for anything else."""
    until_both_serve(proxied)
    before = [len(one.wire.asked) for one in proxied.replicas]
    url = httpx.URL(proxied.router.url).copy_with(raw_path=path.encode())
    assert httpx.get(url, trust_env=False).status_code == 404
    asked = [one.wire.asked[then:] for one, then in zip(proxied.replicas, before, strict=True)]
    assert [one.path for of in asked for one in of if "metrics" in one.path] == []


def until_both_serve(made: Site) -> None:
    """Make both ready, and ask until each has answered a chat since."""
    made.put(READY)
    before = [len(one.chats) for one in made.replicas]

    def both_have() -> bool:
        made.chat()
        now = [one.chats[then:] for one, then in zip(made.replicas, before, strict=True)]
        return all(any(chat.status == 200 for chat in chats) for chats in now)

    wait_until(both_have, deadline_seconds=DEADLINE_SECONDS, what=lambda: "one gets no chats")


@pytest.mark.parametrize("name", ["vllm-router", "Envoy"])
def test_health_checks_move_traffic_within_two_intervals(name: str, tmp_path: Path) -> None:
    """None comes after two bad answers, some comes after two good ones, and no chat is lost."""
    with site(name, tmp_path) as made:
        first, _ = made.replicas
        since = len(first.wire.asked)
        first.state = AWAY
        _ask_until(made, lambda: (seen := first.wire.outage(since)) and seen.bad > INTERVALS)
        first.state = READY
        _ask_until(
            made, lambda: (seen := first.wire.outage(since)) and seen.good_before_first is not None
        )
        outage = first.wire.outage(since, made.chats_at)
    assert outage is not None
    assert outage.is_within(INTERVALS), outage


@pytest.mark.parametrize("name", LEFT_OUT_SECONDS)
def test_one_failure_leaves_a_replica_out_for_at_most_two_intervals(
    name: str, tmp_path: Path
) -> None:
    """The next chat comes after the time of its file, not before, and no chat is lost."""
    with site(name, tmp_path) as made:
        first, _ = made.replicas
        before = len(first.chats)
        first.state = AWAY
        _ask_until(made, lambda: len(first.chats) > before)
        first.state = READY
        longest_seconds = _ask_until(made, lambda: len(first.chats) > before + 1)
        failed, answered = first.chats[before:][:2]
    out_seconds = answered.at - failed.at
    assert (failed.status, answered.status) == (503, 200)
    assert out_seconds >= 0.9 * LEFT_OUT_SECONDS[name]
    # A router that is asked nothing meanwhile cannot ask the replica either.
    assert out_seconds - longest_seconds <= INTERVALS * LEFT_OUT_SECONDS[name]


def _ask_until(made: Site, condition: Callable[[], object]) -> float:
    """Ask one chat after the other, and see that none fails; return how long one took at most."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    longest_seconds = 0.0
    while not condition():
        begun = time.monotonic()
        assert begun < deadline, made.router.log[-2000:]
        assert made.chat().status_code == 200
        longest_seconds = max(longest_seconds, time.monotonic() - begun)
    return longest_seconds
