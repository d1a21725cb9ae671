"""What the admin routes take for granted of vLLM."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm.config.profiler import ProfilerConfig
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.rl.online import api_router
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.abstract import SLEEP_TAGS
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from holdfast import labels
from holdfast.engine.proxy import EngineProxy
from holdfast.worker.rpc import CALLABLE


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        (AsyncLLM.sleep, {"level", "mode"}),
        (AsyncLLM.wake_up, {"tags"}),
        (AsyncLLM.start_profile, {"profile_prefix"}),
        (AsyncLLM.collective_rpc, {"method", "args"}),
        (Worker.save_sharded_state, {"path", "pattern", "max_size"}),
        (Worker.add_lora, {"lora_request"}),
        (Worker.remove_lora, {"lora_id"}),
        (Worker.pin_lora, {"lora_id"}),
        (OpenAIServingModels.load_lora_adapter, {"request"}),
        (OpenAIServingModels.unload_lora_adapter, {"request"}),
    ],
    ids=lambda given: getattr(given, "__qualname__", ""),
)
def test_what_is_called_takes_what_it_is_given(
    method: Callable[..., Any], parameters: set[str]
) -> None:
    """By these names."""
    assert parameters <= set(inspect.signature(method).parameters)


@pytest.mark.parametrize("name", sorted(CALLABLE))
def test_every_worker_has_what_it_may_be_asked_for(name: str) -> None:
    """The CPU's inherits it."""
    assert callable(getattr(Worker, name))
    assert callable(getattr(CPUWorker, name))


def test_the_parts_that_sleep_are_those_that_can_be_woken() -> None:
    """vLLM wakes nothing if a tag is not known."""
    assert SLEEP_TAGS == labels.SLEEP_TAGS


def test_a_sleep_of_the_cpu_frees_nothing() -> None:
    """Its worker says so and goes on, so that the server must refuse it."""
    assert "not supported on CPU" in inspect.getsource(CPUWorker.sleep)


def test_the_front_end_can_be_left_out_of_a_profile() -> None:
    """Its own profile ends the process."""
    profiler = ProfilerConfig(profiler="torch", torch_profiler_dir="/traces")
    assert profiler.should_profile_frontend
    profiler.ignore_frontend = True
    assert not profiler.should_profile_frontend


def test_a_lora_request_is_made_of_plain_fields() -> None:
    """They cross to the workers one by one."""
    request = LoRARequest("a", 1, "/a")
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    assert LoRARequest(**fields) == request
    assert all(isinstance(value, str | int | bool | None) for value in fields.values())


async def _use(proxy: EngineProxy, name: str) -> None:
    async for _ in proxy.requests.run("generate", {"prompt": name, "request_id": name}):
        pass


def test_a_call_without_ids_aborts_all_requests() -> None:
    """Those that wait for an engine, too; vLLM's route asks the proxy for a part of an AsyncLLM."""
    asked: list[list[str]] = []

    class Engine:
        async def abort(self, names: list[str]) -> None:
            asked.append(names)

    async def live() -> None:
        proxy, app = EngineProxy(), FastAPI()
        proxy._current = Engine()
        app.include_router(api_router.router)
        app.state.engine_client = proxy
        waiting = [asyncio.create_task(_use(proxy, name)) for name in ("a", "b")]
        async with asyncio.timeout(10):
            while proxy.requests.held < 2:  # noqa: ASYNC110 - the loop is all there is
                await asyncio.sleep(0)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            answer = await client.post("/abort_requests", json={})
        assert answer.json() == {"status": "aborted", "aborted": 2}
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert all("was aborted" in str(end) for end in ends)

    asyncio.run(live())
    assert asked == [["a", "b"]]
