"""Whichever adapters are pinned, a step has every slot that the scheduler promised it."""

from __future__ import annotations

from itertools import combinations, permutations
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from holdfast.patches.adapter_slots import yield_pinned_slots
from holdfast.worker.adapters import load


class Slots(LRUCacheLoRAModelManager):  # type: ignore[misc]  # vLLM is Any to us
    """vLLM's manager, for a model without layers."""

    def __init__(self, slots: int, kept: int) -> None:
        self.lora_config = SimpleNamespace(max_loras=slots, max_cpu_loras=kept)
        self.modules: dict[str, Any] = {}
        self.lora_index_to_id: list[int | None] = [None] * slots
        self._registered_adapters = AdapterLRUCache(kept, self.deactivate_adapter)
        self._active_adapters = AdapterLRUCache(slots, self._deactivate_adapter)

    def _add_adapter(self, lora: Any) -> None:
        self._registered_adapters[lora.id] = lora


class Worker(LRUCacheWorkerLoRAManager):  # type: ignore[misc]  # vLLM is Any to us
    """vLLM's manager of a worker, with adapters that have no files."""

    def __init__(self, slots: int, kept: int | None = None) -> None:
        self._adapter_manager = Slots(slots, kept or slots)

    def _load_adapter(self, lora_request: LoRARequest) -> Any:
        return SimpleNamespace(id=lora_request.lora_int_id)

    @property
    def model_runner(self) -> Any:
        """What has this one in vLLM's worker."""
        return SimpleNamespace(lora_manager=self)

    def add_lora(self, request: LoRARequest) -> bool:
        """What vLLM's worker passes on to this one."""
        return bool(self.add_adapter(request))

    def load(self, *numbers: int, is_replacing: bool = False) -> None:
        """Load adapters, as an operator does."""
        for number in numbers:
            load(self, LoRARequest(str(number), number, "/x", load_inplace=is_replacing))

    def step(self, *numbers: int) -> None:
        """Prepare a step with requests for these adapters."""
        requests = [LoRARequest(str(number), number, "/x") for number in numbers]
        # A list, whose order a test can choose, in place of a set.
        self.set_active_adapters(requests, None)
        assert self.on_device() >= set(numbers)

    def on_device(self) -> set[int]:
        """The adapters that have a slot."""
        return {number for number in self._adapter_manager.lora_index_to_id if number}


@pytest.fixture(autouse=True)
def patched() -> None:
    """As in a worker, twice."""
    yield_pinned_slots()
    yield_pinned_slots()


@pytest.mark.parametrize("kept", [1, 2])
def test_a_pinned_adapter_leaves_the_only_slot_to_a_step(kept: int) -> None:
    """An exception in a step would end the engine. It returns when a request needs it."""
    worker = Worker(1, kept)
    worker.load(1, 2)
    worker.pin_adapter(2)
    worker.step(1)
    worker.pin_adapter(2)
    assert worker.on_device() == {1}
    worker.step(2)
    assert worker.on_device() == {2}


@pytest.mark.parametrize("kept", [2, 3, 5])
@pytest.mark.parametrize("pinned", [(1,), (1, 2)])
def test_a_step_keeps_all_of_its_own_adapters(pinned: tuple[int, ...], kept: int) -> None:
    """Whichever they are, and in which order they come."""
    for first, second in permutations(combinations(range(1, 5), 2), 2):
        for order in permutations(second):
            worker = Worker(2, kept)
            worker.load(*pinned)
            for number in pinned:
                worker.pin_adapter(number)
            worker.step(*first)
            worker.step(*order)


def test_a_pinned_adapter_is_the_last_to_leave() -> None:
    """Steps and loads that leave it a slot use the others, for as long as they like."""
    worker = Worker(2)
    worker.load(1)
    worker.pin_adapter(1)
    for use in (worker.step, worker.load, worker.step):
        for number in (2, 3, 4):
            use(number)
            assert worker.on_device() == {1, number}
        worker.step(2, 3)
        worker.step(1)


def test_there_are_as_many_pins_as_slots() -> None:
    """One more is refused, and changes nothing; so is one of what is not there."""
    worker = Worker(2, 3)
    worker.load(1, 2, 3)
    worker.pin_adapter(1)
    worker.pin_adapter(2)
    worker.pin_adapter(2)
    with pytest.raises(RuntimeError, match="2 adapters are pinned"):
        worker.pin_adapter(3)
    with pytest.raises(ValueError, match="4 is not loaded"):
        worker.pin_adapter(4)
    assert worker.on_device() == {1, 2}


def test_what_is_removed_is_not_pinned_any_more() -> None:
    """Also if it had lost its slot, so that another one can be pinned."""
    worker = Worker(1, 2)
    worker.load(1)
    worker.pin_adapter(1)
    worker.step(2)
    worker.remove_adapter(1)
    worker.step(2)
    worker.pin_adapter(2)
    assert worker.on_device() == {2}


def test_a_replaced_adapter_stays_pinned() -> None:
    """It is the same one to an operator."""
    worker = Worker(2)
    worker.load(1)
    worker.pin_adapter(1)
    worker.load(1, is_replacing=True)
    worker.step(2)
    worker.step(3)
    assert worker.on_device() == {1, 3}
