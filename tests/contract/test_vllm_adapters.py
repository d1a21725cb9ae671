"""What requests that name an unknown model leave behind, and where they are looked for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

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
