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


class Layer:
    """Takes the weights of an adapter, unless they are for another model."""

    def __init__(self) -> None:
        self.paths: dict[int, str] = {}

    def set_lora(self, index: int, path: str, _: None) -> None:
        """Take them into a slot."""
        if path == "/too-wide":
            raise RuntimeError("its shape is another one")
        self.paths[index] = path


class Slots(LRUCacheLoRAModelManager):  # type: ignore[misc]  # vLLM is Any to us
    """vLLM's manager, for a model with one layer."""

    def __init__(self, slots: int, kept: int) -> None:
        self.lora_config = SimpleNamespace(max_loras=slots, max_cpu_loras=kept)
        self.modules = {"layer": Layer()}
        self.lora_index_to_id: list[int | None] = [None] * slots
        self._registered_adapters = AdapterLRUCache(kept, self.deactivate_adapter)
        self._active_adapters = AdapterLRUCache(slots, self._deactivate_adapter)

    def _get_lora_layer_weights(self, lora: Any, _module: str) -> Any:
        return SimpleNamespace(lora_a=lora.path, lora_b=None)

    def _add_adapter(self, lora: Any) -> None:
        self._registered_adapters[lora.id] = lora


class Worker(LRUCacheWorkerLoRAManager):  # type: ignore[misc]  # vLLM is Any to us
    """vLLM's manager of a worker, with adapters that have no files."""

    def __init__(self, slots: int, kept: int | None = None) -> None:
        self._adapter_manager = Slots(slots, kept or slots)

    def _load_adapter(self, lora_request: LoRARequest) -> Any:
        if lora_request.lora_path == "/truncated":
            raise ValueError("its files are truncated")
        return SimpleNamespace(id=lora_request.lora_int_id, path=lora_request.lora_path)

    @property
    def model_runner(self) -> Any:
        """What has this one in vLLM's worker."""
        return SimpleNamespace(lora_manager=self)

    def add_lora(self, request: LoRARequest) -> bool:
        """What vLLM's worker passes on to this one."""
        return bool(self.add_adapter(request))

    def load(self, *numbers: int) -> None:
        """Load adapters, as an operator does."""
        for number in numbers:
            load(self, LoRARequest(str(number), number, "/x"))

    def step(self, *numbers: int) -> None:
        """Prepare a step with requests for these adapters."""
        requests = [LoRARequest(str(number), number, "/x") for number in numbers]
        # A list, whose order a test can choose, in place of a set.
        self.set_active_adapters(requests, None)
        assert self.on_device() >= set(numbers)

    def replace(self, number: int, path: str) -> None:
        """Replace an adapter, or load it."""
        load(self, LoRARequest(str(number), number, path, load_inplace=True))

    def paths(self) -> dict[int, str]:
        """Where each adapter that is loaded came from."""
        return {one: lora.path for one, lora in self._adapter_manager.list_adapters().items()}

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
    worker.replace(1, "/y")
    worker.step(2)
    worker.step(3)
    assert worker.on_device() == {1, 3}


@pytest.mark.parametrize("path", ["/truncated", "/too-wide"])
def test_a_worker_that_cannot_load_a_replacement_keeps_what_it_had(path: str) -> None:
    """Whether vLLM finds out before it has evicted the adapter, or after."""
    worker = Worker(2)
    worker.load(1, 2)
    worker.pin_adapter(1)
    with pytest.raises((ValueError, RuntimeError), match="its"):
        worker.replace(1, path)
    assert worker.paths() == {1: "/x", 2: "/x"}
    worker.step(1)
    worker.step(3)
    assert worker.on_device() == {1, 3}
    assert set(worker._adapter_manager.modules["layer"].paths.values()) == {"/x"}


@pytest.mark.parametrize("path", ["/truncated", "/too-wide"])
def test_a_worker_that_cannot_load_an_adapter_has_nothing_of_it(path: str) -> None:
    """No later step finds half of it."""
    worker = Worker(2)
    worker.load(1)
    with pytest.raises((ValueError, RuntimeError), match="its"):
        worker.replace(2, path)
    assert worker.paths() == {1: "/x"}
    assert worker.on_device() == {1}
