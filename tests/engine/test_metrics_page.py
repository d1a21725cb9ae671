"""The pages of a real server, as promtool and a router read them."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from endpoint_picker import KV_USAGE, QUEUE, RUNNING, EndpointPicker
from ops.prometheus import promtool
from servers import READY_DEADLINE_SECONDS, Metrics, Server

pytestmark = [pytest.mark.engine, pytest.mark.tools, pytest.mark.shares_engine("demo")]

CLIENTS = 24
"""More than the server admits at once."""


@pytest.mark.parametrize("path", ["/metrics", "/metrics/routing"])
def test_promtool_finds_no_fault_with_our_metrics(demo: Server, path: str) -> None:
    """It reads the page whole, and what it complains of are names that vLLM chose."""
    outcome = promtool("check", "metrics", given=demo.get(path).text)
    complaints = outcome.stdout.splitlines()
    assert outcome.returncode in {0, 3}, outcome.stdout
    assert [line for line in complaints if not line.startswith("vllm:")] == []


def _sum(metrics: Metrics, name: str) -> float:
    return sum(value for (found, _), value in metrics.items() if found == name)


def test_both_pages_describe_the_same_server(demo: Server) -> None:
    """Its load, once nothing happens between two looks, its proof, its cache and its state."""
    names = (QUEUE, RUNNING, KV_USAGE)

    def agree() -> bool:
        pages = (demo.metrics(), demo.metrics("/metrics/routing"))
        full, routing = ([_sum(page, name) for name in names] for page in pages)
        return routing == pytest.approx(full)

    demo.until(agree, "pages that agree")
    full, routing = demo.metrics(), demo.metrics("/metrics/routing")
    assert _sum(routing, "holdfast_ready") == _sum(full, "holdfast_ready") == 1
    proven = _sum(full, "holdfast_probe_proven_tokens")
    assert _sum(routing, "holdfast_proven_tokens") == proven > 0
    (cache,) = (dict(labels) for name, labels in routing if name == "vllm:cache_config_info")
    (whole,) = (dict(labels) for name, labels in full if name == "vllm:cache_config_info")
    assert cache.items() <= whole.items()


def test_all_requests_wait_or_run_on_both_pages(demo: Server) -> None:
    """Those in the front end's queue, too, and each of them once."""
    body = {
        "model": demo.model,
        "prompt": "hold fast",
        "max_tokens": 4000,
        "ignore_eos": True,
    }

    def everything_is_seen() -> bool:
        page = EndpointPicker().read(demo.get("/metrics/routing").text)
        full = demo.metrics()
        waiting = _sum(full, QUEUE)
        return (
            page.running > 0
            and page.queue + page.running == CLIENTS
            and waiting + _sum(full, RUNNING) == CLIENTS
            and waiting == demo.metric("requests_waiting")
            and demo.metric("requests_held") > 0
        )

    async def scene() -> None:
        async with httpx.AsyncClient(base_url=demo.url, timeout=READY_DEADLINE_SECONDS) as client:
            asking = [
                asyncio.create_task(client.post("/v1/completions", json=body))
                for _ in range(CLIENTS)
            ]
            try:
                await asyncio.to_thread(demo.until, everything_is_seen, "every request")
            finally:
                for one in asking:
                    one.cancel()
                await asyncio.wait(asking)

    asyncio.run(scene())
