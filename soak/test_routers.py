"""Replicas behind real routers fail in every way, again and again, and no answer is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from faults import FaultyServer
from holdfast.demo.files import ensure_demo_model
from routed_replicas import (
    Asked,
    Replica,
    a_client,
    asking,
    chat,
    replicas,
    require_routers,
    routers,
    until_answered,
    until_back,
    until_serving,
)

ROUNDS = int(os.environ.get("SOAK_ROUTER_ROUNDS", "30"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
PROMPTS = tuple(f"{number} " * 40 for number in range(12))
CLIENTS = 4
FROZEN_SECONDS = 10.0
INTERVALS = 2
"""Of the health checks of a router, until it has noticed what happened to a replica."""


def _engine_killed(replica: Replica) -> None:
    FaultyServer(replica.server, Path()).process("EngineCore").kill()


def _server_killed(replica: Replica) -> None:
    replica.server.process.kill()
    replica.start()


def _drained(replica: Replica) -> None:
    assert replica.server.stop() == 0
    replica.start()


def _frozen(replica: Replica) -> None:
    """What it has begun takes longer, and everything else goes to the other replica."""
    replica.server.process.send_signal(signal.SIGSTOP)
    time.sleep(FROZEN_SECONDS)
    replica.server.process.send_signal(signal.SIGCONT)


FAULTS: Mapping[str, Callable[[Replica], None]] = {
    "engine killed": _engine_killed,
    "server killed": _server_killed,
    "drained": _drained,
    "frozen": _frozen,
}


@pytest.mark.timeout(3 * 3600)
def test_no_answer_is_lost_behind_a_router(tmp_path: Path) -> None:
    """One replica fails at a time; traffic comes back to it before the next one does."""
    require_routers()
    model = ensure_demo_model(tmp_path / "models")
    chosen = random.Random(SEED)
    with replicas(tmp_path / "replicas", str(model)) as pair, routers(tmp_path, pair) as before:
        url = pair.servers[0].url
        with a_client() as client:
            expected = {prompt: chat(client, url, prompt).text for prompt in PROMPTS}
        for number in range(ROUNDS):
            name, replica = chosen.choice([*FAULTS]), chosen.choice(pair.members)
            since = len(replica.wire.asked)
            with asking(before, PROMPTS, clients=CLIENTS) as asked:
                until_answered(asked)
                FAULTS[name](replica)
                pair.until_ready()
                until_answered(asked)
                # One that was away between two checks only is not an outage.
                if replica.wire.outage(since):
                    outage = until_back(replica, since)
                    assert outage.is_within(INTERVALS), outage
            print(f"{number}: {name}, {_told(asked)}")
            for of in asked.values():
                assert of.lost() == []
                assert of.wrong(expected) == []
                # What a killed server had begun to send, and LiteLLM does not ask for again.
                assert len(of.cut()) <= (CLIENTS if name == "server killed" else 0), of.cut()
            for router in ("round_robin", "litellm"):
                until_serving(before[router], replica.server, PROMPTS)


def _told(asked: Mapping[str, Asked]) -> str:
    return ", ".join(
        f"{len(of.replies)} by {name}, {len(of.cut())} cut" for name, of in asked.items()
    )
