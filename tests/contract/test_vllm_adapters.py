"""What requests that name an unknown model leave behind, and where they are looked for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
from vllm.v1.engine.exceptions import EngineDeadError

from holdfast.engine.loras import Loras
from holdfast.engine.proxy import EngineProxy
from holdfast.engine.worker_adapters import deaths_raised
from holdfast.errors import EngineLostError, UsageError
from holdfast.patches.adapters import MAX_NAME_CHARACTERS, bound_adapter_names


class Resolver(LoRAResolver):  # type: ignore[misc]  # vLLM is Any to us
    """Finds the adapter `found`, and knows how many look for one at once."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.most_at_once = 0
        self._at_once = 0

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Look for it, for a while."""
        del base_model_name
        self.asked.append(lora_name)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        for _ in range(5):
            await asyncio.sleep(0)
        self._at_once -= 1
        return LoRARequest(lora_name, 1, "/x") if lora_name == "found" else None


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    """The only one."""
    one = Resolver()
    monkeypatch.setattr(LoRAResolverRegistry, "resolvers", {"one": one})
    bound_adapter_names()
    bound_adapter_names()
    return one


def models() -> Any:
    """vLLM's models, whose engine loads every adapter."""

    async def add_lora(_request: Any) -> bool:
        return True

    engine = SimpleNamespace(
        model_config=SimpleNamespace(model="m"), renderer=None, input_processor=None
    )
    return OpenAIServingModels(SimpleNamespace(**vars(engine), add_lora=add_lora), [])


def test_a_name_leaves_nothing_behind(resolver: Resolver) -> None:
    """Neither one that was found nor another."""

    async def scene() -> None:
        made = models()
        for name in ("found", "a", "b/c"):
            await made.resolve_lora(name)
        assert len(made.lora_resolver_lock) == 0
        assert list(made.lora_requests) == ["found"]

    asyncio.run(scene())
    assert resolver.asked == ["found", "a", "b/c"]


def test_requests_for_one_name_wait_for_each_other(resolver: Resolver) -> None:
    """Until all of them are answered, so that an adapter is loaded once."""

    async def scene() -> None:
        made = models()
        await asyncio.gather(*(made.resolve_lora(name) for name in ["a"] * 3 + ["found"] * 3))
        assert len(made.lora_resolver_lock) == 0

    asyncio.run(scene())
    assert sorted(resolver.asked) == ["a", "a", "a", "found"]
    assert resolver.most_at_once == 2


@pytest.mark.parametrize(
    "name", ["/etc", "..", "../x", "a/../../x", "a/..", "a" * (MAX_NAME_CHARACTERS + 1)]
)
def test_a_name_that_leads_elsewhere_is_not_looked_for(resolver: Resolver, name: str) -> None:
    """It is one of no adapter."""

    async def scene() -> Any:
        return await models().resolve_lora(name)

    assert asyncio.run(scene()).error.code == 404
    assert resolver.asked == []


class Workers:
    """Of an engine that loads no adapter, with this error."""

    model_config = SimpleNamespace(model="m")
    vllm_config = renderer = input_processor = None

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def collective_rpc(self, _method: str, *, args: Any) -> Any:
        del args
        raise self._error


def in_front_of(error: Exception) -> tuple[EngineProxy, Any]:
    """A proxy of such an engine, and vLLM's models with an adapter of the command line."""
    proxy = EngineProxy()
    proxy.use(Workers(error))
    return proxy, OpenAIServingModels(proxy, [], lora_modules=[LoRAModulePath("a", "/a")])


@pytest.mark.parametrize("is_replaced", [False, True])
def test_an_engine_that_dies_during_a_load_is_not_a_wrong_adapter(*, is_replaced: bool) -> None:
    """Nor if none is in use. vLLM answers as if the adapter could not be loaded."""
    proxy, models = in_front_of(EngineDeadError())
    loras = Loras(proxy, is_enabled=True)
    loras.attach(models)
    if is_replaced:
        proxy.use(None)
    with pytest.raises(EngineLostError) as caught:
        asyncio.run(loras.load("b", "/b", is_replacing=False))
    assert caught.value.http_status == 503


def test_an_engine_that_dies_during_the_loads_of_a_start_is_not_a_wrong_flag() -> None:
    """vLLM raises a ValueError for whatever an adapter of the command line fails of."""
    _, models = in_front_of(EngineDeadError())
    with pytest.raises(EngineLostError):
        asyncio.run(loaded_at_start(models))


def test_an_adapter_that_does_not_load_is_a_wrong_one() -> None:
    """At a start and later."""
    proxy, models = in_front_of(RuntimeError("rank 64"))
    loras = Loras(proxy, is_enabled=True)
    loras.attach(models)
    with pytest.raises(UsageError, match="rank 64"):
        asyncio.run(loras.load("b", "/b", is_replacing=False))
    with pytest.raises(ValueError, match="rank 64"):
        asyncio.run(loaded_at_start(models))


async def loaded_at_start(models: Any) -> None:
    """Load the adapters of the command line, as vLLM's application is built."""
    with deaths_raised():
        await models.init_static_loras()
