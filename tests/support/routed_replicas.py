"""Two replicas that share a state directory, and real routers in front of them."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from keep_alive import NO_KEEP_ALIVE
from ops.prometheus import TOOLS, tool
from ops.queries import ROOT
from servers import KV_CACHE_BYTES, Server, forkable, reserved_port, running, wait_until
from wire_log import Outage, WireLog, wire_log

FILES = ROOT / "deploy" / "routers"
MODEL = "routed"
CHAT = "/v1/chat/completions"
HEALTH = "/readyz"
FLAGS = (
    "--enforce-eager",
    f"--kv-cache-memory-bytes={KV_CACHE_BYTES}",
    "--max-num-seqs=4",
    "--max-num-batched-tokens=1024",
    "--dtype=float32",
    "--probe=quick",
    "--max-engine-restarts=20",
    "--max-waiting=16",
    "--drain-timeout=120",
    f"--served-model-name={MODEL}",
)
QUICK = ("--health-check-interval-secs=1", "--cb-timeout-duration-secs=1")
"""What makes vllm-router notice within seconds; it wins over what the script asks for."""
WATCHED = ("--policy=round_robin", "--health-check-interval-secs=2")
"""Several chats come between two health checks, or one could not tell after which of them."""
REQUEST_SECONDS = 300.0
DEADLINE_SECONDS = 120.0


def flags_behind_a_router() -> list[str]:
    """Return the flags of the values that are shipped for the chart."""
    return list(yaml.safe_load((FILES / "chart-values.yaml").read_text())["extraArgs"])


@dataclass
class Replica:
    """A server that can be started again where it was."""

    directory: Path
    """Shared with the other one, as their state is."""
    model: str
    port: int
    wire: WireLog
    """What the router `watched` asks it for."""
    server: Server = field(init=False)
    _life: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """Start it, in place of one that has ended."""
        self.close()
        self.server = self._life.enter_context(
            running(
                self.directory,
                self.model,
                *FLAGS,
                *flags_behind_a_router(),
                environment=forkable(),
                port=self.port,
            )
        )

    def close(self) -> None:
        """End it; no process of it is left."""
        self._life.close()


@dataclass(frozen=True, slots=True)
class Replicas:
    """Two servers of one model that share a state directory."""

    members: Sequence[Replica]

    @property
    def servers(self) -> list[Server]:
        """Those that were started last."""
        return [member.server for member in self.members]

    def until_ready(self) -> None:
        """Wait until both serve."""
        for server in self.servers:
            server.until_ready()

    @property
    def deaths(self) -> float:
        """How many engines have died so far."""
        return sum(server.metric("engine_deaths_total") for server in self.servers)

    @property
    def answers(self) -> list[float]:
        """How many chats each of them has answered so far."""
        return [answered(server) for server in self.servers]


@contextmanager
def replicas(directory: Path, model: str) -> Iterator[Replicas]:
    """Two replicas that are being started; no process of them is left at the end."""
    with ExitStack() as stack:
        members = []
        for _ in range(2):
            port = stack.enter_context(reserved_port())
            wire = stack.enter_context(wire_log(port, health=HEALTH, work=CHAT))
            members.append(Replica(directory, model, port, wire))
        for member in members:
            stack.callback(member.close)
            member.start()
        yield Replicas(members)


def require_routers() -> None:
    """Skip the test where there are none, before any engine is started."""
    for name in ("vllm-router", "litellm"):
        tool(name)


def answered(server: Server) -> float:
    """Return how many chats a server has answered."""
    return sum(
        value
        for (name, labels), value in server.metrics().items()
        if name == "http_requests_total" and {("handler", CHAT), ("status", "2xx")} <= labels
    )


@contextmanager
def vllm_router(directory: Path, urls: Sequence[str], *flags: str) -> Iterator[Server]:
    """The router of the shipped script, with flags that win over those of the script."""
    tool("vllm-router")
    with reserved_port() as port, reserved_port() as metrics_port:
        metrics = f"--prometheus-port={metrics_port}"
        command = ("sh", str(FILES / "vllm-router.sh"))
        arguments = (*urls, metrics, *QUICK, *flags)
        with _router(directory, *arguments, command=command, port=port) as router:
            router.until(lambda: router.get("/v1/models").status_code == 200, "the router")
            yield router


@contextmanager
def litellm(directory: Path, urls: Sequence[str]) -> Iterator[Server]:
    """LiteLLM's proxy as shipped, with these addresses and our model in its configuration."""
    command = (tool("litellm"),)
    configuration = yaml.safe_load((FILES / "litellm.yaml").read_text())
    for entry, url in zip(configuration["model_list"], urls, strict=True):
        entry["model_name"] = MODEL
        entry["litellm_params"]["model"] = f"hosted_vllm/{MODEL}"
        entry["litellm_params"]["api_base"] = f"{url}/v1"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "litellm.yaml"
    path.write_text(yaml.safe_dump(configuration))
    with (
        reserved_port() as port,
        _router(directory, f"--config={path}", command=command, port=port) as router,
    ):
        yield router


@contextmanager
def routers(directory: Path, pair: Replicas) -> Iterator[dict[str, Server]]:
    """Those of vllm-router by policy, and LiteLLM's proxy, once they and the replicas are ready.

    `watched` is one more, with round robin; the replicas note what it asks.
    """
    wires = [member.wire.url for member in pair.members]
    urls = [server.url for server in pair.servers]
    with ExitStack() as stack:
        proxy = stack.enter_context(litellm(directory / "litellm", urls))
        pair.until_ready()
        of_policy = {
            name: stack.enter_context(vllm_router(directory / name, urls, f"--policy={name}"))
            for name in ("round_robin", "cache_aware")
        }
        watched = stack.enter_context(vllm_router(directory / "watched", wires, *WATCHED))
        proxy.until(lambda: proxy.get("/health/liveliness").status_code == 200, "LiteLLM")
        yield {**of_policy, "watched": watched, "litellm": proxy}


@contextmanager
def _router(
    directory: Path, *arguments: str, command: Sequence[str], port: int
) -> Iterator[Server]:
    environment = {
        "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}",
        # Else LiteLLM fetches a list of prices.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    with running(
        directory, *arguments, environment=environment, command=command, port=port
    ) as router:
        yield router


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client got for one chat."""

    prompt: str
    status: int
    """0 if the connection broke."""
    text: str = ""
    """The answer or, where there is none, what was said instead."""
    headers: Mapping[str, str] = field(default_factory=dict)
    is_cut: bool = False
    """Whether it is LiteLLM's own error, with the status 200 of a replica that broke off."""


@dataclass
class Asked:
    """What the clients of one router have got."""

    replies: list[Reply] = field(default_factory=list)

    def lost(self) -> list[Reply]:
        """Every chat without an answer."""
        return [reply for reply in self.replies if reply.status != 200]

    def cut(self) -> list[Reply]:
        """Every chat whose answer was broken off behind LiteLLM."""
        return [reply for reply in self.replies if reply.is_cut]

    def wrong(self, expected: Mapping[str, str]) -> list[Reply]:
        """Every answer that differs from that of an undisturbed server."""
        whole = [reply for reply in self.replies if reply.status == 200 and not reply.is_cut]
        return [reply for reply in whole if reply.text != expected[reply.prompt]]


def chat(client: httpx.Client, url: str, prompt: str, *, max_tokens: int = 24) -> Reply:
    """Ask for a greedy answer."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    try:
        response = client.post(f"{url}{CHAT}", json=body)
    except httpx.TransportError as error:
        return Reply(prompt, 0, repr(error))
    if response.status_code != 200:
        return Reply(prompt, response.status_code, response.text, dict(response.headers))
    body = response.json()
    if not (choices := body.get("choices")):
        is_cut = body.get("error", {}).get("code") == "200"
        return Reply(prompt, 200, response.text, dict(response.headers), is_cut=is_cut)
    return Reply(prompt, 200, str(choices[0]["message"]["content"]))


def a_client() -> httpx.Client:
    """Return a client that waits as long as it takes."""
    return httpx.Client(timeout=REQUEST_SECONDS, trust_env=False, limits=NO_KEEP_ALIVE)


@contextmanager
def asking(
    routers: Mapping[str, Server], prompts: Sequence[str], *, clients: int, max_tokens: int = 24
) -> Iterator[dict[str, Asked]]:
    """Let clients ask every router without a pause; on leaving, wait for all answers."""
    asked = {name: Asked() for name in routers}
    stopping = threading.Event()

    def ask_on(name: str, seed: int) -> None:
        chosen = random.Random(seed)
        with a_client() as client:
            while not stopping.is_set():
                url = routers[name].url
                reply = chat(client, url, chosen.choice(prompts), max_tokens=max_tokens)
                asked[name].replies.append(reply)

    threads = [
        threading.Thread(target=ask_on, args=(name, seed))
        for name in routers
        for seed in range(clients)
    ]
    for thread in threads:
        thread.start()
    try:
        yield asked
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def until_answered(asked: Mapping[str, Asked], *, more: int = 4) -> None:
    """Wait until every router has passed on this many more answers."""
    before = {name: len(of.replies) for name, of in asked.items()}
    wait_until(
        lambda: all(len(of.replies) >= before[name] + more for name, of in asked.items()),
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: f"{ {name: len(of.replies) for name, of in asked.items()} } answers",
    )


def until_serving(router: Server, server: Server, prompts: Sequence[str]) -> None:
    """Ask a router until a replica has answered one of the chats."""
    before = answered(server)

    def has_answered() -> bool:
        with a_client() as client:
            for prompt in prompts:
                assert chat(client, router.url, prompt).status == 200
        return answered(server) > before

    wait_until(
        has_answered,
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: f"no traffic returns: {router.log[-2000:]}",
    )


def until_bad(replica: Replica, since: int, *, more_than: int) -> None:
    """Wait until the watched router has heard that a replica is away, more often than this."""
    wait_until(
        lambda: (found := replica.wire.outage(since)) and found.bad > more_than,
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: f"the router does not notice: {replica.wire.outage(since)}",
    )


def until_back(replica: Replica, since: int) -> Outage:
    """Wait until the watched router sends chats again to a replica that was away."""

    def outage() -> Outage | None:
        found = replica.wire.outage(since)
        return found if found and found.good_before_first is not None else None

    return wait_until(
        outage,
        deadline_seconds=DEADLINE_SECONDS,
        what=lambda: f"no traffic returns: {replica.wire.outage(since)}",
    )
