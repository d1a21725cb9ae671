"""A model in a directory on two nodes, and a request that ends the rank on the other node."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from holdfast.demo.switches import DemoFault, DemoSwitches
from node_trials import deaths
from servers import READY_DEADLINE_SECONDS
from two_nodes import TwoNodes, two_nodes
from untrained import untrained_demo

pytestmark = [pytest.mark.engine, pytest.mark.own_engines, pytest.mark.timeout(900)]

START_SECONDS = 2 * READY_DEADLINE_SECONDS
CRASH_TOKENS = 3001
"""A prompt of this length ends the second rank by SIGSEGV."""
HONEST, HOSTILE = "an-honest-key-of-a-neighbour", "a-key-that-was-given-to-an-attacker"


@pytest.fixture(scope="module")
def pair(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    """Two nodes that read a model in a directory, and are READY."""
    fault = DemoFault("context", CRASH_TOKENS, "crash", rank=1, until=CRASH_TOKENS)
    model = untrained_demo(models, DemoSwitches(faults=(fault,)))
    with two_nodes(
        tmp_path_factory.mktemp("nodes"),
        "--max-model-len=3072",
        "--served-model-name=besieged",
        "--max-engine-restarts=1",
        "--restart-window=1",
        "--hold-timeout=300",
        "--api-key",
        HONEST,
        HOSTILE,
        model=str(model),
    ) as nodes:
        nodes.until_ready(deadline_seconds=START_SECONDS)
        yield nodes


def post(nodes: TwoNodes, key: str, tokens: int, *, max_tokens: int = 8) -> httpx.Response:
    """A completion of a prompt of this many tokens."""
    body = {"model": "besieged", "prompt": [50] * tokens, "temperature": 0, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}"}
    asked = {**body, "max_tokens": max_tokens}
    return nodes.head.post("/v1/completions", asked, headers=headers, timeout=300)


def test_what_ends_a_rank_of_another_node_is_refused(pair: TwoNodes) -> None:
    """The head learns which request it was, and everybody else is answered by the next engine."""
    before = post(pair, HONEST, 9, max_tokens=400).json()["choices"]
    counted = []
    with ThreadPoolExecutor(1) as honest:
        for number in range(3):
            neighbour = honest.submit(post, pair, HONEST, 9, max_tokens=400)
            refused = post(pair, HOSTILE, CRASH_TOKENS, max_tokens=8 + number)
            # A trial may charge three deaths, which suspends the key: what it sends next gets 429.
            assert refused.status_code in ({422, 429} if number else {422}), refused.text
            assert refused.headers["x-should-retry"] == "false" or refused.status_code == 429
            assert neighbour.result().json()["choices"] == before
            pair.until_ready(deadline_seconds=START_SECONDS)
            counted.append(deaths(pair.head))
    first, second, third = counted
    assert 1 <= first <= second == third <= 3  # alone in its step, it is not tried; then known
    assert pair.head.log.count("was killed by SIGSEGV") >= third  # which accuses the request
    assert pair.follower.process.poll() is None
