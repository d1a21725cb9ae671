"""What the admin routes take for granted of vLLM."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from vllm.config.profiler import ProfilerConfig
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.abstract import SLEEP_TAGS
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from holdfast import labels
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
